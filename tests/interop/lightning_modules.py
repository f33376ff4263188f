"""Lightning modules that train in ways of their own, and a fit of them."""

import torch
from lightning.pytorch import LightningModule

from hookcb.adapters.lightning import HookcbCallback
from tests.interop.trainers import Net, lightning_trainer, loaders, loss_func, optimizer


class CallsParts(LightningModule):
    """Calls its net, not itself."""

    def __init__(self):
        super().__init__()
        self.net = Net().net

    def training_step(self, batch, batch_idx):
        return loss_func(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self):
        return optimizer(self)


class CallsItself(CallsParts):
    """The usual way."""

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return loss_func(self(batch[0]), batch[1])

    validation_step = training_step


class HasNanLoss(CallsItself):
    """Computes a loss that is NaN."""

    def training_step(self, batch, batch_idx):
        return (-1 - super().training_step(batch, batch_idx)).erfinv()


class TwoOptimizers(CallsItself):
    """Steps by hand, a layer by each optimizer."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]

    def training_step(self, batch, batch_idx):
        for opt in self.optimizers():
            opt.zero_grad()
            self.manual_backward(loss_func(self(batch[0]), batch[1]))
            opt.step()


def fit(make, *cbs, **options):
    """Trains a module of this kind; returns our callback."""
    callback = HookcbCallback(*cbs)
    callback.module = make()
    callback.trainer = lightning_trainer(callback, **options)
    callback.trainer.fit(callback.module, *loaders())
    return callback
