"""Clock: splits the time of a training."""

from typing import Any

from hookcb.core.clock import TimeSplit
from hookcb.core.loop import label_of
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.run import Run

N_WARM_UP = 5  # batches left out, in which memory is allocated
PREFIX = "callback "  # of the names of callbacks


class Clock(Measurement):
    """Splits the time of a training by phases and callbacks."""

    cadence = EVERY

    def __init__(self) -> None:
        self.own: tuple[Any, ...] = ()  # callbacks of the diagnosis, whose time is left out
        self.split: TimeSplit | None = None
        self.waited = 0.0  # seconds for which the current batch was fetched

    def _label(self, cb: Any) -> str:
        return "" if any(cb is x for x in self.own) else f"{PREFIX}{label_of(cb)}"

    def on_model(self, run: Run) -> None:
        self.split = TimeSplit(self._label, N_WARM_UP)
        run.loop.follow_fetches(self.split)
        run.loop.follow_phases(self.split)

    def on_batch(self, run: Run) -> None:
        if self.split is not None:
            self.waited, self.split.leaves_out = self.split.take_fetched(), run.looking

    def close(self, run: Run) -> None:
        split, self.split, self.own = self.split, None, ()
        if split is not None:
            split.close()
            run.loop.leave_fetches(split)
            run.loop.leave_phases(split)
