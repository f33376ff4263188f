"""Log: writes the numbers of a training to loggers."""

import copy
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from numbers import Real
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from hookcb.core import orders
from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.core.optim import detached_scalar
from hookcb.loggers.base import DiffersByRank, Logger, as_logger
from hookcb.loggers.group import LoggerGroup
from hookcb.processes.ranks import ranks_of
from hookcb.records.recording import Histogram, recordings_of

# first part of the names, by the name of the callback; else it is that name
PREFIXES = {"activation_stats": "activations", "gradient_health": "gradients", "step_timer": "time"}


class Log(Callback):
    """Logs loss, learning rate and statistics to a file, TensorBoard, MLflow, or a run of another library.

    Every `every` training batches it logs `loss` and `lr` of the batch, and the newest record of each
    recorder under the step of that record: `activations/<layer>/<stat>` of `ActivationStats`, with its
    histograms; `gradients/<parameter>/<stat>` and `gradients/step/<stat>` of `GradientHealth`, with
    `clipped_norm` in place of `norm` if the loop clips before gradients are read; `time/<phase>`, in
    seconds, of `StepTimer`. After an epoch it logs the row of the epoch, `epoch/<column>`,
    and new records. If a recorder was given a name, that takes the place of the first part.

    After epochs 1, 2, 4, 8 …, and at the end, heat maps show one statistic of all layers over the steps:
    `figures/<callback>/rms`, `kurtosis` and `near_zero` of outputs, and `norm` of gradients. They need
    matplotlib, and go to TensorBoard, MLflow and runs; `maps=False` leaves them out. ClearML, Aim and the tab
    Custom Scalars of TensorBoard have one chart for each statistic, with a line for each layer.

    If there is a `Diagnose`, its verdict is logged at the end of the fit as a text, `verdict`, and what was
    recorded as figures, `figures/<name>`, if matplotlib is installed: to TensorBoard, MLflow and runs; JSONL
    gets the text.

    Reading the loss and the records waits for the device; between these batches nothing is read. Steps count
    the training batches of the fit from 0; a resumed fit continues the count, and logs the steps since its
    checkpoint again. If a logger raises, there is a warning, and it is left out for the rest of the fit.

    Of several ranks only rank 0 logs, so only it needs a run of wandb, and the others may lack this callback.
    The row of an epoch is that of all ranks; loss and statistics are those of its own batches.

    Args:
        logger: a path that ends in .jsonl or .csv, a logger of `hookcb.loggers`, a run of wandb, trackio,
            SwanLab, Comet, ClearML, Neptune or Aim, an object with a method `log(values, step=…)`, or a list
            of these.
        every: log training batches 0, every, 2·every …
        on_epoch: log after each epoch too.
        maps: log heat maps too.
        ranks: "main", or "all" for a file of each rank: `run.jsonl`, `run.rank1.jsonl` …; with TensorBoard a
            folder inside of that of rank 0. Any other logger is then used on all ranks as it is.
        name: name of the callback in the learner.

    Raises:
        TypeError, ValueError: If an argument is invalid.

    >>> from tempfile import mkdtemp
    >>> from hookcb import synth_learner
    >>> from hookcb.loggers import Log, read_jsonl
    >>> path = mkdtemp() + "/run.jsonl"
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(2, cbs=Log(path, every=15))
    >>> [list(row) for row in read_jsonl(path)][:2]
    [['step', 'loss', 'lr'], ['step', 'epoch/epoch', 'epoch/train_loss', 'epoch/valid_loss', 'epoch/time']]
    >>> [row["step"] for row in read_jsonl(path)]
    [0, 9, 15, 19]
    """

    order = orders.LOG
    shows_only = True
    run_valid = False
    run_lr_find = False

    def __init__(
        self,
        logger: Logger | str | Path | list[Any] | tuple[Any, ...],
        every: int = 50,
        *,
        on_epoch: bool = True,
        maps: bool = True,
        ranks: str = "main",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        given = logger if isinstance(logger, list | tuple) else [logger]
        if not given:
            raise ValueError(f"logger must be a logger, or a list of at least one, got {logger!r}")
        if ranks not in ("main", "all"):
            raise ValueError(f"ranks must be 'main' or 'all', got {ranks!r:.80}")
        self.ranks, self._writes, self._rank = ranks, True, 0
        self.every, self.on_epoch = check_count("every", every, "training batches"), on_epoch
        self.maps = maps
        self._group = LoggerGroup([as_logger(thing) for thing in given])
        self._begin()

    @property
    def loggers(self) -> tuple[Logger, ...]:
        """The loggers that it logs to."""
        return self._group.loggers

    def _begin(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}  # records that were logged, by callback and part
        self._batch: dict[str, float | Tensor] | None = None  # loss and rate, if the batch is to be logged
        self._is_cancelled = False
        self._n_epochs = 0

    def before_fit(self) -> None:
        self._begin()
        rank = ranks_of(self.model).rank  # under watch too, where ranks do not communicate
        self._writes = not rank or self.ranks == "all"
        if self._writes and rank != self._rank:
            self._rank = rank
            own = [x.of_rank(rank) if isinstance(x, DiffersByRank) else x for x in self._group.loggers]
            self._group = LoggerGroup(own)
        self._group.begin()

    def after_loss(self) -> None:
        if self._is_due:  # now, as the rate may be stepped before the batch ends
            self._batch = self._loss_and_rate()

    def after_cancel_batch(self) -> None:
        self._is_cancelled = True

    def after_batch(self) -> None:
        batch, is_cancelled = self._batch, self._is_cancelled
        self._batch, self._is_cancelled = None, False
        if self._is_due and not is_cancelled:
            # some loops report the loss at the end
            values = self._loss_and_rate() if batch is None else batch
            self._log({name: float(x) for name, x in values.items()}, self.train_iter)

    def after_epoch(self) -> None:
        if self.on_epoch and self._writes:
            row = {"epoch": self.epoch, **self.learn.row}
            numbers = {f"epoch/{name}": float(x) for name, x in row.items() if isinstance(x, Real | Tensor)}
            self._log(numbers, max(0, self.train_iter - 1))
        self._n_epochs += 1
        if self._n_epochs.bit_count() == 1:  # a power of 2
            self._show_maps()

    def after_fit(self) -> None:
        self._batch = None
        if self._n_epochs.bit_count() != 1:  # also of a loop that tells of no epochs
            self._show_maps()
        self._group.end()

    def _show_maps(self) -> None:
        """Logs heat maps of what the callbacks of this fit have recorded."""
        if self.maps and self._writes and find_spec("matplotlib") is not None:
            maps = [found for name, own in recordings_of(self.learn.cbs) for found in own.maps(name)]
            figures = {f"figures/{name}": draw for name, draw in maps}
            self._group.show(max(0, self.train_iter - 1), {}, figures)

    def take_verdict(self, verdict: Any) -> None:
        """Logs the verdict of the fit, and figures; `Diagnose` calls it once the fit has ended."""
        if self._writes:
            others = [finding for finding in verdict.findings if finding is not verdict.primary]
            text = "\n\n".join(map(str, [verdict, *others]))
            self._group.show(max(0, self.train_iter - 1), {"verdict": text}, dict(self._figures()))
            self._group.end()

    def _figures(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Figures of what the callbacks of this fit have recorded, by name, as functions that draw them."""
        for name, own in recordings_of(self.learn.cbs) if find_spec("matplotlib") is not None else ():
            for figure, draw in own.figures(name):
                yield f"figures/{figure}", draw

    @property
    def _is_due(self) -> bool:
        learn = self.learn
        return self._writes and learn.fitting and learn.train_iter % self.every == 0

    def _loss_and_rate(self) -> dict[str, float | Tensor]:
        learn = self.learn
        lr = learn.opt.param_groups[-1].get("lr") if learn.opt is not None else None
        return {name: detached_scalar(x) for name, x in (("loss", learn.loss), ("lr", lr)) if x is not None}

    def _log(self, values: Mapping[str, float], now: int) -> None:
        """Logs `values` of step `now`, and new records, in the order of steps."""
        by_step: dict[int, tuple[dict[str, float], dict[str, Histogram]]] = {now: (dict(values), {})}
        for name, own in recordings_of(self.learn.cbs):
            seen, prefix = self._seen.setdefault(name, {}), PREFIXES.get(name, name)
            for new in own.newest(seen):
                seen[new.part] = new.record
                numbers, hists = by_step.setdefault(min(new.step, now), ({}, {}))
                numbers.update({f"{prefix}{new.part}/{x}": value for x, value in new.values.items()})
                hists.update({f"{prefix}{new.part}/{x}": hist for x, hist in new.hists.items()})
        for step, (numbers, hists) in sorted(by_step.items(), key=itemgetter(0)):
            self._group.log(step, numbers, hists)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Log":
        copied = copy.copy(self)
        copied._group = LoggerGroup(self.loggers)  # the same loggers: a run of wandb, say, cannot be copied
        copied._begin()
        return copied
