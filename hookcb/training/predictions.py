"""GatherPreds: what `Learner.get_preds` collects."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from hookcb.core import orders
from hookcb.core.batch import concat, map_tensors
from hookcb.core.callback import Callback
from hookcb.core.events import CancelBatchException


class GatherPreds(Callback):
    """Keeps predictions and what else is asked for, on the CPU; needs no loss, so it ends the batch there.

    Args:
        loss_func: gives each sample's loss once its `reduction` is "none".
        with_input, with_loss: what to keep beside predictions and targets.
        name: what the learner calls it.

    Raises:
        ValueError: with `with_loss`, where `loss_func` has no `reduction`.

    >>> from hookcb import synth_learner
    >>> preds, targets = synth_learner().get_preds()
    >>> preds.shape == targets.shape
    True
    """

    order = orders.PREDICTIONS

    def __init__(
        self,
        loss_func: Callable[..., Any] | None = None,
        *,
        with_input: bool = False,
        with_loss: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.loss_func = _unreduced(loss_func) if with_loss else None
        self.with_input = with_input
        self.batches: list[tuple[Any, ...]] = []

    def after_pred(self) -> None:
        inputs = [self.x] if self.with_input else []
        losses = [self.loss_func(self.pred, *self.yb)] if self.loss_func else []
        kept = (*inputs, self.pred, self.y if self.yb else None, *losses)
        # a copy, as a model may write its next output to the same memory
        self.batches.append(map_tensors(lambda x: x.detach().to("cpu", copy=True), kept))
        raise CancelBatchException

    def results(self) -> tuple[Any, ...]:
        """`(inputs, preds, targets, losses)`, as far as asked for, each over all batches."""
        return tuple(concat(list(items)) for items in zip(*self.batches, strict=True))


def _unreduced(loss_func: Callable[..., Any] | None) -> Callable[..., Any]:
    """`loss_func` without its last step, the average over samples."""
    if isinstance(getattr(loss_func, "reduction", None), str):
        unreduced: Any = copy.copy(loss_func)
        unreduced.reduction = "none"
        return unreduced  # type: ignore[no-any-return]  # a copy of a callable
    if loss_func is not None and "reduction" in inspect.signature(loss_func).parameters:
        return partial(loss_func, reduction="none")
    raise ValueError(
        f"with_loss needs each sample's loss, and loss_func {loss_func!r:.80} has no 'reduction'; "
        "use one of torch.nn or torch.nn.functional, or add a reduction argument to yours"
    )
