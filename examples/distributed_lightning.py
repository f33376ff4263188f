"""Lightning on two processes, torchrun --nproc_per_node 2 distributed_lightning.py, or by plain python."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from hookcb import Diagnose
from hookcb.adapters.lightning import HookcbCallback
from hookcb.cli.demo import build_model, digits


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = build_model()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
inside = HookcbCallback(Diagnose(show=False))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = Trainer(max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", callbacks=[inside], **quiet)
trainer.fit(Classifier(), digits(batch_size=32).train)
# one verdict for all ranks, which each of them has; Diagnose() would print it on rank 0
print(f"rank {trainer.global_rank} of {trainer.world_size}: {inside.diagnose()}")
