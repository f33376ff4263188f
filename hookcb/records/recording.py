"""Recording: what a callback has recorded, and what a page, a log and figures have of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.core.callback import Callback
from hookcb.records.content import Content
from hookcb.records.printing import html_of
from hookcb.records.series import Series


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram.

    Args:
        low: lower edge of the first bin, in the unit of the values.
        high: upper edge of the last bin.
        counts: number of values in each bin.
        below: number of values below `low`.
        above: number of values above `high`.
        min: smallest finite value, NaN if there is none.
        max: largest finite value, NaN if there is none.
        edges: edges of the bins, one more than there are bins; by default they are of equal width.

    >>> from hookcb.loggers import Histogram
    >>> Histogram(low=0.0, high=1.0, counts=(3, 1), below=0, above=2, min=0.1, max=4.0).edges
    (0.0, 0.5, 1.0)
    """

    low: float
    high: float
    counts: tuple[float, ...]
    below: float
    above: float
    min: float
    max: float
    edges: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.edges:
            n = len(self.counts)
            width = (self.high - self.low) / n
            object.__setattr__(self, "edges", tuple(self.low + width * i for i in range(n + 1)))


class Reading(NamedTuple):
    """The last record of a callback, for a log.

    Attributes:
        part: what is appended to the callback's name; "" unless it has several kinds of records.
        record: number of the record.
        step: training step of it.
        values, hists: numbers and histograms by name.
    """

    part: str
    record: int
    step: int
    values: dict[str, float]
    hists: dict[str, Histogram]


class Recording:
    """Records of a callback; they alone know what a page, a log and figures have of them.

    A callback has it in its attribute `records`, or is one itself.
    """

    def show_on(self, page: Content) -> None:
        """Puts what was recorded on a page, in place of what is there of the same kind."""

    def newest(self, seen: Mapping[str, int]) -> Iterator[Reading]:
        """Last record of each part, unless its number is in `seen`; waits for a GPU."""
        yield from ()

    def figures(self, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Names of figures that can be drawn, and functions that draw them; `name` is the callback's."""
        yield from ()

    def maps(self, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The same for heat maps of all layers, one for each statistic that is worth a look in training."""
        yield from ()

    def _repr_html_(self) -> str | None:
        """Its report, for a notebook; None, which shows its repr, if it has none or nothing is recorded."""
        report: Callable[[], Any] | None = getattr(self, "report", None)
        with suppress(RuntimeError, ValueError):  # nothing is recorded
            return None if report is None else html_of(report())
        return None


def recordings_of(cbs: Iterable[Callback]) -> Iterator[tuple[str, Recording]]:
    """Names of the callbacks that record, and what they have recorded."""
    for cb in cbs:
        own = cb if isinstance(cb, Recording) else vars(cb).get("records")
        if isinstance(own, Recording):
            yield cb.name, own


def picked(values: Tensor, most: int) -> Tensor:
    """Places of about `most` rows, none all NaN: one of each stretch, not finite if possible; the last."""
    places = values.isnan().all(1).logical_not().nonzero()[:, 0]
    stride = -(-len(places) // most)
    if stride < 2:
        return places
    known = values[:, values.isfinite().any(0)]
    is_bad = known[places].isfinite().all(1).logical_not()
    stretches = zip(torch.split(places, stride), torch.split(is_bad.int(), stride), strict=True)
    chosen = torch.stack([own[bad.argmax()] for own, bad in stretches])
    return chosen if chosen[-1] == places[-1] else torch.cat([chosen, places[-1:]])


def with_numbers(found: Mapping[str, Series]) -> dict[str, Series]:
    """Series that have a number other than NaN."""
    return {name: series for name, series in found.items() if any(x == x for x in series.values)}
