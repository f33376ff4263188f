"""Reducer: the elements of one layer's outputs, reduced for several records together."""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hookcb.activations.stats import LAYER_STATS, WHOLE, histogram, summarize
from hookcb.core.precision import widened, widest
from hookcb.records.store import StatStore

MOST_RECORDS = 64
LOW, HIGH = LAYER_STATS.index("min"), LAYER_STATS.index("max")


class Reducer:
    """Collects what `take` gives of a layer, and puts its statistics into a store.

    A reduction of a few elements takes about as long as one of some thousands, so outputs wait for one
    another, as long as there is room for their elements, or for 64 records.

    Args:
        name: of the layer in the store.
        store: takes `LAYER_STATS`, then `bins + 2` counts where there are bins.
        eps: see `layer_stats`.
        bins: of a histogram, 0 for none.
        edges: of its range; None takes the one of the first record and half as much again on both sides, but
            not beyond 0 where that is an end.
    """

    def __init__(
        self, name: str, store: StatStore, eps: float, bins: int, edges: tuple[float, float] | None
    ) -> None:
        self.name, self.store, self.eps, self.bins = name, store, eps, bins
        store.add(name)
        self._edges = None if edges is None else torch.tensor(edges, dtype=torch.float64)
        self._waiting: list[tuple[int, Tensor, Tensor | None]] = []
        self._n_elements = 0

    def add(self, record: int, elements: Tensor, exact: Tensor | None, room: int) -> None:
        """Adds what `take` gave for a record; reduces when there are more than `room` elements."""
        self._waiting.append((record, elements, exact))
        self._n_elements += elements.numel()
        full = self._n_elements > room or len(self._waiting) == MOST_RECORDS
        if full or elements.numel() > WHOLE:  # such a long one is reduced by itself
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
        waiting, self._waiting, self._n_elements = self._waiting, [], 0
        for _, group in groupby(waiting, _kind):
            records, elements, exact = zip(*group, strict=True)
            rows = (
                torch.stack(elements).reshape(len(records), -1)
                if len(records) > 1
                else elements[0].reshape(1, -1)
            )
            values = summarize(rows, None if exact[0] is None else torch.cat(exact), self.eps)
            if self.bins:
                values = torch.cat([values, self._counts(rows, values).to(values.dtype)], 1)
            self.store.put(self.name, list(records), values)

    def _counts(self, rows: Tensor, values: Tensor) -> Tensor:
        if self._edges is None:
            self._edges = _around(values[0, LOW], values[0, HIGH])
        self._edges = self._edges.to(rows.device, widest(rows.device), non_blocking=True)
        low, high = self._edges.unbind()
        return histogram(rows, low, high, self.bins)


def _kind(waiting: tuple[int, Tensor, Tensor | None]) -> tuple[Any, ...]:
    """What those have in common that are reduced together."""
    _, elements, exact = waiting
    return elements.shape, elements.dtype, elements.device, exact is None


def _around(low: Tensor, high: Tensor) -> Tensor:
    """A range around finite `low` and `high`, with room for what training will add."""
    most = torch.finfo(low.dtype).max
    low, high = widened(low.nan_to_num(-1)), widened(high.nan_to_num(1))
    room = torch.where(high > low, high / 2 - low / 2, high.abs() / 2 + 0.5)
    below = torch.where((low == 0) & (high > 0), low, low - room)  # nothing is below 0 behind a ReLU
    above = torch.where((high == 0) & (low < 0), high, high + room)
    return torch.stack([below, above]).clamp(-most, most)
