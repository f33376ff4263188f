"""OutputBuffer: layers' outputs on their way from the hook to the records."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.activations.stats import LAYER_STATS, ROW, histogram, summarize
from hookcb.core.precision import widened, widest
from hookcb.records.store import StatStore

MAX_ELEMENTS = 64 * ROW  # elements of all layers that wait to be reduced: 16 MB
MAX_BATCHES = 64  # batches that wait to be reduced
MAX_REDUCED = 4 * ROW  # elements reduced together: 1 MB, which a CPU's cache holds
LOW, HIGH = LAYER_STATS.index("min"), LAYER_STATS.index("max")


Key = tuple[str, str]  # phase and name of a layer


class Output(NamedTuple):
    """The part of one output that the hook keeps.

    Attributes:
        type: class of the layer; for an output without statistics, what the output is instead.
        shape: shape of the output.
        elements: a copy of the output or a sample of it, see `take`; None without statistics.
        exact: moments of all elements if `elements` is a sample, else None.
        n: number of elements that this process has of the output.
        copies: number of ranks that have the same ones, as under tensor parallelism; 0 if that is unknown.
    """

    type: str
    shape: tuple[int, ...] = ()
    elements: Tensor | None = None
    exact: Tensor | None = None
    n: int = 0
    copies: int = 1


class Waiting(NamedTuple):
    """Elements of a layer's output that have a record."""

    record: int
    elements: Tensor
    exact: Tensor | None


class OutputBuffer:
    """The one buffer between hooks and records.

    Hooks add outputs to `batch`. A batch that ends gets a record and waits; a cancelled one is dropped.
    Reducing a few elements takes about as long as reducing thousands, so batches wait for one another.

    Args:
        stores: receive `LAYER_STATS`, then `bins + 2` counts if there are bins, by phase.
        eps: see `layer_stats`.
        bins: number of histogram bins, 0 for no histograms.
        hist_range: range of all histograms. By default each layer has its own: the range of its first record,
            extended by half on both sides, but not beyond 0 if an end is 0.

    Attributes:
        batch: outputs of all calls in the running batch, by path.
        ranges: range of the histograms `(2,)`, by phase and name.
    """

    def __init__(
        self, stores: Mapping[str, StatStore], eps: float, bins: int, hist_range: tuple[float, float] | None
    ) -> None:
        self.stores, self.eps, self.bins, self.hist_range = stores, eps, bins, hist_range
        # new for each batch: compiled code would be compiled anew each time a list has grown
        self.batch: dict[str, list[Output]] = {}
        self.ranges: dict[Key, Tensor] = {}
        self._waiting: dict[Key, list[Waiting]] = {}
        self._n_batches = self._n_elements = 0

    def drop_batch(self) -> None:
        """Forgets the outputs of the running batch."""
        self.batch = {}

    def take_batch(self) -> dict[str, Output]:
        """Ends the running batch; returns its outputs by name."""
        batch, self.batch = self.batch, {}
        return {
            path if len(calls) == 1 else f"{path}#{k}": output
            for path, calls in batch.items()
            for k, output in enumerate(calls)
        }

    def end_batch(self, phase: str, epoch: int, step: int) -> dict[str, Output]:
        """Gives the batch a record, if it has statistics; returns its outputs by name."""
        named = self.take_batch()
        record = None
        for name, output in named.items():
            if output.elements is not None:
                record = self.stores[phase].begin(epoch, step) if record is None else record
                waiting = Waiting(record, output.elements, output.exact)
                self._waiting.setdefault((phase, name), []).append(waiting)
                self._n_elements += output.elements.numel()
        self._n_batches += 1
        if self._n_batches == MAX_BATCHES or self._n_elements > MAX_ELEMENTS:
            self.reduce()
        return named

    def reduce(self) -> None:
        """Puts the statistics of waiting outputs into the stores; all of one shape are reduced together."""
        waiting, self._waiting, self._n_batches, self._n_elements = self._waiting, {}, 0, 0
        alike: dict[tuple[Any, ...], list[tuple[Key, Waiting]]] = {}
        for key, outputs in waiting.items():
            for output in outputs:
                alike.setdefault(reduced_with(output), []).append((key, output))
        for (shape, *_), group in alike.items():
            n = math.prod(shape)
            at_once = 1 if n > ROW else MAX_REDUCED // max(1, n)
            for i in range(0, len(group), at_once):
                self._put(group[i : i + at_once])

    def _put(self, group: Sequence[tuple[Key, Waiting]]) -> None:
        elements, exact = [output.elements for _, output in group], [output.exact for _, output in group]
        # a single one needs no copy
        rows = (elements[0] if len(group) == 1 else torch.stack(elements)).reshape(len(group), -1)
        known = [moments for moments in exact if moments is not None]
        values = summarize(rows, torch.cat(known) if known else None, self.eps)
        first: dict[Key, int] = {}  # row of each layer
        for i, (key, _) in enumerate(group):
            first.setdefault(key, i)
        ends = [*list(first.values())[1:], len(group)]
        if self.bins:
            counts = self._counts(first, ends, rows, values)
            values = torch.cat([values, counts.to(values.dtype)], 1)
        for ((phase, name), begin), end in zip(first.items(), ends, strict=True):
            records = [output.record for _, output in group[begin:end]]
            self.stores[phase].put(name, records, values[begin:end])

    def _counts(self, first: Mapping[Key, int], ends: Sequence[int], rows: Tensor, values: Tensor) -> Tensor:
        device, dtype = rows.device, widest(rows.device)
        for key, i in first.items():
            if key not in self.ranges:
                given = self.hist_range
                self.ranges[key] = (
                    range_around(values[i, LOW], values[i, HIGH]) if given is None else pair(given)
                )
            self.ranges[key] = self.ranges[key].to(device, dtype, non_blocking=True)
        n = [end - begin for begin, end in zip(first.values(), ends, strict=True)]
        edges = torch.cat([self.ranges[key].expand(k, 2) for key, k in zip(first, n, strict=True)])
        return histogram(rows, edges[:, :1], edges[:, 1:], self.bins)

    def range_of(self, phase: str, name: str) -> tuple[float, float]:
        """Range of a layer's histograms; NaN before its first record."""
        edges = self.ranges.get((phase, name))
        return (math.nan, math.nan) if edges is None else floats(edges)

    def state(self) -> list[tuple[str, str, tuple[float, float]]]:
        """Ranges of the histograms, as plain numbers."""
        return [(*key, floats(edges)) for key, edges in self.ranges.items()]

    def load_state(self, state: Sequence[tuple[str, str, tuple[float, float]]]) -> None:
        """Restores what `state` has returned."""
        self.ranges = {(phase, name): pair(edges) for phase, name, edges in state}


def reduced_with(waiting: "Waiting | Output") -> tuple[Any, ...]:
    """Key that is equal for outputs that can be reduced together."""
    elements = waiting.elements
    assert elements is not None
    return elements.shape, elements.dtype, elements.device, waiting.exact is None


def pair(edges: tuple[float, float]) -> Tensor:
    """Range as a tensor."""
    return torch.tensor(edges, dtype=torch.float64)


def floats(edges: Tensor) -> tuple[float, float]:
    """Range as plain numbers."""
    low, high = edges.tolist()
    return low, high


def range_around(low: Tensor, high: Tensor) -> Tensor:
    """A range around finite `low` and `high`, with room for what training will add."""
    limit = torch.finfo(low.dtype).max
    low, high = widened(low.nan_to_num(-1)), widened(high.nan_to_num(1))
    room = torch.where(high > low, high / 2 - low / 2, high.abs() / 2 + 0.5)
    below = torch.where((low == 0) & (high > 0), low, low - room)  # nothing is below 0 after a ReLU
    above = torch.where((high == 0) & (low < 0), high, high + room)
    return torch.stack([below, above]).clamp(-limit, limit)
