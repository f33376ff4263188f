"""MaxTime: ends a fit after so many seconds."""

import math
import time
from datetime import timedelta

from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.events import CancelFitException


class MaxTime(Callback):
    """Ends the fit when it has taken longer than it may, as on a machine that is lent by the hour.

    The training batch in progress is finished, its epoch is not: it gets no validation and no row. Where the
    validation took the time, the epoch is complete. With a `Checkpoint` the fit can be resumed from there; a
    resumed fit has the whole time again.

    Args:
        seconds: how long, as a number of seconds or a `datetime.timedelta`, counted from `before_fit` by a
            clock that is never set back.
        name: what the learner calls it.

    Attributes:
        stopped_at: when the fit was ended, in seconds since it began; None where it was not.

    Raises:
        TypeError: where `seconds` is neither.
        ValueError: where it is 0, negative or NaN.

    >>> from hookcb import MaxTime, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1_000_000, cbs=MaxTime(0.05))
    >>> learn.max_time.stopped_at > 0.05
    True
    """

    order = orders.STOP
    run_valid = False
    run_lr_find = False

    def __init__(self, seconds: float | timedelta, *, name: str | None = None) -> None:
        super().__init__(name=name)
        amount = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        if not isinstance(amount, int | float) or isinstance(amount, bool):
            raise TypeError(f"seconds is {seconds!r}; give a number, or a datetime.timedelta")
        if math.isnan(amount) or amount <= 0:
            raise ValueError(f"seconds is {seconds!r}; give how long the fit may take, more than 0")
        self.seconds = float(amount)
        self.stopped_at: float | None = None

    def before_fit(self) -> None:
        self.stopped_at, self._began = None, time.monotonic()

    def after_batch(self) -> None:
        if self.learn.fitting:
            self._stop_if_over()

    def after_epoch(self) -> None:
        if self.epoch + 1 < self.n_epoch:
            self._stop_if_over()

    def _stop_if_over(self) -> None:
        elapsed = time.monotonic() - self._began
        if elapsed > self.seconds:
            self.stopped_at = elapsed
            raise CancelFitException
