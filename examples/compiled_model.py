"""Watch a compiled model: watch what torch.compile returned, before its first call."""

import torch
from torch import nn

from hookcb import ActivationStats, GradientHealth, watch

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x[:, :5].sum(dim=1) > 0).long()
net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
# "aot_eager" starts fast and needs no compiler; omit backend for "inductor", which makes the model fast
model = torch.compile(net, backend="aot_eager")

with watch(model, optimizer, ActivationStats(include_paramless=True), GradientHealth()) as w:
    for _ in range(3):
        for xb, yb in zip(x.split(64), y.split(64), strict=True):
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

print(w.activation_stats.report())
print(w.gradient_health.report())
print(str(w.coverage))
