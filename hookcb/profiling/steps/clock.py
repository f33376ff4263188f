"""StepClock: seconds of each phase of a step, summed up while it runs."""

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import nan
from typing import Any

import torch

from hookcb.core.clock import Clock
from hookcb.profiling.steps.store import StepStore
from hookcb.profiling.steps.times import FIRST_BATCH, STEP_PHASES

Marks = list[tuple[str, Any]]  # the phase that begins, and its CUDA event
Listener = Callable[[tuple[float, ...]], object]
ZEROS = dict.fromkeys(STEP_PHASES, 0.0)


class StepClock(Clock):
    """A clock that adds every step to a store when it ends.

    A step lasts from the end of the previous one, or from `start`, to its own `end`.

    Attributes:
        listener: called with the seconds of each step but the first of an epoch, if it is set.
        notes: incidents of the step in progress.
        workers: seconds in which a DataLoader has started its workers for this step.
    """

    def __init__(self, store: StepStore) -> None:
        super().__init__("other")
        self.store = store
        self.listener: Listener | None = None
        self.workers = 0.0
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether a step is in progress whose beginning was seen."""
        return self._began == self._began  # not NaN

    def start(self, store: StepStore | None = None) -> None:
        """Begins a training or validation, whose first batch includes the start of the loader."""
        self.store = store or self.store
        fetched = 0.0 if self.is_running else self.sums["data"]  # before the loop has told that it begins
        self._began = self.enter(self.phase) - fetched
        self.sums, self.notes = ZEROS | {"data": fetched}, [FIRST_BATCH]

    def start_loader(self) -> None:
        """Notes that the next batch is the first of a loader, which starts now."""
        if self.is_running:
            self.note(FIRST_BATCH)  # the loop does not report its epochs
        else:
            self.stop()  # another loader was read before, such as that of a validation

    def end(self, epoch: int, step: int, n_samples: int | None) -> None:
        """Ends the step."""
        began, self._began = self._began, self.enter(self.phase)
        seconds, notes, self.sums = tuple(self.sums.values()), tuple(self.notes), ZEROS.copy()
        if began == began:
            total = self._began - began
            self.store.add((total, seconds, epoch, step, n_samples, notes, self.workers, ()))
            if self.listener is not None and FIRST_BATCH not in notes:
                self._tell(self.listener, seconds)
        if notes:
            self.notes, self.workers = [], 0.0

    def stop(self) -> None:
        """Ends a training or validation; of the time until the next one only fetches count."""
        self._began, self.sums = nan, ZEROS.copy()
        self.notes, self.workers = list[str](), 0.0
        self.phase = "other"

    def _tell(self, listener: Listener, seconds: tuple[float, ...]) -> None:
        """Notifies the listener of a step, now or once its time is known."""
        listener(seconds)

    def note(self, text: str) -> None:
        """Adds a note to the step in progress."""
        self.notes.append(text)

    def read(self) -> None:
        """Collects the times that the device has finished; nothing without a device."""


class CudaStepClock(StepClock):
    """A StepClock that also times the phases on a CUDA device, with CUDA events that nothing waits for.

    Args:
        store, device: the store, and the device of the model.
        event, stream: functions that make an event and return the current stream; by default CUDA's.
    """

    def __init__(
        self,
        store: StepStore,
        device: torch.device,
        event: Callable[[], Any] | None = None,
        stream: Callable[[torch.device], Any] = torch.cuda.current_stream,
    ) -> None:
        self._device, self._current = device, stream
        self._new = event or partial(torch.cuda.Event, enable_timing=True)
        self._stream = stream(device)
        self._marks: Marks = []  # events of the step in progress
        # unfinished steps, by their store and index in it, with the listener that waits for them
        self._waiting = deque[tuple[StepStore, int, Listener | None, Marks]]()
        self._free: list[Any] = []  # events to reuse: creating one takes longer than recording it
        self._to_tell: Listener | None = None
        super().__init__(store)

    def enter(self, phase: str) -> float:
        """Begins another phase."""
        if self.is_running:
            event = self._free.pop() if self._free else self._new()
            event.record(self._stream)
            self._marks.append((phase, event))
        return super().enter(phase)

    def start(self, store: StepStore | None = None) -> None:
        """Begins a training or validation."""
        self._stream = self._current(self._device)  # once, because asking at each phase costs time
        self._free += [event for _, event in self._marks]
        self._marks = []
        super().start(store)

    def end(self, epoch: int, step: int, n_samples: int | None) -> None:
        """Ends the step."""
        number, self._to_tell = self.store.n, None
        super().end(epoch, step, n_samples)
        marks, self._marks = self._marks, []  # the next step begins with the next phase
        if self.store.n > number:
            self._waiting.append((self.store, number, self._to_tell, marks))
        self.read()

    def read(self) -> None:
        """Collects the steps that the device has finished."""
        while self._waiting and self._waiting[0][-1][-1][1].query():
            store, number, listener, marks = self._waiting.popleft()
            if listener is not None or store.keeps(number):
                seconds = device_seconds(marks)
                store.add_device(number, seconds)
                if listener is not None:
                    listener(seconds)
            self._free += [event for _, event in marks]

    def _tell(self, listener: Listener, seconds: tuple[float, ...]) -> None:
        self._to_tell = listener


def device_seconds(marks: Marks) -> tuple[float, ...]:
    """Seconds of each phase between events that the device has finished."""
    sums = ZEROS.copy()
    for (phase, event), (_, following) in pairwise(marks):
        sums[phase] += event.elapsed_time(following) / 1e3
    return tuple(sums.values())
