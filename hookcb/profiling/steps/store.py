"""StepStore: the steps of a run, in bounded memory."""

from collections.abc import Mapping, Sequence
from heapq import heappush, heappushpop
from typing import TypeVar

from hookcb.profiling.steps.times import FIRST_BATCH, Row, StepTime, step_time

N_SLOWEST = 100

T = TypeVar("T")


class StepStore:
    """Keeps what steps took: evenly over the run, and the slowest.

    Never more than `keep` stay: when there would be more, every second one is dropped, and from then on every
    second (fourth, eighth …) is kept, and the newest, as in a `StatStore`. The slowest 100 stay besides,
    without those that begin an epoch, of which each is slow.

    Args:
        keep: how many stay, 2 or more.

    >>> from hookcb.profiling.steps.store import StepStore
    >>> store = StepStore(keep=4)
    >>> for step in range(10):
    ...     store.add((0.3, (0.0, 0.1, 0.0, 0.2, 0.0, 0.0, 0.0), 0, step, 32))
    >>> [time.step for time in store.times()]
    [0, 4, 8, 9]
    """

    def __init__(self, keep: int) -> None:
        self.keep, self.n = keep, 0
        self._stride = 1
        self._rows: dict[int, Row] = {}
        self._newest: Row | None = None
        self._slowest: dict[int, Row] = {}
        self._heap: list[tuple[float, int]] = []  # of these, by what they took
        self._least = 0.0  # what a step has to exceed to be one of them
        self._notes: dict[int, tuple[str, ...]] = {}
        self._on_device: dict[int, tuple[float, ...]] = {}

    def add(self, row: Row, notes: Sequence[str] = ()) -> None:
        """Takes in a step, and what happened in it."""
        i = self.n
        if len(self._rows) == self.keep:
            self._thin()
        if i % self._stride == 0:
            self._rows[i] = row
        self.n, self._newest = i + 1, row
        if row[0] > self._least and FIRST_BATCH not in notes:
            self._add_slow(row, i)
        if notes:
            self._notes[i] = tuple(notes)
            self._notes = self._pruned(self._notes)

    def add_device(self, i: int, seconds: tuple[float, ...]) -> None:
        """Takes in what each phase of the step of that number took on the device."""
        self._on_device[i] = seconds
        self._on_device = self._pruned(self._on_device)

    def keeps(self, i: int) -> bool:
        """Whether the step of that number stays."""
        return i in self._rows or i in self._slowest or i == self.n - 1

    def times(self) -> list[StepTime]:
        """Those that stay evenly, in their order."""
        return self._read(self._rows | self._last())

    def times_and_slowest(self) -> list[StepTime]:
        """All that stay, in their order."""
        return self._read(self._all())

    def _add_slow(self, row: Row, i: int) -> None:
        self._slowest[i] = row
        if len(self._slowest) <= N_SLOWEST:
            heappush(self._heap, (row[0], i))
        else:
            del self._slowest[heappushpop(self._heap, (row[0], i))[1]]
            self._least = self._heap[0][0]

    def _thin(self) -> None:
        self._stride *= 2
        self._rows = {i: row for i, row in self._rows.items() if i % self._stride == 0}

    def _last(self) -> dict[int, Row]:
        return {} if self._newest is None else {self.n - 1: self._newest}

    def _all(self) -> dict[int, Row]:
        return dict(sorted((self._rows | self._last() | self._slowest).items()))

    def _pruned(self, of: dict[int, T]) -> dict[int, T]:
        """What is of steps that stay, once there is much of others."""
        if len(of) <= 2 * (self.keep + N_SLOWEST):
            return of
        return {i: of[i] for i in self._all() if i in of}

    def _read(self, rows: Mapping[int, Row]) -> list[StepTime]:
        return [step_time(row, self._notes.get(i, ()), self._on_device.get(i, ())) for i, row in rows.items()]
