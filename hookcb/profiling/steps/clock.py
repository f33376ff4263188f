"""StepClock: seconds of each phase of a step, summed up while it runs."""

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import nan
from time import perf_counter
from typing import Any

import torch

from hookcb.profiling.steps.store import StepStore
from hookcb.profiling.steps.times import FIRST_BATCH, STEP_PHASES

Marks = list[tuple[str, Any]]  # the phase that begins, and its CUDA event
ZEROS = dict.fromkeys(STEP_PHASES, 0.0)


class StepClock:
    """Sums up the time of each phase, and adds every step to a store when it ends.

    A step lasts from the end of the previous one, or from `start`, to its own `end`. Sums are updated at
    once; recording the times and summing them up later takes twice as long.

    Args:
        store: receives the steps.
        between: the phase after the end of a step: "data" if only a fetch happens there.

    Attributes:
        listener: called with the seconds of each step but the first of an epoch, if it is set.

    >>> from hookcb.profiling.steps.clock import StepClock
    >>> from hookcb.profiling.steps.store import StepStore
    >>> store = StepStore(keep=100)
    >>> clock = StepClock(store)
    >>> clock.start()
    >>> for phase in ("data", "forward", "loss", "backward", "optimizer", "callbacks"):
    ...     clock.begin(phase)
    >>> clock.end(epoch=0, step=0, n_samples=32)
    >>> store.times()[0].n_samples
    32
    """

    def __init__(self, store: StepStore, between: str = "data") -> None:
        self._store, self._between = store, between
        self._sums = ZEROS.copy()
        self._began = nan  # start of the step; unknown, as the first may be in progress already
        self.phase, self._since = between, 0.0
        self._notes: list[str] = []
        self.listener: Callable[[tuple[float, ...]], object] | None = None

    def begin(self, phase: str) -> None:
        """Begins another phase; called ten times per step, so each attribute look-up counts."""
        now = perf_counter()
        self._sums[self.phase] += now - self._since
        self.phase, self._since = phase, now

    def start(self, fetched: float = 0.0) -> None:
        """Begins a training or validation, whose first batch includes the start of the loader.

        Args:
            fetched: seconds that the loader has taken for it before.
        """
        self._sums, self._notes = ZEROS | {"data": fetched}, [FIRST_BATCH]
        self.phase, self._since = self._between, perf_counter()
        self._began = self._since - fetched

    def end(self, epoch: int, step: int, n_samples: int | None) -> None:
        """Ends the step."""
        self.begin(self._between)
        total, self._began = self._since - self._began, self._since
        seconds, self._sums = tuple(self._sums.values()), ZEROS.copy()
        if total == total:  # else its start is unknown
            self._store.add((total, seconds, epoch, step, n_samples), self._notes)
            if self.listener is not None and FIRST_BATCH not in self._notes:
                self._tell(seconds)
        if self._notes:
            self._notes = []

    def _tell(self, seconds: tuple[float, ...]) -> None:
        """Notifies the listener of a step, now or once its time is known."""
        if self.listener is not None:
            self.listener(seconds)

    def note(self, text: str) -> None:
        """Adds a note to the step in progress."""
        self._notes.append(text)

    def read(self) -> None:
        """Collects the times that the device has finished; nothing without a device."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"listener": None}  # a copy notifies no one


class CudaStepClock(StepClock):
    """A StepClock that also times the phases on a CUDA device, with CUDA events that nothing waits for.

    Args:
        store, between: see `StepClock`.
        device: device of the model.
        event, stream: functions that make an event and return the current stream; by default CUDA's.
    """

    def __init__(
        self,
        store: StepStore,
        device: torch.device,
        event: Callable[[], Any] | None = None,
        stream: Callable[[torch.device], Any] = torch.cuda.current_stream,
        *,
        between: str = "data",
    ) -> None:
        super().__init__(store, between)
        self._device, self._current = device, stream
        self._new = event or partial(torch.cuda.Event, enable_timing=True)
        self._stream = stream(device)
        self._marks: Marks = []  # events of the step in progress
        self._waiting: deque[tuple[int, Marks]] = deque()  # unfinished steps, by index in the store
        self._to_tell: set[int] = set()  # those of them that the listener waits for
        self._free: list[Any] = []  # events to reuse: creating one takes longer than recording it

    def begin(self, phase: str) -> None:
        """Begins another phase."""
        self._mark(phase)
        super().begin(phase)

    def start(self, fetched: float = 0.0) -> None:
        """Begins a training or validation."""
        self._stream = self._current(self._device)  # once, because asking at each phase costs time
        self._free += [event for _, event in self._marks]
        self._marks = []
        super().start(fetched)

    def end(self, epoch: int, step: int, n_samples: int | None) -> None:
        """Ends the step."""
        number = self._store.n
        super().end(epoch, step, n_samples)
        marks, self._marks = self._marks, []  # the next step begins with the next phase
        if self._store.n > number:
            self._waiting.append((number, marks))
        self.read()

    def read(self) -> None:
        """Collects the steps that the device has finished."""
        while self._waiting and self._waiting[0][1][-1][1].query():
            number, marks = self._waiting.popleft()
            is_told = number in self._to_tell
            if is_told or self._store.keeps(number):
                seconds = device_seconds(marks)
                if self._store.keeps(number):
                    self._store.add_device(number, seconds)
                if is_told:
                    self._to_tell.discard(number)
                    super()._tell(seconds)
            self._free += [event for _, event in marks]

    def _tell(self, seconds: tuple[float, ...]) -> None:
        self._to_tell.add(self._store.n - 1)

    def _mark(self, phase: str) -> None:
        event = self._free.pop() if self._free else self._new()
        event.record(self._stream)
        self._marks.append((phase, event))


class PhaseInside:
    """Counts what begins and ends inside of other phases, such as a fetch, as a phase of its own.

    Args:
        phase: that phase.
        clock: returns the clock that is running, or None.
    """

    def __init__(self, phase: str, clock: Callable[[], StepClock | None]) -> None:
        self._phase, self._clock, self._before = phase, clock, ""

    def begin(self) -> None:
        """Begins the phase."""
        if (clock := self._clock()) is not None:
            self._before = clock.phase
            clock.begin(self._phase)

    def end(self) -> None:
        """Ends it, and returns to the phase before it."""
        if (clock := self._clock()) is not None and self._before:
            clock.begin(self._before)
            self._before = ""


class LoaderWaits(PhaseInside):
    """Counts the time in a DataLoader as "data": in its fetches, and in the start of its iterator.

    Args:
        clock: returns the clock that is running, or None between epochs.
    """

    def __init__(self, clock: Callable[[], StepClock | None]) -> None:
        super().__init__("data", clock)
        self._depth, self._seconds = 0, 0.0
        self._is_between = True  # whether the fetch in progress is one between epochs

    def begin(self) -> None:
        """Begins a fetch; one inside another does not count, as of a dataset that reads from a loader."""
        self._depth += 1
        if self._depth > 1:
            return
        self._is_between = self._clock() is None
        if self._is_between:
            self._seconds -= perf_counter()
        super().begin()

    def end(self) -> None:
        """Ends it."""
        self._depth -= 1
        if self._depth:
            return
        if self._is_between:
            self._seconds += perf_counter()
        super().end()

    def take(self) -> float:
        """Seconds between epochs since the iterator started, or since this was last called."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class LoaderStarts:
    """Counts the start of an iterator by `LoaderWaits`, and notes that the next batch is its first.

    Args:
        waits: counts the time.
        clock: returns the clock that is running, or None between epochs.
    """

    def __init__(self, waits: LoaderWaits, clock: Callable[[], StepClock | None]) -> None:
        self._waits, self._clock = waits, clock

    def begin(self) -> None:
        """An iterator starts."""
        if (clock := self._clock()) is None:
            self._waits.take()  # another loader was read before, such as that of a validation
        else:
            clock.note(FIRST_BATCH)  # the loop does not report its epochs
        self._waits.begin()

    def end(self) -> None:
        """It has started."""
        self._waits.end()


def device_seconds(marks: Marks) -> tuple[float, ...]:
    """Seconds of each phase between events that the device has finished.

    Args:
        marks: phases with the events at their beginning, in order.
    """
    sums = ZEROS.copy()
    for (phase, event), (_, following) in pairwise(marks):
        sums[phase] += event.elapsed_time(following) / 1e3
    return tuple(sums.values())
