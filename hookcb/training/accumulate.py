"""GradientAccumulation: one optimizer step for several batches."""

import inspect
import math
from contextlib import suppress
from typing import Any

from torch import Tensor

from hookcb.core import graph, orders
from hookcb.core.arguments import check_count
from hookcb.core.batch import batch_size
from hookcb.core.callback import Callback
from hookcb.core.console import warn
from hookcb.core.events import CancelBatchException
from hookcb.core.optim import scale_gradients
from hookcb.core.torch_private import saved
from hookcb.processes.groups import set_sync

ATEN_NAMES = {1: "mean", 2: "sum"}  # at::Reduction, saved in the nodes of torch's losses
UNCHANGED = ("Add", "Sub", "Neg", *graph.SHAPING)
MAX_NODES = 64


class GradientAccumulation(Callback):
    """Adds up the gradients of `n` batches before each step, for large batches on little memory.

    The step is that of one batch with all samples of the group. If the loss is a mean over samples, batches
    are weighted by their size; if it is a sum, gradients are added as they are. Layers that compute over a
    whole batch, such as batch norm, still see the small batches.

    `before_step` and `after_step` are called once per group. The last group of an epoch may be smaller. If it
    is only known at the end of the training (a loader without a length, cancelled batches), its step is made
    in `after_train`. A batch cancelled before its backward does not count. If the epoch or the fit is
    cancelled, the gradients of an open group go into the next group, or are not used.

    `learn.loss` is scaled from `before_backward` to `after_backward`, so add penalties in `after_loss`.

    Args:
        n: number of batches in a group, 1 or more.
        n_acc: in place of `n`, the number of samples in a group, as in fastai; the loader has to be a list,
            or to have a `batch_size`.
        reduction: "mean" or "sum", how the loss reduces the losses of samples. By default it is
            `loss_func.reduction`, the default of the function's parameter `reduction`, or the last operation
            in the graph of the first loss; if it remains unknown, "mean", with a warning.
        name: name of the callback in the learner.

    >>> from hookcb import Callback, GradientAccumulation, synth_learner
    >>> steps = Callback(after_step=lambda cb: print("step after batch", cb.iter))
    >>> learn = synth_learner(n_train=5)
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=[GradientAccumulation(2), steps])
    step after batch 1
    step after batch 3
    step after batch 4
    """

    order = orders.ACCUMULATION
    has_rank_state = True

    def __init__(
        self, n: int = 2, *, n_acc: int | None = None, reduction: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        check_count("n", n, "batches", hint=" (fastai's n_acc counts samples)")
        check_count("n_acc", 1 if n_acc is None else n_acc, "samples")
        self.n_acc = n_acc
        if reduction not in ("mean", "sum", None):
            raise ValueError(f"reduction must be 'mean', 'sum', or None to detect it, got {reduction!r}")
        self.n, self.reduction = n, reduction
        self._is_mean: bool | None = None  # whether the loss is a mean, once it is known
        self._loss: Tensor | None = None  # unscaled loss, while learn.loss is scaled
        self._size_of_ranks: int | None = None  # samples of a batch on the rank with the largest
        self._is_local = False  # whether ranks have not reduced the gradients of the last batch
        self._size: int | None = None  # samples in the batch, until its backward has added its gradients
        self._begin_group()

    def _begin_group(self) -> None:
        self._n_batches = self._n_samples = self._unit = 0  # losses are weighted by their samples / _unit

    def before_fit(self) -> None:
        if self.n_acc is not None:
            loader = self.learn.dls.train
            size = batch_size(loader[0]) if isinstance(loader, list) else getattr(loader, "batch_size", None)
            if not size:
                raise ValueError(f"n_acc is {self.n_acc}, but the loader has no batch_size; give n batches")
            self.n = max(1, math.ceil(self.n_acc / size))
        self._is_mean = self._size_of_ranks = None
        self._begin_group()

    def before_backward(self) -> None:
        learn = self.learn
        size = batch_size((*learn.yb, learn.xb))
        if not self._n_batches:  # a guess of the samples in the group, usually right
            left = (learn.n_iter or 0) - learn.iter
            self._unit = (min(self.n, left) if left > 0 else self.n) * self._usual_size(size)
        self._loss, self._size = learn.loss, size
        if self._is_mean is None:
            self._is_mean = self._find_reduction() != "sum"
        if self._is_mean and size != self._unit:
            learn.loss = learn.loss * (size / self._unit)
        learn.accumulating = not self._is_whole(self._n_batches + 1)

    def _usual_size(self, size: int) -> int:
        """Size of a batch by which losses are divided; the same on all ranks."""
        if self.learn.ranks.world == 1:
            return max(1, size)
        if self._size_of_ranks is None:
            self._size_of_ranks = max(1, int(self.learn.ranks.max([size])[0]))
        return self._size_of_ranks

    def before_batch(self) -> None:
        if self.training:  # in the forward, DistributedDataParallel prepares to reduce gradients
            self._is_local = set_sync(self.learn.model, self._is_whole(self._n_batches + 1))

    def after_cancel_backward(self) -> None:
        self._size = None
        self.learn.accumulating = not self._is_whole(self._n_batches)

    def after_backward(self) -> None:
        self._restore_loss()
        if self._size is not None:
            self._n_batches, self._n_samples = self._n_batches + 1, self._n_samples + self._size
            self._size = None

    def _restore_loss(self) -> None:
        if self._loss is not None:
            self.learn.loss, self._loss = self._loss, None

    # if the batch ended before its backward
    after_cancel_batch = after_cancel_train = after_cancel_epoch = after_cancel_fit = _restore_loss

    def before_step(self) -> None:
        ranks = self.learn.ranks
        if self._is_mean and (n := ranks.sum([self._n_samples])[0]):
            scale_gradients(self.opt, self._unit * ranks.world / n)
        self._begin_group()

    def after_train(self) -> None:
        learn = self.learn
        learn.accumulating = False
        if self._n_batches:
            if self._is_local:
                learn.ranks.average([p.grad for p in learn.model.parameters() if p.grad is not None])
            with suppress(CancelBatchException):  # the last batch is over
                if learn.within("step", learn.step):
                    learn.opt.zero_grad()

    def after_fit(self) -> None:
        self._restore_loss()
        self._begin_group()
        set_sync(self.learn.model, True)
        self.learn.accumulating, self._is_mean = False, None

    def state_dict(self) -> dict[str, Any]:
        counts = {"n_batches": self._n_batches, "n_samples": self._n_samples, "unit": self._unit}
        return counts | {"is_mean": self._is_mean, "n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._n_batches, self._n_samples, self._unit = state["n_batches"], state["n_samples"], state["unit"]
        self._is_mean = state.get("is_mean")  # missing in older files
        if (n := state.get("n", self.n)) != self.n:
            warn(f"{self.name!r} accumulates {self.n} batches from here on, and {n} before the checkpoint")

    def _find_reduction(self) -> str:
        loss_func = getattr(self.learn, "loss_func", None)
        reduction = self.reduction or _reduction_of(loss_func, self.learn.loss)
        if reduction is None and loss_func is not None and self.n > 1:
            title = getattr(loss_func, "__qualname__", type(loss_func).__name__)
            warn(
                f"cannot tell whether the loss of {title} is a mean or a sum over the samples of a batch; "
                "assuming a mean; give GradientAccumulation(…, reduction='mean'), or 'sum'",
                stacklevel=2,
            )
        return reduction or "mean"

    def _is_whole(self, n_batches: int) -> bool:
        is_last = self.learn.n_iter == self.learn.iter + 1  # a loader may have more batches than its length
        return n_batches >= self.n or (is_last and n_batches > 0)


def _reduction_of(loss_func: Any, loss: Any) -> str | None:
    """Reduction of a loss, "mean" or "sum"; None if neither its function nor its graph shows it.

    A mean plus a penalty that is a sum is a mean. A sum that is multiplied or divided by something may be
    either.

    Args:
        loss_func: the loss function; it may have a `reduction`, as an attribute or as a parameter with a
            default, as torch's losses do.
        loss: a loss with its graph; its last operations are inspected if `loss_func` has no `reduction`.
    """
    named = getattr(loss_func, "reduction", None) or _default(loss_func)
    if isinstance(named, str) and named != "none":
        return "sum" if named == "sum" else "mean"
    if isinstance(loss, Tensor):
        for kind, ops in (("mean", (*UNCHANGED, *graph.SCALING)), ("sum", UNCHANGED)):
            if kind in _reductions(loss.grad_fn, ops):
                return kind
    return None


def _default(loss_func: Any) -> Any:
    """Default of the parameter `reduction`; for a partial, the value it was given."""
    try:
        parameter = inspect.signature(loss_func).parameters.get("reduction")
    except (TypeError, ValueError):  # None, or a builtin without a signature
        return None
    return None if parameter is None else parameter.default


def _reductions(root: Any, ops: tuple[str, ...]) -> set[str]:
    """Operations, or the reductions of torch's losses, that are behind nothing but `ops`."""
    nodes = graph.walk([root], at_most=MAX_NODES, through=lambda at: graph.name(at) in ops)
    return {ATEN_NAMES.get(saved(at, "reduction", 0), graph.name(at).lower()) for at in nodes}
