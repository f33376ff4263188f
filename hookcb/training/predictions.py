"""GatherPreds: collects the predictions for `Learner.get_preds`."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hookcb.core import orders
from hookcb.core.alone import Ranks
from hookcb.core.batch import concat, map_tensors
from hookcb.core.callback import Callback
from hookcb.core.events import CancelBatchException


class GatherPreds(Callback):
    """Collects predictions and targets on the CPU; cancels each batch after that, as it needs no loss.

    Args:
        loss_func: a loss function with a `reduction`, for the loss of each sample.
        with_input, with_loss: whether to collect these too.
        name: name of the callback in the learner.

    Raises:
        ValueError: If `with_loss` is set and `loss_func` has no `reduction`.

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
        self.digest: Any = None  # of the inputs, a hash to which each batch is added if it is given

    def after_pred(self) -> None:
        if self.digest is not None:
            map_tensors(self._add_to_digest, self.learn.xb)
        inputs = [self.x] if self.with_input else []
        losses = [self.loss_func(self.pred, *self.yb)] if self.loss_func else []
        items = (*inputs, self.pred, self.y if self.yb else None, *losses)
        # a copy, as a model may write its next output to the same memory
        self.batches.append(map_tensors(lambda x: x.detach().to("cpu", copy=True), items))
        raise CancelBatchException

    def results(self, ranks: Ranks, order: list[int] | None) -> tuple[Any, ...]:
        """Returns `(inputs, preds, targets, losses)` over all batches; inputs and losses if requested.

        Args:
            ranks: ranks that have a part of the batches each.
            order: index in the data of each sample of this rank; None if unknown, then the samples of rank 0
                come first. Ranks with the same inputs or indices, as under tensor parallelism, count once.
        """
        if ranks.world > 1:
            key = order if self.digest is None else self.digest.hexdigest()
            everyone = {
                repr(theirs[0]): theirs for theirs in reversed(ranks.gather((key, self.batches, order)))
            }
            parts = list(reversed(everyone.values()))
        else:
            parts = [(None, self.batches, order)]
        batches = [batch for _, theirs, _ in parts for batch in theirs]
        results = tuple(concat(list(items)) for items in zip(*batches, strict=True))
        if ranks.world == 1 or order is None:
            return results
        owners = {i: place for place, i in enumerate(i for *_, theirs in parts for i in theirs)}
        # once, if several ranks have the sample
        places = torch.tensor([owners[i] for i in sorted(owners)], device="cpu")
        return tuple(map_tensors(lambda x: x[places], item) for item in results)

    def _add_to_digest(self, x: torch.Tensor) -> torch.Tensor:
        self.digest.update(x.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        return x


def _unreduced(loss_func: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns `loss_func` with the reduction "none"."""
    if isinstance(getattr(loss_func, "reduction", None), str):
        unreduced: Any = copy.copy(loss_func)
        unreduced.reduction = "none"
        return unreduced  # type: ignore[no-any-return]  # a copy of a callable
    if loss_func is not None and "reduction" in inspect.signature(loss_func).parameters:
        return partial(loss_func, reduction="none")
    raise ValueError(
        f"with_loss needs the loss of each sample, but loss_func {loss_func!r:.80} has no 'reduction'; "
        "use one of torch.nn or torch.nn.functional, or add a reduction argument to yours"
    )
