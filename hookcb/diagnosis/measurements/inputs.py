"""Inputs: scale, gaps and differences of the inputs of inspected batches."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.measurements.curves import Curve
from hookcb.diagnosis.measurements.layer_rows import MAX_RECORDS
from hookcb.diagnosis.run import Run, Series
from hookcb.records.store import StatStore

COLUMNS = ("std", "rms", "nonfinite", "differs")  # `differs`: 1 if any two samples do, NaN if that is unknown
MAX_COLUMNS = 256  # of a table; the columns of wider inputs, as pixels and counts of words, are mostly alike
N_TABLES = 3  # batches whose columns are measured


class Inputs(Measurement):
    """Measures the inputs of inspected batches."""

    def __init__(self) -> None:
        self._numbers: StatStore | None = StatStore(COLUMNS, MAX_RECORDS)
        self._squares: list[Tensor] = []  # of columns, on their device
        self._sizes = Curve()
        self.std, self.rms, self.nonfinite, self.differs = (Series() for _ in COLUMNS)
        self.sizes = Series()  # number of elements, 0 if unknown
        self.rms_of_others = math.nan  # of the other ranks, their geometric mean
        self.columns: list[list[float]] = []  # RMS of each column of a table, in the first inspected batches

    def on_batch(self, run: Run) -> None:
        self.add(run.step, run.loop.xb)

    def add(self, step: int, xb: Any) -> None:
        self._sizes.add((step, float(sum(x.numel() for _, x in parts(xb) if isinstance(x, Tensor)))))
        if self._numbers is not None and (numbers := input_numbers(xb)) is not None:
            self._numbers.put("x", [self._numbers.begin(0, step)], numbers[None].float())
        if len(self._squares) < N_TABLES and (squares := column_squares(xb)) is not None:
            self._squares.append(squares)

    def tell(self, run: Run) -> None:
        self.sizes, self.rms_of_others = self._sizes.series(), math.nan
        self.columns = [x.sqrt().tolist() for x in self._squares]
        if self._numbers is not None:
            steps = [info.step for info in self._numbers.infos]
            columns = [Series.of(steps, values) for values in self._numbers.series("x").T.tolist()]
            self.std, self.rms, self.nonfinite, self.differs = columns

    def state(self, run: Run) -> tuple[list[int], list[float], float]:
        middle = median([x for x in self.rms.values if math.isfinite(x)] or [math.nan])
        return self.std.steps, self.std.values, math.log(middle) if middle > 0 else math.nan

    def merge(self, run: Run, of_ranks: Sequence[tuple[list[int], list[float], float]], rank: int) -> None:
        """Sets `std` to that on all ranks, as activations are merged; `rms` may differ by rank."""
        steps, stds, logs = zip(*of_ranks, strict=True)
        if any((len(own), sum(own)) != (len(steps[0]), sum(steps[0])) for own in steps):
            return
        means = [sum(x * x for x in of_step) / len(of_ranks) for of_step in zip(*stds, strict=True)]
        self.std = Series(steps[rank], list(map(math.sqrt, means)))
        self.rms_of_others = math.exp((sum(logs) - logs[rank]) / (len(of_ranks) - 1))

    def freeze(self) -> None:
        self._numbers, self._squares = None, []


def input_numbers(xb: Any) -> Tensor | None:
    """`COLUMNS` of the inputs of a batch, float32 `(4,)` on their device; None without tensors.

    Standard deviation and root mean square of the first float tensor that is not 0-d, NaN if there is none;
    number of non-finite elements in all tensors; whether samples differ, NaN for a single sample, and if all
    that is alike are floats in one dimension, which may be the features of one.
    """
    tensors = [x.detach() for _, x in parts(xb) if isinstance(x, Tensor) and has_stats(x) and x.numel()]
    if not tensors:
        return None
    device = tensors[0].device
    nothing = torch.full((), math.nan, device=device)
    floats = [x for x in tensors if x.is_floating_point()]
    first = next((x for x in floats if x.ndim), None)  # a 0-d tensor has no scale
    std, rms = (nothing, nothing) if first is None else _scale(first)
    n_bad = [_count_nonfinite(x).to(device) for x in floats]
    bad = torch.stack(n_bad).sum().float() if n_bad else torch.zeros((), device=device)
    several = [x for x in tensors if x.ndim and len(x) > 1]
    differs = nothing
    if several:
        any_differs = torch.stack([_differs(x).to(device) for x in several]).any()
        has_samples = any(x.ndim > 1 or not x.is_floating_point() for x in several)
        differs = any_differs.float() if has_samples else torch.where(any_differs, 1.0, nothing)
    return torch.stack([std, rms, bad, differs])


def column_squares(xb: Any) -> Tensor | None:
    """Mean square of each column of the first float input, if that is a table `(N, F)`; else None."""
    x = next((x for _, x in parts(xb) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim), None)
    is_table = x is not None and has_stats(x) and x.ndim == 2 and len(x) and 1 < x.shape[1] <= MAX_COLUMNS
    return x.detach().float().square().mean(0) if x is not None and is_table else None


def _scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Standard deviation and root mean square of all elements, float32; of equal elements the first is 0."""
    flat, root = x.reshape(-1).float(), math.sqrt(x.numel())
    differences = flat - flat[0]
    differences = differences - differences.mean()
    # norms take a fraction of the time of `std`
    return torch.linalg.vector_norm(differences) / root, torch.linalg.vector_norm(flat) / root


def _count_nonfinite(x: Tensor) -> Tensor:
    if x.is_cpu and math.isfinite(float(x.sum())):  # one pass instead of three
        return torch.zeros((), dtype=torch.int64, device="cpu")
    return x.isfinite().logical_not().sum()


def _differs(x: Tensor) -> Tensor:
    """Whether any sample differs from the first; NaN equals NaN."""
    first = x[:1]
    if x.is_cpu and bool((x[1] > x[0]).any()):  # the usual case; a complex number would need the rest
        return torch.ones((), dtype=torch.bool, device="cpu")
    return ((x != first) & ~((x != x) & (first != first))).any()
