"""TimeSplit: seconds of a training by what it does: its phases, its callbacks, garbage collection."""

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from hookcb.core.events import Event
from hookcb.core.threads import this_thread

DATA, BETWEEN, EPOCH, VALIDATION = "data", "between", "epoch", "validation"
GARBAGE = "garbage collection"
AFTER: Mapping[str, str] = {  # the phase that begins after an event
    Event.BEFORE_TRAIN: EPOCH,
    Event.BEFORE_BATCH: "forward",
    Event.AFTER_PRED: "loss",
    Event.AFTER_LOSS: BETWEEN,
    Event.BEFORE_BACKWARD: "backward",
    Event.AFTER_BACKWARD: BETWEEN,
    Event.BEFORE_STEP: "optimizer",
    Event.AFTER_STEP: BETWEEN,
    Event.AFTER_BATCH: BETWEEN,
    Event.AFTER_TRAIN: EPOCH,
    Event.BEFORE_VALIDATE: VALIDATION,
    Event.AFTER_VALIDATE: EPOCH,
}
Marks = list[tuple[Any, Any]]  # a phase or a callback, and the time at which it has ended
BATCH = object()  # instead of these: the last event of a batch, and whether that is left out
COLLECTION = object()  # and the seconds of a garbage collection
N_LARGEST = 3  # times that are kept of each phase and callback
MAX_MARKS = 2_000  # that wait to be added up, which is faster for many batches together
MIN_GENERATION = 1  # collections of the youngest objects take 0.1 ms, every few steps


class TimeSplit:
    """Splits the time of a training at its events; a `FetchListener`, and the `clock` of a loop.

    The seconds of a batch count once its last event is over, unless `leaves_out`. The first ones of a fit do
    not count.

    Args:
        label: returns the name of a callback, "" for those whose time does not count.
        n_warm_up: number of batches at the beginning that are left out.

    Attributes:
        leaves_out: whether the batch in progress is left out.
        phase: the phase in progress, or that after the callbacks that act.

    >>> from hookcb.core.time_split import TimeSplit
    >>> split = TimeSplit(lambda cb: cb.name, n_warm_up=0)
    >>> for event in ("before_batch", "after_pred", "after_batch", "after_train"):
    ...     _ = split.begin_callbacks(event)
    >>> split.n, split.seconds["forward"] > 0
    (1, True)
    """

    def __init__(self, label: Callable[[Any], str], n_warm_up: int) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._largest: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * N_LARGEST)
        self._n, self.leaves_out = 0, False
        self._label = label
        self._labels: dict[int, str] = {}
        self._n_to_come = n_warm_up
        self._now: defaultdict[str, float] = defaultdict(float)  # of the batch that is added up
        self._is_over = self._is_left_out = False  # of that batch: whether its last event has come
        self.phase = self._before_fetch = EPOCH
        self._fetched = self._fetch_began = 0.0
        self._marks: Marks = []
        self._since = self._collecting_since = time.perf_counter()
        self._thread = this_thread()
        gc.callbacks.append(self._at_collection)

    @property
    def n(self) -> int:
        """Number of batches."""
        self._add_marks()
        return self._n

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds in all `n` batches, by phase and by name of the callback."""
        self._add_marks()
        return self._seconds

    @property
    def largest(self) -> dict[str, list[float]]:
        """The largest of these in one batch, in order; a busy machine may have stopped the process then."""
        self._add_marks()
        return self._largest

    def close(self) -> None:
        """Stops listening to the garbage collector."""
        if self._at_collection in gc.callbacks:
            gc.callbacks.remove(self._at_collection)

    def begin_callbacks(self, event: str) -> Marks:
        """Ends the phase before an event, at which callbacks are about to act.

        Returns:
            A list, to which each callback is appended with the time when it has acted.
        """
        self._marks.append((self.phase, time.perf_counter()))
        self.phase = AFTER.get(event, self.phase)
        if event == Event.AFTER_BATCH:
            self._marks.append((BATCH, self.leaves_out))
            if len(self._marks) > MAX_MARKS:
                self._add_marks()
        return self._marks

    def begin(self) -> None:
        """Begins a fetch; the first one of an epoch also starts the loader."""
        self._before_fetch = phase = self.phase
        self._fetch_began = self._switch(phase if phase in (EPOCH, VALIDATION) else DATA)

    def end(self) -> None:
        """Ends a fetch; one of a validation is not one that the training waits for."""
        now = self._switch(self._before_fetch)
        if self._before_fetch != VALIDATION:
            self._fetched += now - self._fetch_began

    def take_fetched(self) -> float:
        """Returns the seconds in fetches since the last call, and sets them to 0."""
        seconds, self._fetched = self._fetched, 0.0
        return seconds

    def _switch(self, phase: str) -> float:
        now = time.perf_counter()
        self._marks.append((self.phase, now))
        self.phase = phase
        return now

    def _add_marks(self) -> None:
        """Adds up the seconds before each mark."""
        marks = self._marks[:]
        self._marks.clear()  # the same list, as callbacks may be acting now
        since, now, labels = self._since, self._now, self._labels
        for what, x in marks:
            if what is COLLECTION:
                now[GARBAGE] += x
                since += x
            elif what is BATCH:
                self._is_over, self._is_left_out = True, x
            else:
                is_phase = isinstance(what, str)
                if is_phase and self._is_over:
                    self._end_batch()
                name = what if is_phase else labels.get(id(what))
                if name is None:
                    name = labels[id(what)] = self._label(what)
                now[name] += x - since
                since = x
        self._since = since

    def _end_batch(self) -> None:
        self._is_over = False
        if self._n_to_come:
            self._n_to_come -= 1
        elif not self._is_left_out:
            for name, seconds in self._now.items():
                self._seconds[name] += seconds
                largest = self._largest[name]
                if seconds > largest[0]:
                    largest[0] = seconds
                    largest.sort()
            self._n += 1
        self._now.clear()

    def _at_collection(self, stage: str, info: Mapping[str, int]) -> None:
        if info["generation"] < MIN_GENERATION or this_thread() != self._thread:
            return
        if stage == "start":
            self._collecting_since = time.perf_counter()
        else:
            seconds = time.perf_counter() - self._collecting_since
            self._marks.append((COLLECTION, seconds))
            self._fetch_began += seconds  # of the fetch in progress, if there is one
