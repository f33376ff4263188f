"""HookcbCallback: callbacks of hookcb in a Trainer of Hugging Face's transformers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.adapters.base import Attached, no_package
from hookcb.core.callback import Callback
from hookcb.core.randomness import random_kept
from hookcb.loops.optimizers import unwrapped
from hookcb.loops.watcher import Watch

try:
    with random_kept():
        from transformers import TrainerCallback
except ModuleNotFoundError:
    raise no_package("transformers", "transformers") from None


class HookcbCallback(Attached, TrainerCallback):
    """Has callbacks of hookcb follow `Trainer.train`: what happens is seen by a `Watch`, epochs are told.

    `loss` is that of the model's output, where it has one. Gradients are unscaled, and read after the trainer
    has clipped them (`max_grad_norm=0` leaves them as they are). A callback that ends the fit sets
    `control.should_training_stop`. Hooks come off when the training ends.

    The trainer does not tell of exceptions. After one, hooks come off when the next training begins or the
    model goes, by `close()`, or at the end of a block, `with HookcbCallback(…) as callback: trainer.train()`.

    Args:
        *more: callbacks, one by one or in lists; they become attributes, `callback.activation_stats`.
        cbs: callbacks too, as a `Learner` takes them.

    Raises:
        TypeError, ValueError: If one is not a callback, or its name is taken; if one cannot follow a
            loop when a training begins.
        ModuleNotFoundError: when this module is imported without transformers.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """A training begins; model and optimizer are ready."""
        self._is_epoch_over = False
        scaler = getattr(optimizer, "scaler", None)  # of Accelerate's wrapper
        self.follow(lambda cbs: TrainerRun(model, unwrapped(optimizer), cbs, scaler))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An epoch begins."""
        self._end_epoch(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The training of an epoch has ended; where it is evaluated now, that belongs to it."""
        self._is_epoch_over = True
        if not control.should_evaluate:
            self._end_epoch(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation has ended."""
        self._end_epoch(control)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch has ended, without a step."""
        self._heed(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step has ended."""
        self._heed(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The training has ended."""
        self.close()

    def _end_epoch(self, control: Any) -> None:
        if (run := self.running) and self._is_epoch_over:
            run.end_epoch()
            self._is_epoch_over = False
        self._heed(control)

    def _heed(self, control: Any) -> None:
        if self.stop_requested:
            control.should_training_stop = True


class TrainerRun(Watch):
    """A training of Hugging Face's Trainer, whose models give their loss."""

    honors_stop = True

    def __init__(self, model: nn.Module, opt: Any, cbs: list[Callback], scaler: Any) -> None:
        super().__init__(model, [opt] if isinstance(opt, Optimizer) else [], cbs, scaler)

    def report_pred(self, pred: Any) -> None:
        """The model has given its output for the batch, and the loss in it."""
        super().report_pred(pred)
        loss = pred.get("loss") if isinstance(pred, Mapping) else None
        if isinstance(loss, Tensor):
            self.report_loss(loss)
