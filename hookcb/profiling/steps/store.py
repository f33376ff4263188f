"""StepStore: times of the steps of a run, in bounded memory."""

from collections.abc import Mapping, Sequence
from heapq import heappush, heappushpop
from typing import TypeVar

from hookcb.profiling.steps.times import FIRST_BATCH, Row, StepTime, step_time
from hookcb.records.thinned import Thinned

N_SLOWEST = 100

T = TypeVar("T")


class StepStore:
    """Times of up to `keep` steps spread evenly over the run, see `Thinned`, and of the slowest 100.

    First steps of an epoch are not among the slowest 100, because each of them is slow.

    Args:
        keep: number of steps to keep, 2 or more.

    >>> from hookcb.profiling.steps.store import StepStore
    >>> store = StepStore(keep=4)
    >>> for step in range(10):
    ...     store.add((0.3, (0.0, 0.1, 0.0, 0.2, 0.0, 0.0, 0.0), 0, step, 32))
    >>> [time.step for time in store.times()]
    [0, 4, 8, 9]
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._rows = Thinned[tuple[int, Row]](keep)  # with its number
        self._slowest: dict[int, Row] = {}
        self._heap: list[tuple[float, int]] = []  # the slowest, by time
        self._least = 0.0  # time that a step must exceed to be one of the slowest
        self._notes: dict[int, tuple[str, ...]] = {}
        self._workers: dict[int, float] = {}
        self._on_device: dict[int, tuple[float, ...]] = {}

    @property
    def n(self) -> int:
        """Number of steps that were added."""
        return self._rows.n

    def add(self, row: Row, notes: Sequence[str] = (), workers: float = 0.0) -> None:
        """Adds a step with its notes, and the seconds in which workers were started for it."""
        i = self._rows.n
        self._rows.add((i, row))
        if row[0] > self._least and FIRST_BATCH not in notes:
            self._add_slow(row, i)
        if notes:
            self._notes[i] = tuple(notes)
            self._notes = self._pruned(self._notes)
        if workers:
            self._workers[i] = workers
            self._workers = self._pruned(self._workers)

    def add_device(self, i: int, seconds: tuple[float, ...]) -> None:
        """Adds the device seconds of each phase of step `i`."""
        self._on_device[i] = seconds
        self._on_device = self._pruned(self._on_device)

    def keeps(self, i: int) -> bool:
        """Whether step `i` is kept."""
        return self._rows.place(i) is not None or i in self._slowest

    def times(self) -> list[StepTime]:
        """The evenly spaced steps, in order."""
        return self._read(dict(self._rows.items))

    def times_and_slowest(self) -> list[StepTime]:
        """All steps that are kept, in order."""
        return self._read(self._all())

    def _add_slow(self, row: Row, i: int) -> None:
        self._slowest[i] = row
        if len(self._slowest) <= N_SLOWEST:
            heappush(self._heap, (row[0], i))
        else:
            del self._slowest[heappushpop(self._heap, (row[0], i))[1]]
            self._least = self._heap[0][0]

    def _all(self) -> dict[int, Row]:
        return dict(sorted((dict(self._rows.items) | self._slowest).items()))

    def _pruned(self, by_step: dict[int, T]) -> dict[int, T]:
        """The items of steps that are kept, once there are many of others."""
        if len(by_step) <= 2 * (self.keep + N_SLOWEST):
            return by_step
        return {i: by_step[i] for i in self._all() if i in by_step}

    def _read(self, rows: Mapping[int, Row]) -> list[StepTime]:
        return [
            step_time(row, self._notes.get(i, ()), self._on_device.get(i, ()), self._workers.get(i, 0.0))
            for i, row in rows.items()
        ]
