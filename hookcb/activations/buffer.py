"""OutputBuffer: layers' outputs on their way from the hook to the records."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.activations.bins import at_level, level_of
from hookcb.activations.stats import LAYER_STATS, ROW, SAMPLED, histogram, summarize
from hookcb.core.precision import widened, widest
from hookcb.records.store import StatStore

MAX_ELEMENTS = 4 * ROW  # that wait, and are reduced together: 1 MB, which a CPU's cache holds
MAX_BATCHES = 64  # batches that wait to be reduced
MAX_JOINED = SAMPLED  # elements of a batch that are joined; a copy of more takes longer than it saves
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
    """Elements of outputs of one shape in one batch, which has a record."""

    phase: str
    names: tuple[str, ...]  # of k layers
    record: int
    rows: Tensor  # (k, n)
    exact: Tensor | None  # (k, 6)


class OutputBuffer:
    """The one buffer between hooks and records.

    Hooks add outputs to `batch`. A batch that ends gets a record and waits; a cancelled one is dropped.
    Reducing a few elements takes about as long as reducing thousands, so batches wait for one another.

    Args:
        stores: receive `LAYER_STATS`, then `bins + 2` counts and their level if there are bins, by phase.
        eps: see `layer_stats`.
        bins: number of histogram bins, 0 for no histograms.
        hist_range: range of all histograms. By default each record of a layer has its own: at level 0 it is
            that of the layer's first record, extended by half on both sides, but not beyond 0 if an end is 0.

    Attributes:
        batch: outputs of all calls in the running batch, by path.
        ranges: range of the histograms at level 0, `(2,)`, by phase and name; see `bins.py`.
    """

    def __init__(
        self, stores: Mapping[str, StatStore], eps: float, bins: int, hist_range: tuple[float, float] | None
    ) -> None:
        self.stores, self.eps, self.bins, self.hist_range = stores, eps, bins, hist_range
        # new for each batch: compiled code would be compiled anew each time a list has grown
        self.batch: dict[str, list[Output]] = {}
        self.ranges: dict[Key, Tensor] = {}
        self._waiting: list[Waiting] = []
        self._n_batches = self._n_elements = 0

    def drop_batch(self) -> None:
        """Forgets the outputs of the running batch."""
        self.batch = {}

    def take_batch(self) -> dict[str, Output]:
        """Ends the running batch; returns its outputs by name."""
        batch, self.batch = self.batch, {}
        named: dict[str, Output] = {}
        for path, calls in batch.items():
            if len(calls) == 1:
                (named[path],) = calls
            else:
                named |= {f"{path}#{k}": output for k, output in enumerate(calls)}
        return named

    def end_batch(self, phase: str, epoch: int, step: int) -> dict[str, Output]:
        """Gives the batch a record, if it has statistics; returns its outputs by name."""
        named = self.take_batch()
        record = None
        for names, rows, exact in joined(named, MAX_JOINED):
            record = self.stores[phase].begin(epoch, step) if record is None else record
            self._waiting.append(Waiting(phase, names, record, rows, exact))
            self._n_elements += rows.numel()
        self._n_batches += record is not None
        if self._n_batches == MAX_BATCHES or self._n_elements > MAX_ELEMENTS:
            self.reduce()
        return named

    def reduce(self) -> None:
        """Puts the statistics of waiting outputs into the stores; rows of one length are reduced together."""
        waiting, self._waiting, self._n_batches, self._n_elements = self._waiting, [], 0, 0
        alike: dict[tuple[Any, ...], dict[tuple[str, tuple[str, ...]], list[Waiting]]] = {}
        for item in waiting:
            rows = item.rows
            kind = rows.shape[1], rows.dtype, rows.device, item.exact is None
            alike.setdefault(kind, {}).setdefault((item.phase, item.names), []).append(item)
        for by_names in alike.values():
            for group in _portions([item for items in by_names.values() for item in items]):
                self._put(group)

    def _put(self, group: Sequence[Waiting]) -> None:
        rows, known = _cat([x.rows for x in group]), [x.exact for x in group if x.exact is not None]
        values = summarize(rows, _cat(known) if known else None, self.eps)
        runs = [
            (phase, names, [x.record for x in same])
            for (phase, names), same in groupby(group, lambda x: (x.phase, x.names))
        ]
        sizes = [len(names) * len(records) for _, names, records in runs]
        of_runs = torch.split(values, sizes)
        if self.bins:
            pairs = zip(runs, of_runs, strict=True)
            ranges = torch.cat(
                [self._edges(phase, names, x).repeat(len(records), 1) for (phase, names, records), x in pairs]
            )
            levels = self.levels(rows, ranges)
            edges = at_level(ranges, levels, self.bins)
            counts = histogram(rows, edges[:, :1], edges[:, 1:], self.bins)
            values = torch.cat([values, counts.to(values.dtype), levels[:, None].to(values.dtype)], 1)
            of_runs = torch.split(values, sizes)
        for (phase, names, records), x in zip(runs, of_runs, strict=True):
            for i, name in enumerate(names):
                self.stores[phase].put(name, records, x[i :: len(names)])

    def _edges(self, phase: str, names: Sequence[str], values: Tensor) -> Tensor:
        """Ranges of histograms of k layers, `(k, 2)`; the first k rows of `values` are of a new record."""
        device, dtype, given = values.device, widest(values.device), self.hist_range
        for i, name in enumerate(names):
            key = phase, name
            if key not in self.ranges:
                own = range_around(values[i, LOW], values[i, HIGH]) if given is None else pair(given)
                self.ranges[key] = own
            self.ranges[key] = self.ranges[key].to(device, dtype, non_blocking=True)
        return torch.stack([self.ranges[phase, name] for name in names])

    def levels(self, rows: Tensor, ranges: Tensor) -> Tensor:
        """Levels of ranges that fit rows, `(R,)`; 0 for a range that was given."""
        return torch.zeros_like(ranges[:, 0]) if self.hist_range else level_of(rows, ranges, self.bins)

    def range_of(self, phase: str, name: str) -> tuple[float, float]:
        """Range of a layer's histograms at level 0; NaN before its first record."""
        edges = self.ranges.get((phase, name))
        return (math.nan, math.nan) if edges is None else floats(edges)

    def state(self) -> list[tuple[str, str, tuple[float, float]]]:
        """Ranges of the histograms, as plain numbers."""
        return [(*key, floats(edges)) for key, edges in self.ranges.items()]

    def load_state(self, state: Sequence[tuple[str, str, tuple[float, float]]]) -> None:
        """Restores what `state` has returned."""
        self.ranges = {(phase, name): pair(edges) for phase, name, edges in state}


def joined(
    outputs: Mapping[str, Output], most: int
) -> Iterator[tuple[tuple[str, ...], Tensor, Tensor | None]]:
    """Joins elements of outputs of one shape into matrices of about `most` elements.

    Many small tensors, kept apart, would cost the memory and the time of as many allocations.

    Yields:
        Names of k layers; their elements, `(k, n)`; and their moments, `(k, 6)`, or None.
    """
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, output in outputs.items():
        if (x := output.elements) is not None:
            alike.setdefault((x.shape, x.dtype, x.device, output.exact is None), []).append(name)
    for (shape, *_), names in alike.items():
        n = math.prod(shape)
        at_once = 1 if n > ROW else max(1, most // max(1, n))
        for i in range(0, len(names), at_once):
            some = tuple(names[i : i + at_once])
            elements = [x for name in some if (x := outputs[name].elements) is not None]
            exact = [x for name in some if (x := outputs[name].exact) is not None]
            rows = elements[0] if len(some) == 1 else torch.stack(elements)  # a single one needs no copy
            yield some, rows.reshape(len(some), -1), _cat(exact) if exact else None


def _portions(waiting: Sequence[Waiting]) -> Iterator[list[Waiting]]:
    """Portions of about `MAX_ELEMENTS` elements; long rows are reduced one by one."""
    portion: list[Waiting] = []
    n_elements = 0
    for item in waiting:
        n = item.rows.numel()
        if portion and (n_elements + n > MAX_ELEMENTS or item.rows.shape[1] > ROW):
            yield portion
            portion, n_elements = [], 0
        portion.append(item)
        n_elements += n
    if portion:
        yield portion


def _cat(xs: Sequence[Tensor]) -> Tensor:
    return xs[0] if len(xs) == 1 else torch.cat(list(xs))


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
