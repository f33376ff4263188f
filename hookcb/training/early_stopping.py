"""EarlyStopping: ends a fit that no longer improves."""

import math
from typing import Any

from torch import Tensor

from hookcb.core import orders
from hookcb.core.arguments import check_count, check_number
from hookcb.core.callback import Callback
from hookcb.core.events import CancelFitException
from hookcb.training.ema import check_validates_weights
from hookcb.training.monitor import Mode, check_monitor, check_patience, improves, monitored, resolve_mode


class EarlyStopping(Callback):
    """Ends the fit after `patience` epochs in a row without an improvement.

    The last epoch is complete: validated, recorded, and saved by a `Checkpoint`. The weights are from the
    last epoch, unless `restore_best`. NaN is never an improvement. An epoch that was cancelled before it had
    a value does not count. A fit that is resumed after it was stopped ends at once, unless it is given more
    patience.

    Args:
        monitor: a column of the epoch's row: `valid_loss`, `train_loss`, or the name of a metric.
        mode: "min" or "max", which is better; by default "min" if the name contains "loss" or "error". Also
            a function such as `np.less` or `np.greater`.
        min_delta: a value must be better than the best by more than this, in the unit of `monitor`.
        patience: number of epochs without an improvement that end the fit.
        baseline: a value that has to be beaten too; until then no epoch counts as an improvement.
        restore_best: whether the model gets the weights and buffers of its best epoch when the fit ends,
            stopped or not, but not if it failed. They are copied at each improvement, on their device, and
            are in the state of a `Checkpoint`; the optimizer stays as it is.
        start_from_epoch: epochs before this one, from 0, do not count.
        check_finite: whether NaN or infinity ends the fit at once.
        stopping_threshold: a value better than this ends the fit at once.
        divergence_threshold: a value worse than this ends the fit at once.
        name: name of the callback in the learner.

    Attributes:
        best: the best value so far; None before the first.
        best_epoch: epoch of the best value, from 0; None before the first.
        wait: number of epochs since then.
        reason: why the fit was ended, None if it was not.

    Raises:
        ValueError: When the fit begins, if `restore_best` meets an `EMA` that is validated, as the best value
            is not that of the trained weights then.
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
        mode: Mode | None = None,
        min_delta: float = 0.0,
        patience: int = 1,
        *,
        baseline: float | None = None,
        restore_best: bool = False,
        start_from_epoch: int = 0,
        check_finite: bool = False,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        check_patience(patience, min_delta)
        check_count("start_from_epoch", start_from_epoch, "epochs", least=0)
        for what, value in (
            ("baseline", baseline),
            ("stopping_threshold", stopping_threshold),
            ("divergence_threshold", divergence_threshold),
        ):
            if value is not None:
                check_number(what, value, -math.inf, hint=", in the unit of what is monitored")
        self.baseline, self.restore_best, self.start_from_epoch = baseline, restore_best, start_from_epoch
        self.check_finite = check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.monitor, self.mode = monitor, resolve_mode(monitor, mode)
        self.min_delta, self.patience = min_delta, patience
        self._forget()

    def _forget(self) -> None:
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.wait = 0
        self.reason: str | None = None
        self._weights: dict[str, Tensor] = {}  # of the best epoch

    def before_fit(self) -> None:
        self._forget()
        check_monitor(self.learn, self.monitor)
        if self.restore_best:
            check_validates_weights(self.learn, "restore_best would bring back")

    def before_epoch(self) -> None:
        self._stop_if_due()  # the fit may have been resumed after it was stopped

    def after_epoch(self) -> None:
        value = monitored(self.learn, self.monitor)
        if value is None or self.epoch < self.start_from_epoch:
            return
        is_better = improves(value, self.best, self.mode, self.min_delta)
        if is_better:
            self.best, self.best_epoch = value, self.epoch
            self._weights = self._copied() if self.restore_best else {}
        if is_better and (self.baseline is None or improves(value, self.baseline, self.mode)):
            self.wait = 0
        else:
            self.wait += 1
        self._stop_if_beyond(value)
        self._stop_if_due()

    def after_fit(self) -> None:
        if self._weights and self.learn.fit_succeeded:
            self.learn.model.load_state_dict(self._weights, strict=False)
        self._weights = {}

    def _copied(self) -> dict[str, Tensor]:
        state = self.learn.model.state_dict()
        return {name: x.detach().clone() for name, x in state.items() if isinstance(x, Tensor)}

    def _stop_if_beyond(self, value: float) -> None:
        worse = "max" if self.mode == "min" else "min"
        if self.check_finite and not math.isfinite(value):
            self.reason = f"{self.monitor} is {value:g}"
        elif self.stopping_threshold is not None and improves(value, self.stopping_threshold, self.mode):
            self.reason = f"{self.monitor} is {value:.6g}, better than {self.stopping_threshold:g}"
        elif self.divergence_threshold is not None and improves(value, self.divergence_threshold, worse):
            self.reason = f"{self.monitor} is {value:.6g}, worse than {self.divergence_threshold:g}"
        else:
            return
        raise CancelFitException(self.reason)

    def _stop_if_due(self) -> None:
        if self.wait < self.patience:
            return
        trend = "has not been a number"
        if self.best is not None:
            trend = f"has not been better than {self.best:.6g}, of epoch {self.best_epoch},"
        self.reason = f"{self.monitor} {trend} for {self.wait} epoch{'s' if self.wait > 1 else ''}"
        raise CancelFitException(self.reason)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"best": self.best, "best_epoch": self.best_epoch, "wait": self.wait}
        return state | ({"weights": self._weights} if self._weights else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_epoch, self.wait = state["best"], state["best_epoch"], state["wait"]
        self._weights = dict(state.get("weights", {}))
