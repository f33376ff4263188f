"""TimeSplit: seconds of a training by what it does: its phases, its callbacks, garbage collection."""

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from hookcb.core.events import Event

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
Marks = list[tuple[Any, float]]  # callbacks, and when each has acted; first None, and when they began
NEGLIGIBLE = 5e-5  # seconds of all callbacks at an event, which then belong to none
MIN_GENERATION = 1  # collections of the youngest objects take 0.1 ms, every few steps


class TimeSplit:
    """Splits the time of a training at its events; a `FetchListener`, and the `clock` of a loop.

    The sums of a batch are added to `seconds` when it ends, unless `leaves_out`. The first ones of a fit are
    left out as well.

    Args:
        label: returns the name of a callback, "" for those whose time does not count.
        n_warm_up: number of batches at the beginning that are left out.

    Attributes:
        seconds: seconds in all `n` batches, by phase and by name of the callback.
        largest: the two largest of these in one batch; a busy machine may have stopped the process in them.
        leaves_out: whether the batch in progress is left out.
        phase_begins: called with each phase that begins, and with "" if callbacks act.

    >>> from hookcb.core.time_split import TimeSplit
    >>> split = TimeSplit(lambda cb: cb, n_warm_up=0)
    >>> for event in ("before_batch", "after_pred", "after_batch"):
    ...     marks = split.begin_callbacks()
    ...     marks.append(("Log", marks[0][1] + 1.0))
    ...     split.end_callbacks(event, marks)
    >>> split.n, split.seconds["Log"] > 2.9
    (1, True)
    """

    def __init__(self, label: Callable[[Any], str], n_warm_up: int) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.largest: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.n, self.leaves_out = 0, False
        self.phase_begins: Callable[[str], object] | None = None
        self._label = label
        self._labels: dict[int, str] = {}
        self._n_to_come = n_warm_up
        self._now: defaultdict[str, float] = defaultdict(float)  # of the batch in progress
        self._phase, self._since = EPOCH, time.perf_counter()
        self._before_fetch, self._collecting_since = EPOCH, self._since
        self._collections: list[tuple[float, float]] | None = None  # while callbacks act: ends and seconds
        self._thread = threading.get_ident()
        gc.callbacks.append(self._at_collection)

    def close(self) -> None:
        """Stops listening to the garbage collector."""
        if self._at_collection in gc.callbacks:
            gc.callbacks.remove(self._at_collection)

    def begin_callbacks(self) -> Marks:
        """Ends the phase, as callbacks are about to act.

        Returns:
            A list, to which each callback is appended with the time when it has acted.
        """
        if self.phase_begins is not None:
            self.phase_begins("")
        self._collections = []
        return [(None, time.perf_counter())]

    def end_callbacks(self, event: str, marks: Marks) -> None:
        """Begins the phase after an event, at which callbacks have acted."""
        (_, began), (_, ended) = marks[0], marks[-1]
        self._now[self._phase] += began - self._since
        if ended - began > NEGLIGIBLE:
            self._add_callbacks(marks)
        self._since, self._collections = ended, None
        self._phase = AFTER.get(event, self._phase)
        if event == Event.AFTER_BATCH:
            self._end_batch()
        if self.phase_begins is not None:
            self.phase_begins(self._phase)

    def _add_callbacks(self, marks: Marks) -> None:
        """Adds the time of each callback, without garbage collections in it."""
        for (_, began), (cb, ended) in pairwise(marks):
            if (name := self._labels.get(id(cb))) is None:
                name = self._labels[id(cb)] = self._label(cb)
            collected = sum(seconds for at, seconds in self._collections or () if began <= at <= ended)
            self._now[name] += ended - began - collected

    def begin(self) -> None:
        """Begins a fetch; the first one of an epoch also starts the loader."""
        self._before_fetch = self._phase
        self._switch(EPOCH if self._phase == EPOCH else DATA)

    def end(self) -> None:
        """Ends a fetch."""
        self._switch(self._before_fetch)

    def _switch(self, phase: str) -> None:
        now = time.perf_counter()
        self._now[self._phase] += now - self._since
        self._phase, self._since = phase, now
        if self.phase_begins is not None:
            self.phase_begins(phase)

    def _end_batch(self) -> None:
        if self._n_to_come:
            self._n_to_come -= 1
        elif not self.leaves_out:
            for name, seconds in self._now.items():
                self.seconds[name] += seconds
                two = self.largest[name]
                if seconds > two[0]:
                    two[0] = seconds
                    two.sort()
            self.n += 1
        self._now.clear()

    def _at_collection(self, stage: str, info: Mapping[str, int]) -> None:
        if info["generation"] < MIN_GENERATION or threading.get_ident() != self._thread:
            return
        now = time.perf_counter()
        if stage == "start":
            self._collecting_since = now
            return
        seconds = now - self._collecting_since
        self._now[GARBAGE] += seconds
        if self._collections is None:
            self._since += seconds
        else:
            self._collections.append((now, seconds))
