"""StepClock: seconds of each phase of the steps of a fit, summed up as they pass."""

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

Marks = list[tuple[str, Any]]  # what begins, and its event
ZEROS = dict.fromkeys(STEP_PHASES, 0.0)


class StepClock:
    """Adds up, while phases change, what each takes; puts every step that ends into a store.

    A step is from the end of the one before, or from `start`, to its own `end`. All is summed up at once: to
    write down times and work them out later takes twice as long.

    Args:
        store: where to.
        between: the phase from the end of a step on: "data" if nothing but a fetch lies there.

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
        self._began = nan  # the step: at no time, as this may begin in the middle of one
        self.phase, self._since = between, 0.0
        self._notes: list[str] = []

    def begin(self, phase: str) -> None:
        """Another phase begins; it does so ten times a step, so that each look-up counts."""
        now = perf_counter()
        self._sums[self.phase] += now - self._since
        self.phase, self._since = phase, now

    def start(self) -> None:
        """A training or validation begins: its first batch waits for the loader to start."""
        self._sums, self._notes = ZEROS.copy(), [FIRST_BATCH]
        self.phase, self._since = self._between, perf_counter()
        self._began = self._since

    def end(self, epoch: int, step: int, n_samples: int | None) -> None:
        """The step ends."""
        self.begin(self._between)
        total, self._began = self._since - self._began, self._since
        seconds, self._sums = tuple(self._sums.values()), ZEROS.copy()
        if total == total:  # else its beginning was missed
            self._store.add((total, seconds, epoch, step, n_samples), self._notes)
        if self._notes:
            self._notes = []

    def note(self, text: str) -> None:
        """Something happens now, in the step in progress."""
        self._notes.append(text)

    def read(self) -> None:
        """Takes in what the device has come to; here there is none."""


class CudaStepClock(StepClock):
    """Has a CUDA device tell as well when it comes to each phase, by events that nothing waits for.

    Args:
        store, between: see `StepClock`.
        device: of the model.
        event, stream: make an event, and give the stream to follow; by default CUDA's.
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
        self._marks: Marks = []  # of the step in progress
        self._waiting: deque[tuple[int, Marks]] = deque()  # steps by their number in the store
        self._free: list[Any] = []  # events to use again, as making one takes longer than recording it

    def begin(self, phase: str) -> None:
        """Another phase begins."""
        self._mark(phase)
        super().begin(phase)

    def start(self) -> None:
        """A training or validation begins."""
        self._stream = self._current(self._device)  # here, as to ask each time would cost
        self._free += [event for _, event in self._marks]
        self._marks = []
        super().start()

    def end(self, epoch: int, step: int, n_samples: int | None) -> None:
        """The step ends."""
        number = self._store.n
        super().end(epoch, step, n_samples)
        marks, self._marks = self._marks, []  # the next step begins with the next phase
        if self._store.n > number:
            self._waiting.append((number, marks))
        self.read()

    def read(self) -> None:
        """Takes in the steps that the device has ended."""
        while self._waiting and self._waiting[0][1][-1][1].query():
            number, marks = self._waiting.popleft()
            if self._store.keeps(number):
                self._store.add_device(number, device_seconds(marks))
            self._free += [event for _, event in marks]

    def _mark(self, phase: str) -> None:
        event = self._free.pop() if self._free else self._new()
        event.record(self._stream)
        self._marks.append((phase, event))


class FetchPhase:
    """Has a clock count each fetch as "data", in whatever phase it comes.

    Args:
        clock: gives the one that runs, None if none does.
    """

    def __init__(self, clock: Callable[[], StepClock | None]) -> None:
        self._clock, self._before = clock, ""

    def begin(self) -> None:
        """A fetch begins."""
        if (clock := self._clock()) is not None:
            self._before = clock.phase
            clock.begin("data")

    def end(self) -> None:
        """It has ended."""
        if (clock := self._clock()) is not None and self._before:
            clock.begin(self._before)
            self._before = ""


def device_seconds(marks: Marks) -> tuple[float, ...]:
    """Seconds of each phase between events that the device has come to.

    Args:
        marks: what begins, and its event, in their order.
    """
    sums = ZEROS.copy()
    for (phase, event), (_, following) in pairwise(marks):
        sums[phase] += event.elapsed_time(following) / 1e3
    return tuple(sums.values())
