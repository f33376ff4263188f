"""OutputBuffer: layers' outputs on their way from the hook to the records."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.activations.bins import at_level, level_of
from hookcb.activations.rows import MAX_BATCHES, MAX_ELEMENTS, Output, Portion, Rows, Run
from hookcb.activations.stats import LAYER_STATS, ROW, histogram, summarize
from hookcb.core.precision import widened, widest
from hookcb.records.memory import Memory
from hookcb.records.store import StatStore

LOW, HIGH = LAYER_STATS.index("min"), LAYER_STATS.index("max")


Key = tuple[str, str]  # phase and name of a layer


class Waiting(NamedTuple):
    """A layer's output in a batch that has a record."""

    phase: str
    name: str
    record: int
    output: Output


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
        batch: outputs of all calls in the running batch, by path, but for those in `rows`.
        ranges: range of the histograms at level 0, `(2,)`, by phase and name; see `bins.py`.
    """

    def __init__(
        self, stores: Mapping[str, StatStore], eps: float, bins: int, hist_range: tuple[float, float] | None
    ) -> None:
        self.stores, self.eps, self.bins, self.hist_range = stores, eps, bins, hist_range
        # new for each batch: compiled code would be compiled anew each time a list has grown
        self.batch: dict[str, list[Output]] = {}
        self.ranges: dict[Key, Tensor] = {}
        self._known: dict[str, set[str]] = {phase: set() for phase in stores}  # names seen in each
        self._waiting: list[Waiting] = []
        self.memory, self.rows = Memory(), Rows()
        self._n_batches = self._n_elements = 0
        self._n_lent = 0  # number of tensors that the memory has lent to waiting outputs

    def __getstate__(self) -> dict[str, Any]:
        self.reduce()  # each waiting row would be copied as the whole block
        return self.__dict__

    def drop_batch(self) -> None:
        """Forgets the outputs of the running batch."""
        self.batch = {}
        self.rows.filled.clear()
        self.memory.take_back(slice(self._n_lent, None))

    def take_batch(self) -> dict[str, Output]:
        """Ends the running batch; returns its outputs by name, but for those in `rows`."""
        batch, self.batch = self.batch, {}
        if not self.rows.filled.keys().isdisjoint(batch):
            for path in self.rows.filled.keys() & batch.keys():
                batch[path].insert(0, self.rows.pull(path))
        named: dict[str, Output] = {}
        for path, calls in batch.items():
            if len(calls) == 1:
                (named[path],) = calls
            else:
                named |= {f"{path}#{k}": output for k, output in enumerate(calls)}
        return named

    def end_batch(self, phase: str, epoch: int, step: int) -> dict[str, Output]:
        """Gives the batch a record, if it has statistics.

        Returns:
            Its outputs by name; of those in `rows` only where the last output was of another shape.
        """
        named, filled, known = self.take_batch(), self.rows.filled, self._known[phase]
        if not (named.keys() <= known and filled.keys() <= known):
            self._introduce(phase, named)
        record = self.stores[phase].begin(epoch, step) if filled else None
        for name, output in named.items():
            if output.elements is not None:
                record = self.stores[phase].begin(epoch, step) if record is None else record
                self._waiting.append(Waiting(phase, name, record, output))
                self._n_elements += output.elements.numel()
        if record is None:
            return named
        back = self.rows.end_batch(phase, record, named)
        self._n_batches += 1
        self._n_lent = self.memory.n_lent
        if self._n_batches == MAX_BATCHES or self._n_elements > MAX_ELEMENTS or self.rows.is_full:
            self.reduce()
            self.rows.arrange(named)
        return named | back if back else named

    def _introduce(self, phase: str, named: Mapping[str, Output]) -> None:
        """Adds layers to a store in the order of the forward, as those of one shape are reduced together."""
        found = [name for name, output in named.items() if output.elements is not None]
        new = dict.fromkeys([*self.rows.filled, *found])
        in_order = [name for store in self.stores.values() for name in store.names if name in new]
        for name in dict.fromkeys(in_order) | new:
            self.stores[phase].add(name)
        self._known[phase].update(new, named)

    def reduce(self) -> None:
        """Puts the statistics of waiting outputs into the stores; those of one shape are reduced together."""
        waiting, self._waiting, self._n_batches, self._n_elements = self._waiting, [], 0, 0
        for portion in chain(self.rows.empty(), portions(waiting)):
            self._put(portion)
        self.memory.take_back(slice(self._n_lent))
        self._n_lent = 0

    def _put(self, portion: Portion) -> None:
        runs, rows, known = portion
        sizes = [len(run.records) for run in runs]
        at_once = max(1, ROW // max(1, rows.shape[1]))  # more would make the heap grow each time
        pieces = [slice(i, i + at_once) for i in range(0, len(rows), at_once)]
        values = torch.cat([summarize(rows[i], known[i], self.eps) for i in pieces])
        if self.bins:
            firsts = zip(runs, torch.split(values, sizes), strict=True)
            ranges = [self._range(run.phase, run.name, x[0]).expand(len(x), 2) for run, x in firsts]
            levels = self.levels(rows, torch.cat(ranges))
            edges = at_level(torch.cat(ranges), levels, self.bins)
            counts = [histogram(rows[i], edges[i, :1], edges[i, 1:], self.bins) for i in pieces]
            of_bins = torch.cat(counts).to(values.dtype), levels[:, None].to(values.dtype)
            values = torch.cat([values, *of_bins], 1)
        for (phase, name, records), x in zip(runs, torch.split(values, sizes), strict=True):
            self.stores[phase].put(name, records, x)

    def _range(self, phase: str, name: str, values: Tensor) -> Tensor:
        """Range of a layer's histograms at level 0, `(2,)`; at first it is made from a record's `values`."""
        key, given = (phase, name), self.hist_range
        if key not in self.ranges:
            self.ranges[key] = range_around(values[LOW], values[HIGH]) if given is None else pair(given)
        own = self.ranges[key] = self.ranges[key].to(values.device, widest(values.device), non_blocking=True)
        return own

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


def portions(waiting: Iterable[Waiting]) -> Iterator[Portion]:
    """Joins outputs of one shape, layer by layer, to matrices of at most `MAX_ELEMENTS`; long rows are alone.

    Outputs of a portion all have known moments, or none has.
    """
    alike: dict[tuple[Any, ...], dict[Key, list[Waiting]]] = {}
    for item in waiting:
        if (x := item.output.elements) is not None:
            kind = x.shape, x.dtype, x.device, item.output.exact is None
            alike.setdefault(kind, {}).setdefault((item.phase, item.name), []).append(item)
    for (shape, *_), layers in alike.items():
        items, n = [item for same in layers.values() for item in same], math.prod(shape)
        at_once = max(1, MAX_ELEMENTS // max(1, n))
        for i in range(0, len(items), at_once):
            some = items[i : i + at_once]
            elements = [x for item in some if (x := item.output.elements) is not None]
            rows = elements[0] if len(some) == 1 else torch.stack(elements)  # a single one needs no copy
            known = [exact for item in some if (exact := item.output.exact) is not None]
            runs = [
                Run(*key, [x.record for x in same])
                for key, same in groupby(some, lambda x: (x.phase, x.name))
            ]
            yield Portion(runs, rows.reshape(len(some), -1), known)


def pair(edges: tuple[float, float]) -> Tensor:
    """Range as a tensor."""
    return torch.tensor(edges, dtype=torch.float64, device="cpu")


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
