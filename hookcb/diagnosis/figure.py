"""Figure: the numbers behind the sentence of a finding."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hookcb.records.series import Series

MAX_POINTS = 200  # of a line; a picture of a finding has no room for more


class Line(NamedTuple):
    """Numbers of one kind: at `places`, which are steps, or indices of the names of a figure."""

    label: str
    places: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """The numbers that a finding compares with its limit, over steps, or over layers and whatever has a name.

    Attributes:
        title: what the numbers are, with their unit.
        lines: the numbers.
        names: those of the places, empty if these are steps.
        limit: the limit in the unit of the numbers, NaN if there is none.

    >>> from hookcb.diagnosis.figure import over_names
    >>> over_names("share of the largest gradient", {"0.weight": 1e-6, "2.weight": 1.0}, 1e-4).names
    ('0.weight', '2.weight')
    """

    title: str
    lines: tuple[Line, ...]
    names: tuple[str, ...] = ()
    limit: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """The figure as plain values; numbers that are not finite are "NaN", "Infinity" or "-Infinity"."""
        lines = [
            {"label": x.label, "places": list(x.places), "values": [*map(_plain, x.values)]}
            for x in self.lines
        ]
        limit = self.limit if math.isfinite(self.limit) else None
        return {"title": self.title, "lines": lines, "names": list(self.names), "limit": limit}


def _plain(x: float) -> float | str:
    return x if math.isfinite(x) else "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"


def over_steps(title: str, lines: Mapping[str, Series], limit: float = math.nan) -> Figure:
    """A figure of series by their labels."""
    return Figure(title, tuple(_line(label, series) for label, series in lines.items()), limit=limit)


def over_names(title: str, values: Mapping[str, float], limit: float = math.nan) -> Figure:
    """A figure of one number for each name, in their order."""
    known = [(i, x) for i, x in enumerate(values.values()) if math.isfinite(x)]
    return Figure(title, (_line(title, known),), tuple(values), limit)


def _line(label: str, pairs: Iterable[tuple[int, float]]) -> Line:
    """A line of at most `MAX_POINTS`, and of the smallest, the largest and the last number."""
    kept = list(pairs)
    if len(kept) > MAX_POINTS:
        sizes = [x for _, x in kept if math.isfinite(x)]
        ends = {min(sizes), max(sizes)} if sizes else set()
        stride = math.ceil(len(kept) / MAX_POINTS)
        last = len(kept) - 1
        kept = [pair for i, pair in enumerate(kept) if i % stride == 0 or i == last or pair[1] in ends]
    values = (math.nan if math.isnan(x) else float(x) for _, x in kept)  # so that equal ones are equal
    return Line(label, tuple(place for place, _ in kept), tuple(values))
