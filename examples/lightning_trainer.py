"""Lightning's Trainer with hookcb's callbacks; `pip install 'hookcb[lightning]'`."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookcb import ActivationStats, GradientHealth
from hookcb.adapters.lightning import HookcbCallback


class Classifier(LightningModule):
    """A small network with 20 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x[:, :5].sum(dim=1) > 0).long()
inside = HookcbCallback(ActivationStats(include_paramless=True), GradientHealth())
trainer = Trainer(
    max_epochs=3,
    accelerator="cpu",
    gradient_clip_val=1.0,  # gradients are read before clipping, and after it as clipped_norm
    callbacks=[inside],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(TensorDataset(x, y), batch_size=64))

print(inside.activation_stats.report())
print(inside.gradient_health.report())
