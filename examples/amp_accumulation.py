"""Mixed precision with a GradScaler, one step per four batches: gradients are read complete and unscaled."""

import torch
from torch import nn

from hookcb import ActivationStats, GradientHealth, watch

torch.manual_seed(0)
x = torch.randn(1024, 20)
y = (x[:, :5].sum(dim=1) > 0).long()
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # "cuda" on a GPU
n_batches = 4

with watch(model, optimizer, ActivationStats(include_paramless=True), GradientHealth(), scaler=scaler) as w:
    for _ in range(3):
        for i, (xb, yb) in enumerate(zip(x.split(32), y.split(32), strict=True)):
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(xb), yb) / n_batches
            scaler.scale(loss).backward()
            if (i + 1) % n_batches == 0:
                scaler.unscale_(optimizer)
                w.begin_step(optimizer)  # reads the gradients before they are clipped
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)  # skipped if a gradient is inf or NaN
                scaler.update()
                optimizer.zero_grad()
        w.end_epoch()

print(w.activation_stats.report())  # for each batch, in float16
print(w.gradient_health.report())  # for each step
print(
    "scale of the last step", w.gradient_health.step_series("scale")[-1], "skipped", w.gradient_health.skipped
)
