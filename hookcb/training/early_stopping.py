"""EarlyStopping: ends a fit that no longer improves."""

from typing import Any

from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.events import CancelFitException
from hookcb.training.monitor import check_monitor, check_patience, improves, monitored, resolve_mode


class EarlyStopping(Callback):
    """Ends the fit after `patience` epochs in a row without an improvement.

    The last epoch is complete: validated, recorded, and saved by a `Checkpoint`. The weights are from the
    last epoch; for the best ones, use `Checkpoint(monitor=…)` or `EMA`. NaN is never an improvement. An epoch
    that was cancelled before it had a value does not count. A fit that is resumed after it was stopped ends
    at once, unless it is given more patience.

    Args:
        monitor: a column of the epoch's row: `valid_loss`, `train_loss`, or the name of a metric.
        mode: "min" or "max", which is better; by default "min" if the name contains "loss" or "error".
        min_delta: a value must be better than the best by more than this, in the unit of `monitor`.
        patience: number of epochs without an improvement that end the fit.
        name: name of the callback in the learner.

    Attributes:
        best: the best value so far; None before the first.
        best_epoch: epoch of the best value, from 0; None before the first.
        wait: number of epochs since then.
        reason: why the fit was ended, None if it was not.

    Raises:
        TypeError, ValueError: If an argument is invalid.
        LookupError: If no column has that name; before training, if it looks like a typo.

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
        self._stop_if_due()  # the fit may have been resumed after it was stopped

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
        trend = "has not been a number"
        if self.best is not None:
            trend = f"has not been better than {self.best:.6g}, of epoch {self.best_epoch},"
        self.reason = f"{self.monitor} {trend} for {self.wait} epoch{'s' if self.wait > 1 else ''}"
        raise CancelFitException

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "wait": self.wait}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_epoch, self.wait = state["best"], state["best_epoch"], state["wait"]


EarlyStoppingCallback = EarlyStopping  # fastai's name
