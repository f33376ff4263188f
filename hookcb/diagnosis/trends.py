"""Runs, medians and slopes of recorded numbers, for the statistical checks."""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from hookcb.diagnosis.run import CONVERGED, WINDOW, Param, Run, Series

LATEST = 5  # records in a median: a single batch says little
MAX_POINTS = 80  # of a robust slope, which uses all pairs
SIGMA = 1.4826  # standard deviation / median absolute deviation of normally distributed numbers
MAX_SATURATED = 0.5  # share of units at the flat ends of tanh or sigmoid
LEARNED = 0.8  # share of the first loss that is left; below it, training does its work
WARMING = 0.95  # share of the last learning rate; if it was lower ten records ago, it is still rising


@dataclass(frozen=True, slots=True)
class Span:
    """A run of records: numbers of its first and last training batch, and how many records it has."""

    first: int
    last: int
    n: int


def records_needed(evidence: Run) -> int:
    """Number of records in a median: five, or one after a single backward."""
    return 1 if evidence.is_one_backward else LATEST


def finite(values: Iterable[float]) -> list[float]:
    """The values that are neither NaN nor infinite."""
    return [x for x in values if math.isfinite(x)]


def median(values: Iterable[float]) -> float:
    """Median of the finite values; NaN if there is none."""
    numbers = finite(values)
    return statistics.median(numbers) if numbers else math.nan


def ratio(a: float, b: float) -> float:
    """`a / b`, NaN unless `b` is above zero."""
    return a / b if b > 0 else math.nan


def format_factor(x: float) -> str:
    """Factor as text: "14,000", "2e+08"."""
    return f"{x:.2g}" if x < 10 or x >= 1e6 or not math.isfinite(x) else f"{x:,.0f}"


def before(series: Series, step: float) -> Series:
    """The finite values of the steps before `step`, which may be infinite."""
    pairs = [(at, x) for at, x in series if at < step and math.isfinite(x)]
    return Series([at for at, _ in pairs], [x for _, x in pairs])


def trailing(series: Series, holds: Callable[[float], bool], n: int = LATEST) -> Span | None:
    """Run of records up to the last one in which every median of `n` in a row satisfies `holds`.

    A single unusual record does not break the run.
    """
    start = None
    for i in range(len(series) - n, -1, -1):
        if not holds(statistics.median(series.values[i : i + n])):
            break
        start = i
    if start is None:
        return None
    # the first median may begin with records that do not hold yet
    first = next((i for i in range(start, len(series)) if holds(series.values[i])), start)
    return Span(series.steps[first], series.steps[-1], len(series) - start)


def persistent(series: Series, holds: Callable[[float], bool], n: int, window: int) -> Span | None:
    """First run of at most `window` records in which `n` satisfy `holds`; None if there is none."""
    holding = [i for i, x in enumerate(series.values) if holds(x)]
    for first, last in zip(holding, holding[n - 1 :], strict=False):
        if last - first < window:
            return Span(series.steps[first], series.steps[last], n)
    return None


def persistent_max(series: Series, n: int, window: int) -> float:
    """Largest number that `n` of `window` records in a row reach: the one that `persistent` compares."""
    windows = (sorted(series.values[i : i + window]) for i in range(len(series) - n + 1))
    return max((values[-n] for values in windows), default=math.nan)


def slope(series: Series, sigmas: float) -> tuple[float, float]:
    """Confidence interval of a robust slope; NaN for fewer than two points.

    The points are at most 80 means of records in a row, so a long series counts as a whole.

    Args:
        series: finite values.
        sigmas: half the width of the interval, in standard deviations of Kendall's statistic.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968.
    """
    size = max(1, math.ceil(len(series) / MAX_POINTS))
    points = [
        (statistics.fmean(series.steps[i : i + size]), statistics.fmean(series.values[i : i + size]))
        for i in range(0, len(series), size)
    ]
    n = len(points)
    if n < 2:
        return math.nan, math.nan
    x, y = torch.tensor(points, dtype=torch.float64, device="cpu").T
    i, j = torch.triu_indices(n, n, 1, device="cpu")
    slopes = ((y[j] - y[i]) / (x[j] - x[i])).sort().values
    half = sigmas * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    low, high = math.floor(len(slopes) / 2 - half), math.ceil(len(slopes) / 2 + half)
    return slopes[max(low, 0)].item(), slopes[min(high, len(slopes) - 1)].item()


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Median and robust standard deviation, 1.4826 times the median absolute deviation.

    Source: P. J. Huber, "Robust Statistics", 1981.
    """
    numbers = finite(values)
    middle = median(numbers)
    return middle, SIGMA * median(abs(x - middle) for x in numbers)


def place(param: Param) -> tuple[float, int]:
    """Sort key for the order of execution; parameters of modules with an unknown place come first."""
    return (-1 if param.place_of_layer is None else param.place_of_layer), param.place


def weights(evidence: Run) -> list[Param]:
    """Weights of comparable size, from the input to the head."""
    return sorted((p for p in evidence.params.values() if p.is_weight), key=place)


def loss_left(evidence: Run, first: float) -> float:
    """Final loss, the median of ten, as a share of `first`; NaN if unknown.

    For a negative loss, which has no share: 1 if it has not changed, 0 if it has fallen by its own size.
    """
    last = median(evidence.loss.values[-WINDOW:])
    return 1 + (last - first) / abs(first) if math.isfinite(first) and first != 0 else math.nan


def does_well(evidence: Run) -> bool:
    """Whether the loss ends below a fifth of the loss of the best constant prediction, an R² of 0.8."""
    last = median(evidence.loss.values[-WINDOW:])
    return last - evidence.perfect < CONVERGED * (evidence.constant - evidence.perfect)


def rates(evidence: Run) -> Series:
    """The learning rate at each batch if that is known, else at each record of the optimizer."""
    return evidence.lr if len(evidence.lr) else evidence.steps.get("lr", Series())


def is_warming_up(evidence: Run) -> bool:
    """Whether the learning rate is still rising at the end of the record."""
    values = finite(rates(evidence).values)
    return len(values) > WINDOW and values[-1] >= max(values) and values[-1 - WINDOW] < WARMING * values[-1]
