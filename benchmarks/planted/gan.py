"""A small GAN: its parts, its data, and its two steps per batch."""

from collections.abc import Iterable

import torch
from case import Callbacks, Run
from nets import stack
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from hookcb import watch


class Gan(nn.Module):
    """A generator of points in the plane, and a discriminator of real and generated points."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.generator = stack(4, width, width, 2)
        self.discriminator = stack(2, width, width, 1, act=lambda: nn.LeakyReLU(0.2))

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)


def cloud(n: int, rng: torch.Generator) -> Tensor:
    """Points `(n, 2)` of a slanted normal distribution around (2, -1)."""
    slant = torch.tensor([[0.6, 0.3], [0.0, 0.4]])
    return torch.tensor([2.0, -1.0]) + torch.randn(n, 2, generator=rng) @ slant


def apart(a: Tensor, b: Tensor) -> float:
    """Distance between two sets of points, from their means and standard deviations."""
    return ((a.mean(0) - b.mean(0)).norm() + (a.std(0) - b.std(0)).norm()).item()


def loss_of_discriminator(gan: Gan, x: Tensor, fake: Tensor) -> Tensor:
    """Cross-entropy of classifying real and generated points."""
    on_real, on_fake = gan.discriminator(x), gan.discriminator(fake.detach())
    return -F.logsigmoid(on_real).mean() - F.logsigmoid(-on_fake).mean()


def loss_of_generator(gan: Gan, fake: Tensor, minimax: bool) -> Tensor:
    """Loss of the generator; with `minimax`, the negative loss of the discriminator."""
    on_fake = gan.discriminator(fake)
    return F.logsigmoid(-on_fake).mean() if minimax else -F.logsigmoid(on_fake).mean()


def train_gan(
    gan: Gan,
    opts: tuple[Optimizer, Optimizer],
    real: Iterable[Tensor],
    cbs: Callbacks,
    seed: int,
    minimax: bool = False,
) -> Run:
    """Train the discriminator and the generator in turn in one watch, with an optimizer each.

    No loss shows whether a GAN learns, so `losses` has the distance between generated and real points.
    """
    opt_d, opt_g = opts
    torch.manual_seed(seed)
    with watch(gan, opts, *cbs) as w:
        run = Run(w, [], model=gan)
        for x in real:
            fake = gan(torch.randn(len(x), 4))
            w.report_loss(loss_of_discriminator(gan, x, fake)).backward()
            opt_d.step()
            opt_d.zero_grad()
            w.report_loss(loss_of_generator(gan, fake, minimax)).backward()
            opt_g.step()
            opt_g.zero_grad()
            opt_d.zero_grad()
            run.losses.append(apart(fake.detach(), x))
    return run
