"""Departures: the layers at which two runs begin to differ, and the steps."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hookcb.core.text import as_layer
from hookcb.records.content import Recorded
from hookcb.records.series import Series
from hookcb.report.data import PageData

MIN_RECORDS = 12  # that both have; fewer tell nothing of their spread
CALM = 0.25  # share of the records, from the start, whose spread is taken for the usual one
MIN_CALM = 6
MAX_SPREADS = 8.0
MIN_RATIO = 2.0  # by which they differ besides
MIN_FIRST_RATIO = 10.0  # by which they differ from the start
N_IN_A_ROW = 4
COMPARED = (("layers", "std"), ("params", "norm"), ("params", "clipped_norm"))


@dataclass(frozen=True, slots=True)
class Departure:
    """A layer or parameter whose numbers depart from those of another run.

    Attributes:
        name: its name.
        stat: "std" of an output, or "norm" of a gradient; "clipped_norm" if one run knows no other.
        step: first step at which they do.
        ratio: largest ratio of the two runs' numbers from then on, at least 1; inf if only one is finite.
        is_from_start: whether they differ from the first record on.
    """

    name: str
    stat: str
    step: int
    ratio: float
    is_from_start: bool = False

    def __str__(self) -> str:
        after = " after clipping" if self.stat == "clipped_norm" else ""
        what = "std of the output" if self.stat == "std" else f"norm of the gradient{after}"
        since = "from the start" if self.is_from_start else f"from step {self.step}"
        times = "not finite in one of them" if math.isinf(self.ratio) else f"up to ×{self.ratio:.3g}"
        return f"{as_layer(self.name)}: {what} differs {since}, {times}"


def departures(one: PageData, other: PageData) -> list[Departure]:
    """Layers and parameters of `other` that depart from those of `one`, the earliest first.

    Formula: d = log of the ratio of the two runs, at the steps that both have. The records of the first
    quarter tell how much runs differ anyway: median and spread (1.4826 · MAD, and at least that of the median
    layer). One departs where d is more than 8 spreads from that median, and by more than a factor of 2, in 4
    records in a row; or from the start, if the first quarter differs by a factor of 10, or where one of them
    is no longer finite. Of 12 records or more. Ties are in the order of execution, outputs first.

    Measured (2026-11-23, four nets on digits, 224 records each): 0 of 60 pairs of healthy runs with other
    seeds depart. Of 24 pairs, in one of which the weights of a layer are multiplied by 5 or 0.1 at step 120,
    20 depart, with that layer first and at that step; in the others, seeds differ by as much.
    """
    found = []
    seen: set[tuple[str, str]] = set()
    for group, stat in COMPARED:
        pairs = {
            name: ratios
            for name, ratios in _ratios(getattr(one, group), getattr(other, group), stat).items()
            if len(ratios) >= MIN_RECORDS and (group, name) not in seen
        }
        seen |= {(group, name) for name in pairs}
        spreads = [_calm(ratios)[1] for ratios in pairs.values()]
        usual = statistics.median(spreads) if spreads else 0.0
        found += [own for name, ratios in pairs.items() if (own := _depart(name, stat, ratios, usual))]
    return sorted(found, key=lambda own: own.step)


def _ratios(one: Mapping[str, Recorded], other: Mapping[str, Recorded], stat: str) -> dict[str, Series]:
    """Logarithms of the ratios of what both have; inf if only one of them is finite."""
    found = {}
    for name, own in one.items():
        if name in other and stat in own.stats and stat in other[name].stats:
            known = dict(other[name].stats[stat])
            pairs = [(step, x, known[step]) for step, x in own.stats[stat] if step in known]
            found[name] = Series([step for step, *_ in pairs], [_log_ratio(x, y) for _, x, y in pairs])
    return found


def _log_ratio(x: float, y: float) -> float:
    if math.isfinite(x) != math.isfinite(y):
        return math.inf
    if not math.isfinite(x) or x <= 0 or y <= 0:
        return 0.0  # both have ended, or one is a zero, of which there is no logarithm
    return math.log(y / x)


def _calm(ratios: Series) -> tuple[float, float]:
    """Median and spread of the first records."""
    first = ratios.values[: max(MIN_CALM, round(CALM * len(ratios)))]
    finite = [x for x in first if math.isfinite(x)] or [0.0]
    center = statistics.median(finite)
    return center, 1.4826 * statistics.median(abs(x - center) for x in finite)


def _depart(name: str, stat: str, ratios: Series, usual: float) -> Departure | None:
    center, spread = _calm(ratios)
    if abs(center) > math.log(MIN_FIRST_RATIO):
        return Departure(name, stat, ratios.steps[0], math.exp(abs(center)), is_from_start=True)
    limit = max(MAX_SPREADS * max(spread, usual), math.log(MIN_RATIO))
    far = [abs(x - center) > limit for x in ratios.values]
    for i, step in enumerate(ratios.steps):
        if all(far[i : i + N_IN_A_ROW]) and (i + N_IN_A_ROW <= len(far) or math.isinf(ratios.values[i])):
            return Departure(name, stat, step, _largest(ratios.values[i:]))
    return None


def _largest(values: Sequence[float]) -> float:
    most = max(abs(x) for x in values)
    return math.exp(most) if most < 700 else math.inf
