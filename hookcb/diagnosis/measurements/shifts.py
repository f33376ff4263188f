"""Shifts: numbers of the inputs and of the targets of batches that leave their range for good."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.loss_terms import main_term, read_terms
from hookcb.diagnosis.measurements.patterns import INDICES, Kind, Pattern, moments_of
from hookcb.diagnosis.measurements.ranges import (
    N_BEFORE,
    N_BLOCK,
    N_KEPT,
    PatternFinder,
    Shift,
    ShiftFinder,
    shifts_of_all,
)
from hookcb.diagnosis.measurements.relabels import Relabels
from hookcb.diagnosis.measurements.tally import at_path, path_to, saved_labels
from hookcb.diagnosis.rules import median
from hookcb.diagnosis.run import Run
from hookcb.gradients.samples import SKETCH
from hookcb.processes.groups import name_ranks
from hookcb.records.store import Arriving
from hookcb.records.thinned import Thinned

MAX_BLOCKS, MAX_PLANS = 256, 32  # blocks that wait on a device, and shapes of tensors that are known
MAX_POINTS, MIN_GROWTH = 512, 4.0  # of the curve of the targets' size; what counts as growth
N_SHARED = 4  # shifts that a rank gives

OTHER_DATA = "data of another source, scale or order, or that were changed in place"


_Numbers = tuple[Any, ...]  # step, mean, standard deviation, and if asked for two distances of patterns


class Growth(NamedTuple):
    """Targets that have grown: since which step, and their root mean square at first and in the end.

    On some of several ranks, as `ranks` says, which is empty otherwise; the numbers are those of the first.
    """

    step: int
    before: float
    after: float
    ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """A clause on it."""
        whose = f" of {name_ranks(self.ranks)}" if self.ranks else ""
        how = f"from {self.before:.3g} to {self.after:.3g} since step {self.step:,}"
        return f"the targets{whose} have grown {how}"


class _Plan(NamedTuple):
    """Places of the sample in tensors of one shape, and the rows to which it is copied."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    n: int
    kind: Kind
    rows: list[Tensor | None]  # None until the first sample is copied to one


class _Moments:
    """Mean and standard deviation of samples of one tensor of each batch, and the pattern of 16 batches.

    They are computed for 16 batches at a time, or 64 without patterns. A sample of up to 1,024 elements is
    copied as float32, so that no tensor of the program is kept. Numbers leave a GPU without a wait; on a
    device that is neither a GPU nor a CPU they wait until `rest`.

    Args:
        pattern: compares patterns; without it there are none.
    """

    def __init__(self, pattern: Pattern | None = None) -> None:
        self._pattern, self._n = pattern, N_BLOCK if pattern else 4 * N_BLOCK
        self._buffer: Tensor | None = None
        self._plans: dict[Any, _Plan] = {}
        self._block: list[tuple[int, _Plan]] = []  # steps and plans
        self._arriving = Arriving[tuple[int, ...]](MAX_BLOCKS)
        self._here: list[_Numbers] = []

    def add(self, step: int, x: Tensor) -> bool:
        """Adds the tensor of a batch; returns whether numbers have come for `there`."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph would write to the rows for good
            return False
        key = x.shape, x.stride(), x.dtype, x.device
        if (plan := self._plans.get(key)) is None:
            plan = self._plan(x)
            self._plans[key] = plan
        sample = x.detach().as_strided(plan.size, plan.stride, x.storage_offset() + plan.start)
        i = len(self._block)
        if (row := plan.rows[i]) is None:
            assert self._buffer is not None
            row = plan.rows[i] = self._buffer[i, : plan.n].view(plan.size)
        row.copy_(sample)
        self._block.append((step, plan))
        if len(self._block) < self._n:
            return False
        self._send()
        return True

    def _plan(self, x: Tensor) -> _Plan:
        if self._buffer is None or x.device != self._buffer.device:
            self._send()
            self._plans.clear()
            self._buffer = torch.zeros(self._n, SKETCH, dtype=torch.float32, device=x.device)
        elif len(self._plans) == MAX_PLANS:
            self._plans.clear()
        sample, are_indices = sample_of(x), x.dtype in INDICES
        start = int(sample.storage_offset() - x.storage_offset())
        are_pairs = are_indices and x.is_contiguous() and x.numel() > SKETCH
        kind = Kind(None if are_indices else x.shape, are_pairs)
        return _Plan(sample.shape, sample.stride(), start, sample.numel(), kind, [None] * self._n)

    def _send(self) -> None:
        if self._buffer is None or not self._block:
            return
        steps, plans = zip(*self._block, strict=True)
        self._block = []
        # rows without a batch come last
        sizes = [plan.n for plan in plans] + [1] * (self._n - len(plans))
        lengths = None
        if len({*sizes}) > 1:
            lengths = torch.tensor(sizes, device="cpu").to(self._buffer.device, non_blocking=True)
        rows = self._buffer[:, : max(sizes)]
        numbers = moments_of(rows, lengths)
        if self._pattern is not None:
            is_one_kind = len(plans) == self._n and len({plan.kind for plan in plans}) == 1
            kind = plans[0].kind if is_one_kind else None
            numbers = torch.cat([numbers, self._pattern.distances(rows, lengths, kind, numbers[1])])
        if numbers.is_cpu:
            self._here += zip(steps, *numbers.tolist(), strict=False)
        else:
            self._arriving.add(steps, numbers)

    def there(self) -> Iterator[_Numbers]:
        """Takes what is there, in order."""
        here, self._here = self._here, []
        yield from here
        for steps, numbers in self._arriving.there():
            yield from zip(steps, *numbers, strict=False)

    def rest(self) -> Iterator[_Numbers]:
        """Takes all; waits for the device."""
        self._send()
        for steps, numbers in self._arriving.rest():
            yield from zip(steps, *numbers, strict=False)
        yield from self.there()


def compare_from(step: int) -> str:
    """Advice to look at the data of a shift."""
    return f"Compare the batches from step {step:,} on with those before: their source, scale and order"


def sample_of(x: Tensor) -> Tensor:
    """A view of up to 1,024 elements of a tensor, evenly spread; of indices, of pairs of neighbors.

    Nothing is copied, whatever its strides.
    """
    x, n, are_indices = x.detach(), x.numel(), x.dtype in INDICES
    if x.is_contiguous():
        pair = 1 + (are_indices and n > SKETCH)
        step = -(-n // (SKETCH // pair))
        start = (n - pair) % step // 2  # as `spread` does
        size = (n - start - pair) // step + 1
        where = x.storage_offset() + start
        return (
            x.as_strided((size, 2), (step, 1), where) if pair > 1 else x.as_strided((size,), (step,), where)
        )
    dims = sorted(range(x.ndim), key=x.shape.__getitem__, reverse=True)
    for dim in sorted(dims, key=(x.ndim - 1).__eq__) if are_indices else dims:
        if n > SKETCH:
            size = x.shape[dim]
            x = x[(*[slice(None)] * dim, slice(None, None, min(size, math.ceil(n / SKETCH))))]
            n = n // size * x.shape[dim]
    return x


class Shifts(Measurement):
    """Follows the mean and the size of the inputs and of the targets of each batch, and patterns of inputs.

    Targets of samples that come again are compared with those that they had before, see `Relabels`.

    Of inputs, the largest tensor of the first batch, unless a graph has made it; of targets, the first that
    the loop tells, or what a loss of torch has saved. Targets of other losses in a loop that does not tell
    them are unknown. Of each, a sample of up to 1,024 elements, at the same places in batches of one shape:
    its mean, and its standard deviation, or its root mean square if it is of float targets. What is kept is
    bounded.

    Attributes:
        found: the first 16 shifts, in order.
        growth: float targets whose root mean square in the last eight batches is four times the largest of
            the first 32 or more; None if they have not grown.
    """

    cadence = EVERY

    def __init__(self) -> None:
        self.found: list[Shift] = []
        self.growth: Growth | None = None
        self._path: str | None = None  # of the tensor in the inputs
        self._to_labels: tuple[int, ...] | None = None  # from the loss to the node that has saved them
        self._inputs, self._targets = _Moments(Pattern()), _Moments()
        self._patterns = PatternFinder()
        self._of_inputs = ShiftFinder("inputs", ("mean", "standard deviation"))
        self._of_targets = ShiftFinder("targets", ("mean", "standard deviation"))
        self._are_float = False  # whether the targets are
        self._first: list[float] = []  # sizes of targets
        self._relabels = Relabels()
        self._curve = Thinned[tuple[int, float]](MAX_POINTS)

    def on_batch(self, run: Run) -> None:
        x = self._main_of(run.loop.xb)
        if x is None or x.grad_fn is not None:  # as made by a model that is trained with it
            return
        if self._inputs.add(run.step, x):
            self._see_inputs(self._inputs.there())

    def _main_of(self, xb: Any) -> Tensor | None:
        """The tensor in a batch of inputs that is followed."""
        if self._path is None:
            known = [(path, x) for path, x in parts(xb) if _has_numbers(x)]
            if not known:
                return None
            self._path = max(known, key=lambda pair: pair[1].numel())[0]
        if type(xb) is tuple and len(xb) == 1 and isinstance(xb[0], Tensor):  # the usual case
            main: Any = xb[0]
        else:
            main = next((x for path, x in parts(xb) if path == self._path), None)
        return main if _has_numbers(main) else None

    def on_first_graph(self, run: Run) -> None:
        main = main_term(read_terms(run.loop.loss_node))
        if main is not None and main.target is not None:
            self._to_labels = path_to(run.loop.loss_node, main.node)

    def on_loss(self, run: Run) -> None:
        if (y := self._targets_of(run)) is None:
            return
        if y.is_floating_point() and not self._are_float:
            self._are_float = True
            self._of_targets = ShiftFinder("targets", ("mean", "root mean square"))
        if self._targets.add(run.step, y):
            self._see_targets(self._targets.there())
        if run.noting and (x := self._main_of(run.loop.xb)) is not None and x.grad_fn is None:
            self._relabels.add(run.step, x, y)

    def _targets_of(self, run: Run) -> Tensor | None:
        """The targets of the batch that are followed."""
        y: Any = None
        if len(run.loop.yb):
            y = next((x for _, x in parts(run.loop.yb) if isinstance(x, Tensor)), None)
        elif self._to_labels is not None:
            y = saved_labels(at_path(run.loop.loss_node, self._to_labels))
        return y if _has_numbers(y) else None

    def relabeled(self, run: Run) -> tuple[int, int]:
        """Counts samples of the batch that come again, see `Relabels.count`, once its loss is there."""
        x, y = self._main_of(run.loop.xb), self._targets_of(run)
        return (0, 0) if x is None or y is None else self._relabels.count(x, y)

    def _see_inputs(self, numbers: Iterator[_Numbers]) -> None:
        for step, mean, std, of_block, of_batch in numbers:
            self._keep(self._of_inputs.add(step, mean, std))
            self._keep(self._patterns.add(step, of_block, of_batch))

    def _see_targets(self, numbers: Iterator[_Numbers]) -> None:
        for step, mean, std in numbers:
            size = math.hypot(mean, std) if self._are_float else std
            self._keep(self._of_targets.add(step, mean, size))
            if self._are_float and math.isfinite(size):
                if len(self._first) < N_BEFORE:
                    self._first.append(size)
                self._curve.add((step, size))

    def _keep(self, shift: Shift | None) -> None:
        if shift is not None and len(self.found) < N_KEPT:
            self.found.append(shift)
            self.found.sort(key=lambda x: x.step)

    def near(self, step: int, before: int) -> Shift | None:
        """The last shift that begins in that step or in so many before it."""
        found = (x for x in reversed(self.found) if x.last < step <= x.step + x.slack + before)
        return next(found, None)

    def odd(self, step: int, n: int) -> str:
        """A clause on that batch and the next `n`, if it and half of them are unlike all before, or ""."""
        of_each = {"inputs": [*self._of_inputs.odd, *self._patterns.odd], "targets": self._of_targets.odd}
        for of, odd in of_each.items():
            near = {at: left for at, left in odd if step <= at <= step + n}
            if step in near and 2 * (len(near) - 1) >= n:
                said = "; ".join(x.text for x in near[step])
                more = f" and of {len(near) - 1} of the next {n}" if len(near) > 1 else ""
                return f"the {of} of this batch{more} are unlike those of all before: {said}"
        return ""

    def tell(self, run: Run) -> None:
        self._see_inputs(self._inputs.rest())
        self._see_targets(self._targets.rest())
        self._relabels.rest()
        self._keep(self._relabels.found)
        # where a number leaves its range, whose step is known, the pattern changes, too
        known = [x.step for x in self.found if not x.slack and x.of == "inputs"]
        self.found = [
            x
            for x in self.found
            if x.said or not (x.slack and any(abs(x.step - at) < N_BLOCK for at in known))
        ]
        self.growth = self._growth()

    def _growth(self) -> Growth | None:
        points = self._curve.items
        if len(self._first) < N_BEFORE:
            return None
        largest, last = max(self._first), [size for _, (_, size) in self._of_targets.last]
        now = median(last) if last else points[-1][1]
        if not now > MIN_GROWTH * largest > 0:
            return None
        last_usual = next((at for at, size in reversed(points) if size <= 2 * largest), points[0][0])
        after = range(last_usual + 1, last_usual + self._curve.stride + 1)  # of which a point is the last
        step = next((x.step for x in self.found if x.of == "targets" and x.step in after), after[0])
        return Growth(step, median(self._first), now)

    def state(self, run: Run) -> tuple[list[Shift], Growth | None]:
        return self.found[:N_SHARED], self.growth

    def merge(self, run: Run, of_ranks: Sequence[tuple[list[Shift], Growth | None]], rank: int) -> None:
        """Takes what has changed on any rank, as the loss of all may rise by it."""
        self.found = shifts_of_all([found for found, _ in of_ranks])[:N_KEPT]
        grown = {rank: growth for rank, (_, growth) in enumerate(of_ranks) if growth is not None}
        ranks = tuple(grown) if len(grown) < len(of_ranks) else ()
        self.growth = min(grown.values())._replace(ranks=ranks) if grown else None

    def freeze(self) -> None:
        self._inputs, self._targets = _Moments(), _Moments()


def _has_numbers(x: Any) -> TypeGuard[Tensor]:
    return has_stats(x) and x.dtype is not torch.bool and x.numel() > 0
