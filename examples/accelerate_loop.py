"""Watch an Accelerate loop; also runs with `torchrun --nproc-per-node=2 examples/accelerate_loop.py`."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookcb import ActivationStats, GradientHealth, watch

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x[:, :5].sum(dim=1) > 0).long()
net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.Adam(net.parameters(), lr=1e-2), DataLoader(TensorDataset(x, y), batch_size=32)
)

# watch the model that prepare returned; each process records its own share of the batches
with watch(model, optimizer, ActivationStats(include_paramless=True), GradientHealth()) as w:
    for _ in range(3):
        for xb, yb in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(xb), yb)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    w.begin_step(optimizer)  # reads the gradients before they are clipped
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        w.end_epoch()

if accelerator.is_main_process:
    print(w.activation_stats.report())
    print(w.gradient_health.report())
    print(str(w.coverage))
accelerator.end_training()
