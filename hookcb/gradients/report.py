"""GradientReport: a table of parameters with the statistics of the last recorded step."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hookcb.records.plots import sparkline
from hookcb.records.tables import COUNT, NO_MARK, Column, Mark, Ranked, Report

Stats = dict[str, list[float]]  # by statistic, a number for each record


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRow(Ranked):
    """A parameter in a `GradientReport`.

    Attributes:
        last: statistics of the last record, by name, `abs_max` of the last that has it; empty without a
            gradient.
        series: statistics of all records.
        mark: codes of the verdict's findings about it, or "".
    """

    last: dict[str, float]
    series: Stats
    mark: str

    def text(self, stat: str, form: str = ".2g") -> str:
        """A statistic of the last record."""
        return format(self.last[stat], form) if self.last else ""

    def trend(self, stat: str) -> str:
        """Sparkline of a statistic."""
        return sparkline(_logs(self.series.get(stat, [])), 8)


class GradientReport(Report[ParamRow]):
    """Statistics of parameters and their gradients in the last recorded step."""

    head, missing = "parameter", "the report has no parameter"
    columns = (
        COUNT,
        Column("norm", lambda row: row.text("norm") or "none", 2),
        Column("largest", lambda row: row.text("abs_max"), 4),
        Column("weights", lambda row: row.text("weight_norm"), 5),
        Column("update", lambda row: row.text("update_ratio", ".1e"), 3),
        Column("norms", lambda row: row.trend("norm"), 6),
        Column("updates", lambda row: row.trend("update_ratio"), 7),
        Column("look at", lambda row: row.mark, is_text=True, style="yellow"),
    )


def param_rows(
    params: Mapping[str, Stats], without_grad: Iterable[str], marks: Mapping[str, Mark]
) -> Iterator[ParamRow]:
    """Rows of the parameters with gradients, then of those without."""
    missing = list(without_grad)
    alive = {name: series for name, series in params.items() if name not in missing}
    last = {
        name: {stat: _last(values, is_seldom=stat == "abs_max") for stat, values in stats.items()}
        for name, stats in alive.items()
    }
    norms = [numbers["norm"] for numbers in last.values() if numbers["norm"] > 0]
    median = statistics.median(norms) if norms else math.nan
    for name, series in alive.items():
        mark = marks.get(name, NO_MARK)
        weight = mark.weight, 0, _distance(last[name]["norm"], median)
        yield _row(name, weight, mark, last[name], series)
    for name in missing:
        mark = marks.get(name, NO_MARK)
        yield _row(name, (mark.weight, 1, 0.0), mark, {}, params.get(name, {}))


def _row(name: str, weight: tuple[float, ...], mark: Mark, last: dict[str, float], series: Stats) -> ParamRow:
    module = name.rpartition(".")[0]
    return ParamRow(name=name, module=module, weight=weight, last=last, series=series, mark=mark.text)


def _last(values: Sequence[float], is_seldom: bool) -> float:
    """The last value; of a statistic that some records lack, the last one there is."""
    known = [x for x in values if not math.isnan(x)] if is_seldom else []
    return (known or values or [math.nan])[-1]


def _distance(norm: float, median: float) -> float:
    """Logarithm of the factor between a norm and the median; 0 if either is unknown."""
    if math.isnan(norm) or math.isnan(median):
        return 0.0
    return abs(math.log(norm / median)) if 0 < norm < math.inf else math.inf


def _logs(values: Sequence[float]) -> list[float]:
    """Log10 of sizes; NaN for 0 and infinity, the update ratio of weights that were all zero."""
    return [math.log10(x) if 0 < x < math.inf else math.nan for x in values]
