"""ShiftFinder: the first batch whose numbers leave the range of all batches before for good."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from hookcb.processes.groups import name_ranks

N_BEFORE, N_STAY, MIN_OUT = 32, 8, 7  # batches before, and after the first one, so many of which stay out
WIDER, MIN_CHANGE = 1.0, 0.1  # margins of a range: of its width, and of the largest size
N_KEPT, N_ODD = 16, 64  # shifts, and batches that are odd
# of a pattern: blocks before, and by how much, and by how many widths, the new ones must be above their range
MIN_BLOCKS, MIN_FAR, TIMES = 6, 0.1, 3.0
MIN_USUAL = 64  # distances of single batches before one is called odd
N_BLOCK, SLACK = 16, 4  # batches of a block, and by how many the first one may be missed


class Left(NamedTuple):
    """A number that has left its range: its name, the range before, and the range since, low and high."""

    name: str
    before: tuple[float, float]
    since: tuple[float, float]

    @property
    def text(self) -> str:
        """Words on it, without the step."""
        since, before = (
            f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
            for low, high in (self.since, self.before)
        )
        return f"{self.name} {since}, before {before}"


class Shift(NamedTuple):
    """A change of the batches for good.

    Attributes:
        step: its first batch.
        of: "inputs" or "targets".
        left: its numbers.
        slack: steps by which it may have begun earlier or later.
        said: a clause on it, if it is not of numbers.
        ranks: those whose batches have changed, of several; empty if all have, or there is one.
    """

    step: int
    of: str
    left: tuple[Left, ...]
    slack: int = 0
    said: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def last(self) -> int:
        """The last batch that is as before, as far as is known."""
        return self.step - self.slack - 1

    @property
    def text(self) -> str:
        """A clause on it."""
        if self.said:
            return f"on {name_ranks(self.ranks)}, {self.said}" if self.ranks else self.said
        numbers = "; ".join(x.text for x in self.left)
        since = f"{'about ' * bool(self.slack)}step {self.step:,}"
        whose = f" of {name_ranks(self.ranks)}" if self.ranks else ""
        return f"the {self.of} of the batches{whose} from {since} on are unlike those before: {numbers}"


def shifts_of_all(of_ranks: Sequence[Sequence[Shift]]) -> list[Shift]:
    """Shifts of all ranks, in order; those that begin in the same step are one, with the numbers of one."""
    joined: list[tuple[Shift, set[int]]] = []
    for shift, rank in sorted((shift, rank) for rank, found in enumerate(of_ranks) for shift in found):
        alike = ((x, on) for x, on in joined if (x.of, bool(x.said)) == (shift.of, bool(shift.said)))
        near = (on for x, on in alike if shift.step - x.step <= x.slack + shift.slack)
        if (on := next(near, None)) is None:
            joined.append((shift, {rank}))
        else:
            on.add(rank)
    world = len(of_ranks)
    return [x._replace(ranks=() if len(on) == world else tuple(sorted(on))) for x, on in joined]


class _Range:
    """A range of numbers, `low` to `high`, without the smallest and the largest, which may be odd."""

    def __init__(self) -> None:
        self.lowest = self.low = math.inf
        self.highest = self.high = -math.inf

    def add(self, x: float) -> None:
        if x < self.low:
            self.lowest, self.low = min(x, self.lowest), max(x, self.lowest)
        if x > self.high:
            self.highest, self.high = max(x, self.highest), min(x, self.highest)

    def holds(self, x: float, margin: float) -> bool:
        """Whether a number is in it, or at most that margin, or its own width, outside."""
        margin = max(margin, WIDER * (self.high - self.low))
        return self.low - margin <= x <= self.high + margin


class ShiftFinder:
    """Finds where the mean or the size of batches, added one by one, leaves its range for good.

    The range is that of all batches before, 32 or more, without the smallest and the largest number, as one
    batch may be odd. It is widened on both sides by its own width, and at least by a tenth of the largest
    size, as that is a standard deviation or a root mean square. Outside for good is a batch if seven of the
    eight after it are, on the same side. After a shift a range begins anew, and the one before is known. Once
    a whole epoch was seen, its range is known; a slow drift takes its range along. Numbers that are not
    finite are left out.

    Source: the limits are ours.

    Args:
        of: what the numbers are of.
        names: of the two numbers.

    Attributes:
        last: the newest batches, up to eight, with their numbers.
        odd: the last 64 batches whose numbers have left their range, with these, and come back.
    """

    def __init__(self, of: str, names: tuple[str, str]) -> None:
        self.of, self.names = of, names
        self._n = 0  # of batches since the last shift
        self._ranges = [_Range()], [_Range()]  # of mean and size, until each shift
        self.last = deque[tuple[int, tuple[float, float]]]()  # up to eight whose next ones are not known
        self.odd = deque[tuple[int, tuple[Left, ...]]](maxlen=N_ODD)

    def add(self, step: int, mean: float, size: float) -> Shift | None:
        """Adds the numbers of a batch; returns the shift that is known since then."""
        if not (math.isfinite(mean) and math.isfinite(size)):
            return None
        self.last.append((step, (mean, size)))
        if len(self.last) <= N_STAY:
            return None
        begin, numbers = self.last[0]
        means, sizes = self._ranges
        if means[-1].low <= numbers[0] <= means[-1].high and sizes[-1].low <= numbers[1] <= sizes[-1].high:
            self._n += 1  # the usual case
            self.last.popleft()
            return None
        left = tuple(self._left()) if self._n >= N_BEFORE else ()
        if not left:
            if self._n >= N_BEFORE and (alone := tuple(self._left(1))):
                self.odd.append((begin, alone))
            self._take()
            return None
        self._n = 0
        for x in left:
            self._ranges[self.names.index(x.name)].append(_Range())
        while self.last:  # else the next ones would be found again
            self._take()
        return Shift(begin, self.of, left)

    def _take(self) -> None:
        """Adds the oldest batch to the newest ranges, unless an earlier one has it."""
        self._n += 1
        for ranges, x in zip(self._ranges, self.last.popleft()[1], strict=True):
            if len(ranges) == 1 or not self._is_in(ranges[:-1], x):
                ranges[-1].add(x)

    def _is_in(self, ranges: Sequence[_Range], x: float) -> bool:
        least = MIN_CHANGE * max([known.high for known in self._ranges[1]])
        return any([known.holds(x, least) for known in ranges])

    def _left(self, n: int = MIN_OUT + 1) -> Iterator[Left]:
        """The numbers that have left their range with the oldest batch, and in so many of it and the next."""
        for i, ranges in enumerate(self._ranges):
            values, known = [numbers[i] for _, numbers in self.last], ranges[-1]
            if len(ranges) <= N_KEPT and not self._is_in(ranges, values[0]):
                is_above = values[0] > known.high
                out = [x for x in values if (x > known.high) == is_above and not self._is_in(ranges, x)]
                if len(out) >= n:
                    yield Left(self.names[i], (known.lowest, known.highest), (min(out), max(out)))


class PatternFinder:
    """Finds where the distance of blocks of batches to all before rises for good; see `Pattern`.

    The distances of two blocks in a row are above the range of those before, of six blocks or more, by three
    times its width, as they are squares, and by 0.1. Of the batches of these blocks and the one before, the
    distances of single ones then tell where it begins: their means before and after it differ most, as an
    analysis of variance has it. A single batch is odd if its distance is outside the range of 64 or more
    before by the width of that range and by 0.1.

    Source: the limits are ours.

    Attributes:
        odd: the last 64 such batches, with that distance.
    """

    def __init__(self) -> None:
        self.odd = deque[tuple[int, tuple[Left, ...]]](maxlen=N_ODD)
        self._begin()

    def _begin(self) -> None:
        self._n, self._known = 0, (math.inf, 0.0)  # the smallest and the largest
        self._far: float | None = None  # distance of the last block, if that is far
        # of the last one that is not, which may be the first one with some others, and does not count yet
        self._last: float | None = None
        self._batches = deque[tuple[int, float]](maxlen=3 * N_BLOCK)
        self._usual, self._n_usual = _Range(), 0  # distances of single batches

    def add(self, step: int, of_block: float, of_batch: float) -> Shift | None:
        """Adds a batch, and its block at the first one; returns the shift that is known since then."""
        if math.isinf(of_block):  # of another shape than those before
            self._begin()
        found = self._add_block(of_block) if math.isfinite(of_block) else None
        if math.isfinite(of_batch):
            self._batches.append((step, of_batch))
            if self._n_usual >= MIN_USUAL and not self._usual.holds(of_batch, MIN_FAR):
                before = self._usual.lowest, self._usual.highest
                self.odd.append((step, (Left("distance of their pattern", before, (of_batch, of_batch)),)))
            else:
                self._usual.add(of_batch)
                self._n_usual += 1
        return found

    def _add_block(self, distance: float) -> Shift | None:
        low, high = self._known
        is_far = self._n >= MIN_BLOCKS and distance > high + max(TIMES * (high - low), MIN_FAR)
        if is_far and self._far is None:
            self._far = distance
            return None
        far, self._far, last, self._last = self._far, None, self._last, distance
        for x in (last, far):
            if x is not None:
                self._n, self._known = self._n + 1, (min(self._known[0], x), max(self._known[1], x))
        if far is None or not is_far:
            return None
        left = Left("distance of their pattern", (low, high), (min(far, distance), max(far, distance)))
        step, rise = self._beginning()
        if rise < (far - high) / 2:  # as of a batch that is repeated
            return Shift(self._batches[-N_BLOCK][0], "inputs", (left,), 2 * N_BLOCK)
        return Shift(step, "inputs", (left,), SLACK)

    def _beginning(self) -> tuple[int, float]:
        """Step at which the distances of single batches rise, and by how much."""
        n, total, sum_before = len(self._batches), sum(x for _, x in self._batches), 0.0
        best, found = 0.0, (self._batches[0][0], 0.0)
        for i, ((_, last), (step, _)) in enumerate(pairwise(self._batches), 1):
            sum_before += last
            rise = (total - sum_before) / (n - i) - sum_before / i
            if (gain := max(0.0, rise) ** 2 * i * (n - i)) > best:
                best, found = gain, (step, rise)
        return found
