"""Runs, medians and slopes of recorded numbers: what the statistical checks have in common."""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hookcb.diagnosis.evidence import CONVERGED, WINDOW, Evidence, Param, Series

LATEST = 5  # records that a median is taken of: one batch says little
MOST_POINTS = 80  # of a robust slope, which is of all pairs
SIGMA = 1.4826  # median absolute deviations to the standard deviation of normal numbers
WARMING = 0.95  # of the largest learning rate; a rate that was below it ten records ago still rises


@dataclass(frozen=True, slots=True)
class Span:
    """Some records: numbers of the first and the last training batch, and how many records."""

    first: int
    last: int
    n: int


def records_needed(evidence: Evidence) -> int:
    """Number of records that a median is taken of: five, or the only one of one backward."""
    return 1 if evidence.is_one_backward else LATEST


def finite(values: Iterable[float]) -> list[float]:
    """The values that are neither NaN nor infinite."""
    return [x for x in values if math.isfinite(x)]


def median(values: Iterable[float]) -> float:
    """Of the finite values, NaN where there is none."""
    found = finite(values)
    return statistics.median(found) if found else math.nan


def ratio(a: float, b: float) -> float:
    """`a / b`, NaN unless `b` is above zero."""
    return a / b if b > 0 else math.nan


def format_factor(x: float) -> str:
    """A factor to read: "14,000", "2e+08"."""
    return f"{x:.2g}" if x < 10 or x >= 1e6 or not math.isfinite(x) else f"{x:,.0f}"


def before(series: Series, step: float) -> Series:
    """Of the steps before `step`, which may be infinite; finite values only."""
    pairs = [(at, x) for at, x in series if at < step and math.isfinite(x)]
    return Series([at for at, _ in pairs], [x for _, x in pairs])


def trailing(series: Series, holds: Callable[[float], bool], n: int = LATEST) -> Span | None:
    """The run of records up to the last one in which the median of `n` in a row holds.

    It begins with the first record of the first such median, so that a single odd record does not break it.
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


def persistent(series: Series, holds: Callable[[float], bool], n: int, of: int) -> Span | None:
    """The first `of` records in a row of which `n` hold: from the first to the last of these."""
    found = [i for i, x in enumerate(series.values) if holds(x)]
    for first, last in zip(found, found[n - 1 :], strict=False):
        if last - first < of:
            return Span(series.steps[first], series.steps[last], n)
    return None


def held(series: Series, n: int, of: int) -> float:
    """The largest number that `n` of `of` records in a row come to: the one that `persistent` looks at."""
    windows = (sorted(series.values[i : i + of]) for i in range(len(series) - n + 1))
    return max((window[-n] for window in windows), default=math.nan)


def slope(series: Series, sigmas: float) -> tuple[float, float]:
    """Interval of a robust slope: between which slopes of pairs of points it lies; NaN of fewer than two.

    The points are at most 80 means of records in a row, so that none of a long series is left out.

    Args:
        series: finite values.
        sigmas: how sure, in standard deviations of Kendall's statistic.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968.
    """
    size = max(1, math.ceil(len(series) / MOST_POINTS))
    points = [
        (statistics.fmean(series.steps[i : i + size]), statistics.fmean(series.values[i : i + size]))
        for i in range(0, len(series), size)
    ]
    n = len(points)
    slopes = sorted((y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :])
    if not slopes:
        return math.nan, math.nan
    half = sigmas * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    low, high = math.floor(len(slopes) / 2 - half), math.ceil(len(slopes) / 2 + half)
    return slopes[max(low, 0)], slopes[min(high, len(slopes) - 1)]


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Median and robust standard deviation, 1.4826 times the median absolute deviation.

    Source: P. J. Huber, "Robust Statistics", 1981.
    """
    found = finite(values)
    middle = median(found)
    return middle, SIGMA * median(abs(x - middle) for x in found)


def place(param: Param) -> tuple[float, int]:
    """Sorts parameters by the order of execution; those of modules not seen in it come first."""
    return (-1 if param.place_of_layer is None else param.place_of_layer), param.place


def weights(evidence: Evidence) -> list[Param]:
    """The parameters whose size can be compared, from the input to the head."""
    return sorted((p for p in evidence.params.values() if p.is_weight), key=place)


def loss_left(evidence: Evidence, first: float) -> float:
    """Share of a loss of `first` that is left at the end, the median of ten; NaN where it is not known.

    Of a loss below zero, which has no shares: 1 where it has stayed, 0 where it has fallen by its own size.
    """
    last = median(evidence.loss.values[-WINDOW:])
    return 1 + (last - first) / abs(first) if math.isfinite(first) and first != 0 else math.nan


def does_well(evidence: Evidence) -> bool:
    """Whether the loss has come to a fifth of that of the best constant, R² 0.8."""
    last = median(evidence.loss.values[-WINDOW:])
    return last < CONVERGED * evidence.constant


def rates(evidence: Evidence) -> Series:
    """The learning rate, at each batch where that is known, else at each record of the optimizer."""
    return evidence.lr if len(evidence.lr) else evidence.steps.get("lr", Series())


def is_warming_up(evidence: Evidence) -> bool:
    """Whether the learning rate still rises where the record ends."""
    values = finite(rates(evidence).values)
    return len(values) > WINDOW and values[-1] >= max(values) and values[-1 - WINDOW] < WARMING * values[-1]
