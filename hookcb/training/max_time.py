"""MaxTime: ends a fit after a time limit."""

import math
import time
from datetime import timedelta

from hookcb.core import orders
from hookcb.core.arguments import check_number
from hookcb.core.callback import Callback
from hookcb.core.events import CancelFitException


class MaxTime(Callback):
    """Ends the fit after a time limit, such as that of a machine rented by the hour.

    The training batch in progress is finished, but not its epoch, which gets no validation and no row. If the
    time runs out during validation, the epoch is completed. With a `Checkpoint` the fit can be resumed there;
    a resumed fit has the whole time again.

    Args:
        seconds: the time limit, in seconds or as a `datetime.timedelta`, counted from `before_fit` by a clock
            that is never set back.
        name: name of the callback in the learner.

    Attributes:
        stopped_at: when the fit was ended, in seconds since it began; None if it was not.
        reason: why the fit was ended, None if it was not.

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
        if amount != math.inf:
            check_number("seconds", amount, hint=", or a datetime.timedelta")
        self.seconds = float(amount)
        self.stopped_at: float | None = None
        self.reason: str | None = None

    def before_fit(self) -> None:
        self.stopped_at, self.reason, self._began = None, None, time.monotonic()

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
            self.reason = f"{elapsed:.4g} s have passed, and the limit is {self.seconds:g} s"
            raise CancelFitException(self.reason)
