"""HookcbCallback: callbacks of hookcb in a Trainer of Lightning."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from hookcb.adapters.base import Attached, no_package
from hookcb.adapters.lightning_fit import LightningFit
from hookcb.core.randomness import random_kept
from hookcb.gradients.steps import scale_of

try:
    with random_kept():
        from lightning.pytorch import Callback as LightningCallback
except ModuleNotFoundError:
    try:
        with random_kept():
            from pytorch_lightning import Callback as LightningCallback
    except ModuleNotFoundError:
        raise no_package("lightning", "lightning") from None


class HookcbCallback(Attached, LightningCallback):
    """Has callbacks of hookcb follow a fit of Lightning's Trainer, from its own hooks.

    Batches, losses, epochs and validations are the trainer's. Gradients are read before Lightning clips them,
    and unscaled. `pred` is what the module returns where `training_step` calls it, `self(x)`. A callback that
    ends the fit sets `trainer.should_stop`. Hooks come off when the fit ends, also by an exception.

    Args:
        *more: callbacks, one by one or in lists; they become attributes, `callback.activation_stats`.
        cbs: callbacks too, as a `Learner` takes them.

    Raises:
        TypeError, ValueError: where one is no callback, or its name is taken; for those that cannot follow a
            loop when a fit begins.
        ModuleNotFoundError: when this module is imported without Lightning.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A fit begins, after the sanity check."""
        self.follow(lambda cbs: LightningFit(trainer, pl_module, cbs))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A training batch begins."""
        if fit := self.running:
            fit.begin_batch(True, _inputs(batch))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """The loss is known, scaled where there is a scaler."""
        if fit := self.running:
            fit.loss(loss if fit.scaler is None else loss / scale_of(fit.scaler, fit.model))
            fit.begin_backward()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Gradients of the batch are there."""
        if fit := self.running:
            fit.end_backward()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Gradients are whole and unscaled, and not clipped yet."""
        if (fit := self.running) and not isinstance(optimizer, LBFGS):  # which computes them several times
            fit.begin_step(optimizer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A training batch has ended."""
        if fit := self.running:
            fit.end_batch()
            self._heed(trainer)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A validation batch begins, of any of the loaders."""
        if fit := self.running:
            fit.begin_batch(False, _inputs(batch))

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A validation batch has ended."""
        if fit := self.running:
            fit.told_loss(outputs)
            fit.end_batch()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """An epoch has ended, its validation too."""
        if fit := self.running:
            fit.epoch()
            self._heed(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The fit has ended."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The fit has ended by an exception, Ctrl-C included."""
        self.close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The trainer has ended, in whatever way."""
        self.close()

    def _heed(self, trainer: Any) -> None:
        if self.stop_asked:
            trainer.should_stop = True


def _inputs(batch: Any) -> Any:
    """A batch as the trainer has it, in the form of `xb`."""
    if isinstance(batch, list | tuple):
        return tuple(batch)
    return batch if isinstance(batch, Mapping) else (batch,)
