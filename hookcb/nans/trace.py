"""NanTrace: names the layer and the line that made the first NaN or inf of a training."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hookcb.core import orders
from hookcb.core.alone import ALONE, Ranks
from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.core.console import warn
from hookcb.core.events import CancelBatchException, CancelFitException
from hookcb.core.optim import gradients
from hookcb.nans.nonfinite import may_be_nonfinite, nonfinite_gradients
from hookcb.nans.replay import BatchStart, BatchStarts
from hookcb.nans.report import BATCH, LOSS, MODEL, NanReport
from hookcb.nans.search import search, write_bundle
from hookcb.processes.shards import local_part


class NanTrace(Callback):
    """Finds the origin of the first loss or gradient that is not finite, and ends the fit.

    The batch is replayed with the random numbers, buffers and autocast it began with. The `report` names the
    first module that made NaN or inf from finite inputs, in the forward or in the backward, the operation,
    and the line of your code; or the loss function, or the batch itself. `-inf` from an attention mask counts
    only if it led to NaN. A UserWarning has a one-line summary. The fit ends before the step, with
    everything as it was: weights, buffers, gradients, random numbers, hooks, `pred` and `loss`. In
    `learn.one_batch` the batch's step is skipped.

    On several ranks all of them end, whichever has noticed it, and have the report of the rank that found the
    origin. Each rank replays its own batch: alone if it has the whole model, else all of them together.

    An fp16 `learn.scaler` may overflow: the batch is replayed without the scale, and reported only if that
    fails too. A compiled model runs uncompiled in the replay. Hooks of yours that return something see
    one more forward; those that return nothing only if the replay is finite without them. `TerminateOnNaN` is
    not needed beside it, but does no harm.

    Costs of each batch: a sum of each gradient, which waits for the device once; about 10 µs for the random
    numbers, 40 if NumPy has drawn some; copies of the buffers of up to 65,536 elements, and of larger ones
    that have changed. Memory: one more copy of the buffers; in the replay that of one more batch. On several
    ranks they wait for each other after the backward, and on a CPU after the loss too.

    Args:
        bundle: path of a file to write for a replay elsewhere, by `torch.load(weights_only=True)`: weights,
            batch, random numbers; see `hookcb.nans.search.write_bundle`. An existing file is replaced.
        last: number of module calls in the report.
        name: see `Callback`.

    Attributes:
        report: a `NanReport` to print, with `where`, `type`, `direction`, `op`, `line`, `calls`, `repeated`,
            `rank`; None if all was finite.

    Raises:
        TypeError, ValueError: If `bundle` is not a path of a file, or `last` is below 1.

    >>> import torch, warnings
    >>> from hookcb import NanTrace, synth_learner
    >>> class Log(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x.log()
    >>> learn = synth_learner(model=torch.nn.Sequential(torch.nn.Linear(1, 4), Log(), torch.nn.Linear(4, 1)))
    >>> with learn.no_logging(), warnings.catch_warnings(action="ignore"):
    ...     learn.fit(1, cbs=NanTrace())
    >>> report = learn.nan_trace.report
    >>> report.where, report.type, report.direction, report.op
    ('1', 'Log', 'forward', 'log')
    """

    order = orders.NAN_TRACE
    run_valid = False
    run_lr_find = False  # lr_find raises the rate until it is too high, on purpose

    def __init__(self, bundle: str | Path | None = None, last: int = 21, *, name: str | None = None) -> None:
        super().__init__(name=name)
        if bundle is not None and not isinstance(bundle, str | Path):
            raise TypeError(f"bundle must be the path of a file to write, or None, got {bundle!r}")
        self.bundle, self.last = None if bundle is None else Path(bundle), check_count("last", last, "calls")
        self.report: NanReport | None = None
        self._forget()

    def _forget(self) -> None:
        self._start: BatchStart | None = None  # of the batch in progress
        self._starts = BatchStarts()
        self._loss: Tensor | None = None  # a loss not checked yet
        self._overflowed = False  # the scaled gradients have, which the scaler handles

    @property
    def reason(self) -> str | None:
        """Why the fit was ended, the report in one line; None if it was not."""
        return None if self.report is None else self.report.summary

    def before_fit(self) -> None:
        if self.bundle is not None and self.bundle.is_dir():
            raise ValueError(
                f"bundle must be the path of a file to write, got the folder {str(self.bundle)!r}"
            )
        self.report = None
        self._forget()

    def before_batch(self) -> None:
        self._start, self._loss = self._starts.note(self.learn), None

    def after_loss(self) -> None:
        self._loss = self.loss.detach()
        if _is_at_hand(self._loss):
            self._check_loss()

    def after_backward(self) -> None:
        grads = [] if self._overflowed else gradients(self.opt)
        waiting = [] if self._loss is None else [self._loss]
        if not self._on_any_rank(may_be_nonfinite([*waiting, *grads])):  # waits for the device
            self._loss = None
            return
        self._check_loss()
        names = [] if self._overflowed else nonfinite_gradients(self.model)
        if everyones := [theirs for theirs in self._ranks.gather(names) if theirs]:
            name, *others = names or everyones[0]
            more = f" and {len(others)} more" if others else ""
            self._trace(f"gradient of {name}{more} not finite", gradient=True)

    def _check_loss(self) -> None:
        loss, self._loss = self._loss, None
        if loss is None:
            return
        is_bad = not math.isfinite(value := local_part(loss).item())
        if self._on_any_rank(is_bad):
            self._trace(f"loss is {value}" if is_bad else "", gradient=False)

    @property
    def _ranks(self) -> Ranks:
        """The ranks that search together; outside a fit, this one is alone."""
        return self.learn.ranks if self.learn.fitting else ALONE

    def _on_any_rank(self, noticed: bool) -> bool:
        return any(self._ranks.max([noticed]))

    # another callback may have ended the batch, or more, at its loss
    after_cancel_batch = after_cancel_train = after_cancel_epoch = after_cancel_fit = _check_loss

    def after_step(self) -> None:
        self._overflowed = False

    def after_batch(self) -> None:
        self._start = None
        if not self.learn.fitting:  # no after_fit will follow
            self._forget()

    def after_fit(self) -> None:
        self._forget()

    def _trace(self, noticed: str, gradient: bool) -> None:
        if self._start is None:  # the callback was added in the middle of the batch
            return
        report = self._search(self._start, self._ranks, noticed, gradient)
        if gradient and self.learn.scaler is not None and not report.repeated:
            self._overflowed = True
            return
        if self.bundle is not None and report.rank in (None, self._ranks.rank):
            report = write_bundle(self.learn, self._start, report, self.bundle)
        self.report = report
        if self._ranks.is_main:
            warn(f"{report.summary}; see learn.{self.name}.report", stacklevel=2)
        raise (CancelFitException if self.learn.fitting else CancelBatchException)(self.reason)

    def _search(self, start: BatchStart, ranks: Ranks, noticed: str, gradient: bool) -> NanReport:
        """The report of this rank if it is alone, else that of the rank that says most of the origin."""
        own, together = None, ranks if ranks.is_sharded else ALONE
        if noticed or ranks.is_sharded:  # then a replay needs all ranks
            own = search(self.learn, start, noticed, gradient, self.last, together)
        if ranks.world == 1 and own is not None:
            return own
        found: list[NanReport] = [
            replace(r, rank=i) for i, r in enumerate(ranks.gather(own)) if r is not None
        ]
        return min(found, key=_distance)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_start": None, "_starts": BatchStarts(), "_loss": None, "_overflowed": False}
        return super().__getstate__() | kept


def _distance(report: NanReport) -> tuple[float, ...]:
    """Distance of what a rank has found from the origin, as what one rank makes reaches the others."""
    where = {BATCH: 0, LOSS: 2, MODEL: 3}.get(report.where, 1)
    return not report.noticed, not report.repeated, where, len(report.calls)


def _is_at_hand(x: Tensor) -> bool:
    """Whether reading it waits for no device."""
    return x.device.type == "cpu"
