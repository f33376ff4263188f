"""Watch a GAN: two networks with an optimizer each, and one `watch` for each network."""

import torch
from torch import nn

from hookcb import ActivationStats, GradientHealth, watch

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
bce = nn.functional.binary_cross_entropy_with_logits


def circle(n):
    """Points on a circle, `(n, 2)`."""
    angles = 2 * torch.pi * torch.rand(n)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


with (
    watch(generator, g_optimizer, ActivationStats(include_paramless=True), GradientHealth()) as g,
    # called on real and generated points before its backward: #0 and #1 of a batch; then for the generator
    watch(critic, c_optimizer, ActivationStats(include_paramless=True), GradientHealth()) as c,
):
    for _ in range(100):
        made = generator(torch.randn(64, 4))
        real, fake = critic(circle(64)), critic(made.detach())
        (bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))).backward()
        c_optimizer.step()
        c_optimizer.zero_grad()

        fooled = critic(made)
        bce(fooled, torch.ones_like(fooled)).backward()
        g_optimizer.step()
        g_optimizer.zero_grad()
        c_optimizer.zero_grad()  # the generator's backward also reached the critic

print("generator", g.gradient_health.report(), g.activation_stats.report(), sep="\n")
print("critic", c.gradient_health.report(), c.activation_stats.report(), sep="\n")
