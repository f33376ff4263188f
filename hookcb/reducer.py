"""Reducer: the elements of one layer's outputs, reduced for several records together."""

import torch
from torch import Tensor

from hookcb.stats import LAYER_STATS, WHOLE, histogram, summarize
from hookcb.store import StatStore

MOST_RECORDS = 64
LOW, HIGH = LAYER_STATS.index("min"), LAYER_STATS.index("max")


class Reducer:
    """Collects what `take` gives of a layer, and puts its statistics into a store.

    A reduction of a few elements takes about as long as one of some thousands, so small outputs wait for one
    another: up to 65,536 elements or 64 records.

    Args:
        name: of the layer in the store.
        store: takes `LAYER_STATS`, then `bins + 2` counts where there are bins.
        eps: see `layer_stats`.
        bins: of a histogram, 0 for none.
        edges: of its range; None takes the one of the first record and half as much again on both sides.
    """

    def __init__(
        self, name: str, store: StatStore, eps: float, bins: int, edges: tuple[float, float] | None
    ) -> None:
        self.name, self.store, self.eps, self.bins = name, store, eps, bins
        store.add(name)
        self._edges = None if edges is None else torch.tensor(edges, dtype=torch.float64)
        self._records: list[int] = []
        self._elements: list[Tensor] = []
        self._exact: list[Tensor | None] = []

    def add(self, record: int, elements: Tensor, exact: Tensor | None) -> None:
        """Adds what `take` gave for a record."""
        if self._elements and not _are_alike(self._elements[-1], elements):
            self.reduce()
        self._records.append(record)
        self._elements.append(elements)
        self._exact.append(exact)
        if len(self._records) == MOST_RECORDS or len(self._records) * elements.numel() > WHOLE // 2:
            self.reduce()

    @property
    def edges(self) -> tuple[float, float] | None:
        """Of the histograms' range; None before the first."""
        if self._edges is None:
            return None
        low, high = self._edges.tolist()
        return low, high

    def reduce(self) -> None:
        """Puts what has been collected into the store."""
        if not self._records:
            return
        rows = torch.stack(self._elements)
        exact = [x for x in self._exact if x is not None]
        values = summarize(rows, torch.cat(exact) if exact else None, self.eps)
        if self.bins:
            if self._edges is None:
                self._edges = _around(values[0, LOW], values[0, HIGH])
            low, high = self._edges.to(rows.device).unbind()
            values = torch.cat([values, histogram(rows, low, high, self.bins).float()], 1)
        self.store.put(self.name, self._records, values)
        self._records, self._elements, self._exact = [], [], []


def _are_alike(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device


def _around(low: Tensor, high: Tensor) -> Tensor:
    """A range around finite `low` and `high`, with room for what training will add."""
    low, high = low.nan_to_num(-1).double(), high.nan_to_num(1).double()
    room = torch.where(high > low, (high - low) / 2, high.abs() / 2 + 0.5)
    most = torch.finfo(torch.float32).max
    return torch.stack([low - room, high + room]).clamp(-most, most)
