"""StepStore: times of the steps of a run, in bounded memory."""

from heapq import heappush, heappushpop

from hookcb.profiling.steps.times import FIRST_BATCH, Row, StepTime, step_time

N_SLOWEST = 100


class StepStore:
    """Times of up to `keep` steps evenly spaced over the run, and of the slowest 100.

    When there would be more than `keep`, every second one is dropped, and from then on only every second
    (fourth, eighth …) step is kept, plus the newest, as in a `StatStore`. First steps of an epoch are not
    among the slowest 100, because each of them is slow.

    Args:
        keep: number of steps to keep, 2 or more.
    """

    def __init__(self, keep: int) -> None:
        self.keep, self.n = keep, 0
        self._stride = 1
        self._rows: dict[int, Row] = {}  # by the number of the step, as the others are
        self._newest: dict[int, Row] = {}
        self._slowest: dict[int, Row] = {}
        self._heap: list[tuple[float, int]] = []  # the slowest, by time
        self._least = 0.0  # time that a step must exceed to be one of the slowest

    def add(self, row: Row) -> None:
        """Adds a step."""
        i = self.n
        if len(self._rows) == self.keep:
            self._thin()
        if i % self._stride == 0:
            self._rows[i] = row
        self.n, self._newest = i + 1, {i: row}
        if row[0] > self._least and FIRST_BATCH not in row[5]:
            self._add_slow(row, i)

    def add_device(self, i: int, seconds: tuple[float, ...]) -> None:
        """Adds the device seconds of each phase of step `i`, if it is kept."""
        for rows in (self._rows, self._slowest, self._newest):
            if i in rows:
                rows[i] = (*rows[i][:-1], seconds)

    def keeps(self, i: int) -> bool:
        """Whether step `i` is kept."""
        return i in self._rows or i in self._slowest or i in self._newest

    def times(self) -> list[StepTime]:
        """The evenly spaced steps, in order."""
        return [step_time(row) for row in (self._rows | self._newest).values()]

    def times_and_slowest(self) -> list[StepTime]:
        """All steps that are kept, in order."""
        rows = self._rows | self._newest | self._slowest
        return [step_time(row) for _, row in sorted(rows.items())]

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
