"""HookcbCallback: hookcb callbacks in the Trainer of Hugging Face's transformers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.adapters.base import Attached, all_ranks, no_package
from hookcb.core.callback import Callback
from hookcb.core.randomness import random_kept
from hookcb.diagnosis.callback import Diagnose
from hookcb.loops.optimizers import unwrapped
from hookcb.loops.watcher import Watch

try:
    with random_kept():
        from transformers import TrainerCallback
        from transformers.integrations import INTEGRATION_TO_CALLBACK
except ModuleNotFoundError:
    raise no_package("transformers", "transformers") from None


class HookcbCallback(Attached, TrainerCallback):
    """Lets hookcb callbacks follow `Trainer.train` by a `Watch`; the trainer reports its epochs.

    `loss` is the one in the model's output, if it has one. Gradients are read unscaled, after the trainer has
    clipped them (`max_grad_norm=0` leaves them as they are). A callback that ends the fit sets
    `control.should_training_stop`. Hooks are removed when the training ends.

    The trainer does not report exceptions. After one, hooks are removed when the next training begins, when
    the model is deleted, by `close()`, or at the end of a `with` block:
    `with HookcbCallback(…) as callback: trainer.train()`.

    Args:
        *more: callbacks, one by one or in lists; they become attributes, `callback.activation_stats`.
        cbs: more callbacks, in the form that a `Learner` accepts.

    Raises:
        TypeError, ValueError: If one is not a callback, or its name is taken; when a training begins, if one
            cannot follow a loop.
        ModuleNotFoundError: When this module is imported without transformers.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """A training begins; model and optimizer are ready."""
        self._is_epoch_over = False
        scaler = getattr(optimizer, "scaler", None)  # Accelerate's wrapper has it
        self.follow(lambda cbs: TrainerRun(model, unwrapped(optimizer), cbs, scaler, _who_keeps(args)))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An epoch begins."""
        self._end_epoch(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The training of an epoch has ended; an evaluation that follows belongs to it."""
        self._is_epoch_over = True
        if not control.should_evaluate:
            self._end_epoch(control)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """An evaluation has ended."""
        if run := self.running:
            run.report_metrics(metrics or {})
        self._end_epoch(control)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch has ended, without a step."""
        self._pass_on_stop(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step has ended."""
        self._pass_on_stop(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The training has ended."""
        self.close()

    def _end_epoch(self, control: Any) -> None:
        if (run := self.running) and self._is_epoch_over:
            run.end_epoch()
            self._is_epoch_over = False
        self._pass_on_stop(control)

    def _pass_on_stop(self, control: Any) -> None:
        if self.stop_requested:
            control.should_training_stop = True


class DiagnoseCallback(HookcbCallback):
    """`HookcbCallback(Diagnose())`, which `TrainingArguments(report_to="hookcb")` adds to the trainer.

    The name is known once this module is imported. The verdict is printed at the end of the training.
    """

    def __init__(self) -> None:
        super().__init__(Diagnose())


INTEGRATION_TO_CALLBACK["hookcb"] = DiagnoseCallback


def _who_keeps(args: Any) -> str | None:
    """Who keeps the weights of the best evaluation; "" if only the last ones are kept, None if unknown."""
    if args.load_best_model_at_end:
        return "load_best_model_at_end brings the best weights back"
    return None if args.save_total_limit is None else ""


class TrainerRun(Watch):
    """A training of Hugging Face's Trainer, whose models return their loss."""

    honors_stop = True
    way = "transformers"

    def __init__(
        self, model: nn.Module, opt: Any, cbs: list[Callback], scaler: Any, keeps_best: str | None
    ) -> None:
        self.keeps_best = keeps_best
        super().__init__(model, [opt] if isinstance(opt, Optimizer) else [], cbs, scaler)

    def _group_of(self, model: nn.Module) -> Any:
        return all_ranks()  # the model is not the one that is wrapped

    def report_pred(self, pred: Any) -> None:
        """See `LoopReporter`; reports the loss in the output too."""
        super().report_pred(pred)
        loss = pred.get("loss") if isinstance(pred, Mapping) else None
        if isinstance(loss, Tensor):
            self.report_loss(loss)
