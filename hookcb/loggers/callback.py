"""Log: what a training comes to, to where it is kept."""

import copy
from collections.abc import Mapping
from numbers import Real
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from hookcb.core import orders
from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.core.optim import detached_scalar
from hookcb.loggers.adapt import as_logger
from hookcb.loggers.base import Histogram, Logger
from hookcb.loggers.group import LoggerGroup
from hookcb.loggers.newest import Newest


class Log(Callback):
    """Writes loss, learning rate and what is recorded to a file, TensorBoard, MLflow, wandb or trackio.

    Every `every` training batches it logs `loss` and `lr` of the batch, and of each recorder that is attached
    the newest record, under the step it is of: `activations/<layer>/<stat>` of `ActivationStats`, with its
    histograms; `gradients/<parameter>/<stat>` and `gradients/step/<stat>` of `GradientHealth`;
    `time/<phase>`, in seconds, of `StepTimer`. After an epoch it logs its row, `epoch/<column>`, and new
    records. Those of a recorder with a name of its own have that in front.

    In between nothing is read. To read loss and records waits for the device. Steps count the training
    batches of the fit from 0; a resumed fit goes on with its own, and logs again what came after its
    checkpoint. A logger that raises is told of in a warning, and is left out for the rest of the fit.

    Args:
        logger: where to: a path that ends in .jsonl or .csv, a logger of `hookcb.loggers`, or an object with
            a method `log(values, step=…)`, such as a run of wandb; or a list of these.
        every: log batches 0, every, 2·every … of the training.
        on_epoch: log after each epoch too.
        name: what the learner calls it.

    Raises:
        TypeError, ValueError: for arguments that cannot be.

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
    run_valid = False
    run_lr_find = False

    def __init__(
        self,
        logger: Logger | str | Path | list[Any] | tuple[Any, ...],
        every: int = 50,
        *,
        on_epoch: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        given = logger if isinstance(logger, list | tuple) else [logger]
        if not given:
            raise ValueError(f"logger is {logger!r}; give one, or a list of them")
        self.every, self.on_epoch = check_count("every", every, "training batches"), on_epoch
        self._group = LoggerGroup([as_logger(thing) for thing in given])
        self._begin()

    @property
    def loggers(self) -> tuple[Logger, ...]:
        """Where to it logs."""
        return self._group.loggers

    def _begin(self) -> None:
        self._newest = Newest()
        self._batch: dict[str, float | Tensor] | None = None  # loss and rate of the batch, where it is due
        self._is_cancelled = False

    def before_fit(self) -> None:
        self._begin()
        self._group.begin()

    def after_loss(self) -> None:
        if self._is_due:  # now, as the rate may be stepped before the batch ends
            self._batch = self._of_batch()

    def after_cancel_batch(self) -> None:
        self._is_cancelled = True

    def after_batch(self) -> None:
        batch, is_cancelled = self._batch, self._is_cancelled
        self._batch, self._is_cancelled = None, False
        if self._is_due and not is_cancelled:
            of_batch = self._of_batch() if batch is None else batch  # some loops tell of the loss in the end
            self._log({name: float(x) for name, x in of_batch.items()}, self.train_iter)

    def after_epoch(self) -> None:
        if self.on_epoch:
            row = {"epoch": self.epoch, **self.learn.row}
            numbers = {f"epoch/{name}": float(x) for name, x in row.items() if isinstance(x, Real | Tensor)}
            self._log(numbers, max(0, self.train_iter - 1))

    def after_fit(self) -> None:
        self._batch = None
        self._group.end()

    @property
    def _is_due(self) -> bool:
        learn = self.learn
        return learn.fitting and learn.train_iter % self.every == 0

    def _of_batch(self) -> dict[str, float | Tensor]:
        learn = self.learn
        lr = learn.opt.param_groups[-1].get("lr") if learn.opt is not None else None
        return {name: detached_scalar(x) for name, x in (("loss", learn.loss), ("lr", lr)) if x is not None}

    def _log(self, values: Mapping[str, float], now: int) -> None:
        """Logs these, and with them what is new, in the order of steps."""
        by_step: dict[int, tuple[dict[str, float], dict[str, Histogram]]] = {now: (dict(values), {})}
        for reading in self._newest.read(self.learn.cbs):
            of_step = by_step.setdefault(min(reading.step, now), ({}, {}))
            of_step[0].update(reading.values)
            of_step[1].update(reading.hists)
        for step, of_step in sorted(by_step.items(), key=itemgetter(0)):
            self._group.log(step, *of_step)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Log":
        copied = copy.copy(self)
        copied._group = LoggerGroup(self.loggers)  # the same: a run of wandb, say, is there once
        copied._begin()
        return copied
