"""EarlyStopping: ends a fit that does not get better."""

from typing import Any

from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.events import CancelFitException
from hookcb.training.monitor import check_monitor, check_patience, improves, monitored, resolve_mode


class EarlyStopping(Callback):
    """Ends the fit after `patience` epochs in a row without an improvement.

    The epoch in which that shows is complete: validated, recorded, and saved by a `Checkpoint`. The weights
    stay those of the last epoch; for the best ones take `Checkpoint(monitor=…)` or `EMA`. NaN is never an
    improvement. An epoch that was cancelled before there was a value counts neither way. A fit resumed from
    where it was stopped ends at once, unless it is given more patience.

    Args:
        monitor: a column of the epoch's row: `valid_loss`, `train_loss`, or the name of a metric.
        mode: "min" or "max", what is better; by default "min" where the name has "loss" or "error" in it.
        min_delta: by how much more than this a value must be better than the best, in its unit.
        patience: number of epochs without an improvement that end the fit.
        name: what the learner calls it.

    Attributes:
        best: the best value so far; None before the first.
        best_epoch: the epoch it is of, from 0; None before the first.
        wait: number of epochs since then.
        reason: why the fit was ended, None where it was not.

    Raises:
        TypeError, ValueError: for arguments that cannot be.
        LookupError: where there is no such column, before training if its name is almost that of one.

    >>> from hookcb import EarlyStopping, synth_learner
    >>> learn = synth_learner(lr=0.0)
    >>> with learn.no_logging():
    ...     learn.fit(10, cbs=EarlyStopping(patience=2))
    >>> len(learn.recorder.rows), learn.early_stopping.best_epoch
    (3, 0)
    """

    order = orders.STOP
    run_lr_find = False

    def __init__(
        self,
        monitor: str = "valid_loss",
        mode: str | None = None,
        min_delta: float = 0.0,
        patience: int = 1,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        check_patience(patience, min_delta)
        self.monitor, self.mode = monitor, resolve_mode(monitor, mode)
        self.min_delta, self.patience = min_delta, patience
        self._forget()

    def _forget(self) -> None:
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.wait = 0
        self.reason: str | None = None

    def before_fit(self) -> None:
        self._forget()
        check_monitor(self.learn, self.monitor)

    def before_epoch(self) -> None:
        self._stop_if_due()  # resumed from where it had been stopped

    def after_epoch(self) -> None:
        value = monitored(self.learn, self.monitor)
        if value is None:
            return
        if improves(value, self.best, self.mode, self.min_delta):
            self.best, self.best_epoch, self.wait = value, self.epoch, 0
        else:
            self.wait += 1
        self._stop_if_due()

    def _stop_if_due(self) -> None:
        if self.wait < self.patience:
            return
        best = "has never been a number"
        if self.best is not None:
            best = f"is not better than {self.best:.6g}, of epoch {self.best_epoch}"
        self.reason = f"{self.monitor} {best}, since {self.wait} epoch{'s' if self.wait > 1 else ''}"
        raise CancelFitException

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "wait": self.wait}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_epoch, self.wait = state["best"], state["best_epoch"], state["wait"]


EarlyStoppingCallback = EarlyStopping  # fastai's name
