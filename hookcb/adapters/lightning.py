"""HookcbCallback: hookcb callbacks in Lightning's Trainer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from hookcb.adapters.base import Attached, all_ranks, no_package
from hookcb.core.callback import Callback
from hookcb.core.randomness import random_kept
from hookcb.diagnosis.callback import Diagnose
from hookcb.gradients.steps import scale_of
from hookcb.hooks.hook import Hook
from hookcb.hooks.own import register
from hookcb.loops.coverage import WatchCoverage
from hookcb.loops.reporter import LoopReporter

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
    """Lets hookcb callbacks follow a fit of Lightning's Trainer, from its own hooks.

    Batches, losses, epochs and validations are the trainer's. Gradients are read unscaled, before Lightning
    clips them. `pred` is the module's output if `training_step` calls it, `self(x)`. A callback that ends the
    fit sets `trainer.should_stop`. Hooks are removed when the fit ends, even by an exception.

    Args:
        *more: callbacks, one by one or in lists; they become attributes, `callback.activation_stats`.
        cbs: more callbacks, in the form that a `Learner` accepts.

    Raises:
        TypeError, ValueError: If one is not a callback, or its name is taken; when a fit begins, if one
            cannot follow a loop.
        ModuleNotFoundError: When this module is imported without Lightning.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A fit begins, after the sanity check."""
        self.follow(lambda cbs: LightningFit(trainer, pl_module, cbs))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A training batch begins."""
        if fit := self.running:
            fit.begin_batch(True, _inputs(batch))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """The loss is known, scaled if there is a scaler."""
        if fit := self.running:
            fit.report_loss(loss if fit.scaler is None else loss / scale_of(fit.scaler, fit.model))
            fit.begin_backward()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """The gradients of the batch are ready."""
        if fit := self.running:
            fit.end_backward()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Gradients are complete and unscaled, and not clipped yet."""
        if (fit := self.running) and not isinstance(optimizer, LBFGS):  # it computes them several times
            fit.begin_step(optimizer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A training batch has ended."""
        if fit := self.running:
            fit.end_batch()
            self._pass_on_stop(trainer)

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
            fit.report_outputs(outputs)
            fit.end_batch()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """A validation begins."""
        self._logged_before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """A validation of all loaders has ended, and what it has logged is known."""
        before, self._logged_before = self._logged_before, {}
        if fit := self.running:
            logged = trainer.callback_metrics.items()
            fit.report_metrics({name: x for name, x in logged if before.get(name) is not x})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """An epoch has ended, including its validation."""
        if fit := self.running:
            fit.end_epoch()
            self._pass_on_stop(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The fit has ended."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException | None = None) -> None:
        """The fit has ended by an exception, or Ctrl-C."""
        if exception is None:  # called on the class, as the trainer was given that
            raise TypeError("HookcbCallback must be created: callbacks=[HookcbCallback(Diagnose())]")
        self.close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The trainer has ended, for whatever reason."""
        self.close()

    def _pass_on_stop(self, trainer: Any) -> None:
        if self.stop_requested:
            trainer.should_stop = True


class DiagnoseCallback(HookcbCallback):
    """`HookcbCallback(Diagnose())`, which HOOKCB=1 adds to each Trainer; it stands aside where one is."""

    def __init__(self) -> None:
        super().__init__(Diagnose())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A fit begins, after the sanity check."""
        ours = [cb for cb in trainer.callbacks if isinstance(cb, HookcbCallback)]
        if next(cb for cb in ours if any(isinstance(x, Diagnose) for x in cb.cbs)) is self:
            super().on_train_start(trainer, pl_module)


def _inputs(batch: Any) -> Any:
    """Converts a batch of the trainer to the form of `xb`."""
    if isinstance(batch, list | tuple):
        return tuple(batch)
    return batch if isinstance(batch, Mapping) else (batch,)


def _who_keeps(trainer: Any) -> str | None:
    """Who keeps the best weights; "" if checkpoints have the last ones, None if that is not known."""
    kept = [cb for cb in trainer.checkpoint_callbacks if getattr(cb, "save_top_k", 0)]
    if any(cb.save_top_k < 0 or (cb.monitor is not None and "train" not in cb.monitor) for cb in kept):
        return "ModelCheckpoint keeps the best weights"
    if trainer.early_stopping_callbacks:
        return "EarlyStopping ends the fit"
    return "" if kept else None


class LightningFit(LoopReporter):
    """A fit of Lightning's Trainer, reported by `HookcbCallback`."""

    honors_stop = True
    way = "lightning"

    def __init__(self, trainer: Any, module: nn.Module, cbs: list[Callback]) -> None:
        self._n_calls = 0  # nested calls of the module in progress
        self._has_pred = False  # whether the output of this batch is reported
        # wrappers such as DistributedDataParallel call training_step through the module's forward
        self._is_redirected = trainer.strategy.model is not module
        self.keeps_best = _who_keeps(trainer)
        optimizers, scaler = trainer.optimizers, getattr(trainer.precision_plugin, "scaler", None)
        self._hooks: list[Any] = []  # exists even if an error in `before_fit` closes the loop
        super().__init__(module, cbs, optimizers[0] if optimizers else None, scaler)
        self.facts.reports_steps = True  # before it clips
        if not self.fitting:  # HOOKCB=0
            return
        self._hooks += [
            Hook(module, self._call_begins, pre=True, gate=self._is_called_here),
            Hook(module, self._call_ends, detach=False, always_call=True, gate=self._is_called_here),
            *(register(opt.register_step_post_hook, self._step_ends) for opt in optimizers),
        ]

    def _group_of(self, model: nn.Module) -> Any:
        return all_ranks()  # the module is not the one that is wrapped

    def begin_batch(self, training: bool = True, xb: Any = ()) -> None:
        """See `LoopReporter`; the module has not been called in a new batch."""
        self._n_calls, self._has_pred = 0, False
        super().begin_batch(training, xb)

    def report_outputs(self, outputs: Any) -> None:
        """Reports the loss of a validation batch, if `validation_step` has returned one."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.ndim == 0:
            self.report_loss(loss)

    def _is_called_here(self) -> bool:
        return self.in_loop_thread

    def _call_begins(self, *seen: Any) -> None:
        self._n_calls += 1

    def _call_ends(self, m: nn.Module, inputs: Any, output: Any) -> None:
        self._n_calls -= 1
        is_its_own = self._n_calls == int(self._is_redirected)
        if is_its_own and self.has_batch and not self._has_pred and output is not None:
            self._has_pred = True
            self.report_pred(output)

    def _step_ends(self, *seen: Any) -> None:
        self.end_step()

    def close(self, error: BaseException | None = None) -> None:
        """Removes all hooks; see `LoopReporter`."""
        while self._hooks:
            self._hooks.pop().remove()
        super().close(error)

    @property
    def coverage(self) -> WatchCoverage:
        """Events seen so far, and those that were not, with the reason."""
        found = WatchCoverage.of(self.seen, self.facts, n_epochs=1, n_optimizers=1)
        why = {"after_pred": "training_step does not call the module itself, self(x)"}
        missing = {event: why.get(event, reason) for event, reason in found.missing.items()}
        return replace(found, missing=missing, notes=())
