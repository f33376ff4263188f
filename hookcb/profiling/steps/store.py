"""StepStore: times of the steps of a run, in bounded memory."""

from heapq import heappush, heappushpop

from hookcb.profiling.steps.times import FIRST_BATCH, Row, StepTime, step_time
from hookcb.records.thinned import Thinned

N_SLOWEST = 100


class StepStore:
    """Times of up to `keep` steps spread evenly over the run, see `Thinned`, and of the slowest 100.

    First steps of an epoch are not among the slowest 100, because each of them is slow.

    Args:
        keep: number of steps to keep, 2 or more.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._rows = Thinned[tuple[int, Row]](keep)  # with the number of the step
        self._slowest: dict[int, Row] = {}
        self._heap: list[tuple[float, int]] = []  # the slowest, by time
        self._least = 0.0  # time that a step must exceed to be one of the slowest

    @property
    def n(self) -> int:
        """Number of steps that were added."""
        return self._rows.n

    def add(self, row: Row) -> None:
        """Adds a step."""
        i = self.n
        self._rows.add((i, row))
        if row[0] > self._least and FIRST_BATCH not in row[5]:
            self._add_slow(row, i)

    def add_device(self, i: int, seconds: tuple[float, ...]) -> None:
        """Adds the device seconds of each phase of step `i`, if it is kept."""
        if (place := self._rows.place(i)) is not None:
            self._rows.items[place] = i, (*self._rows.items[place][1][:-1], seconds)
        if i in self._slowest:
            self._slowest[i] = (*self._slowest[i][:-1], seconds)

    def keeps(self, i: int) -> bool:
        """Whether step `i` is kept."""
        return self._rows.place(i) is not None or i in self._slowest

    def times(self) -> list[StepTime]:
        """The evenly spaced steps, in order."""
        return [step_time(row) for _, row in self._rows.items]

    def times_and_slowest(self) -> list[StepTime]:
        """All steps that are kept, in order."""
        rows = dict(self._rows.items) | self._slowest
        return [step_time(row) for _, row in sorted(rows.items())]

    def _add_slow(self, row: Row, i: int) -> None:
        self._slowest[i] = row
        if len(self._slowest) <= N_SLOWEST:
            heappush(self._heap, (row[0], i))
        else:
            del self._slowest[heappushpop(self._heap, (row[0], i))[1]]
            self._least = self._heap[0][0]
