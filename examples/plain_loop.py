"""Watch a training loop of your own: one line, and the loop stays unchanged."""

import torch
from torch import nn

from hookcb import ActivationStats, GradientHealth, watch

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x[:, :5].sum(dim=1) > 0).long()
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

with watch(model, optimizer, ActivationStats(include_paramless=True), GradientHealth()) as w:
    for _ in range(3):
        for xb, yb in zip(x.split(64), y.split(64), strict=True):
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        w.end_epoch()  # optional: where an epoch ends cannot be seen from outside

print(w.activation_stats.report())
verdict = w.diagnose()
print(verdict)
print(w.gradient_health.report(verdict=verdict))
print(str(w.coverage))  # what was seen, what was not, and why
