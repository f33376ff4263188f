"""Live storages, by weak references that keep none alive, and the calls of layers that made them."""

import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from hookcb.core.torch_private import storage_id
from hookcb.profiling.memory.allocator import Meter
from hookcb.profiling.memory.sizes import storages

# labels while no layer is running: until the model is done, and after that
OUTSIDE, LOSS = "(outside the layers)", "(loss)"
GRAPH = "hookcb.memory"  # key in the metadata of a graph node


@dataclass(slots=True, eq=False)
class LiveStorage:
    """A storage that has been seen, until it is freed.

    Attributes:
        layer: layer in which it was first seen.
        n_bytes: size in bytes; 0 if it existed before the batch.
        batch: number of the batch that made it.
        is_saved: whether this batch's graph keeps it.
        saved_in: the innermost call of a layer that saved it first; None outside the layers.
        within: the innermost call around all those that saved it.
        ref: weak reference to the storage, or to an object with the same lifetime.
    """

    layer: str
    n_bytes: int
    batch: int
    is_saved: bool = False
    saved_in: "Call | None" = None
    within: "Call | None" = None
    ref: Any = None


class Token:
    """An object in the metadata of a graph node, which lives as long as the node."""


class Ledger(Meter):
    """Storages that were made by batches and are still alive; a meter of their bytes.

    Attributes:
        alive: their bytes now.
        hidden: type or layout of tensors whose memory is unknown, by layer.
    """

    def __init__(self) -> None:
        self._live: dict[int, LiveStorage] = {}
        self.batch = self.alive = self.most = 0
        self.hidden: dict[str, str] = {}

    def begin_batch(self) -> None:
        """Begins another batch: new storages belong to it, and none counts as given."""
        self.batch += 1
        self._live = {key: live for key, live in self._live.items() if live.n_bytes}
        for live in self._live.values():
            live.is_saved, live.saved_in, live.within = False, None, None
        self.most = self.alive

    def counts(self) -> tuple[int, int]:
        """Bytes alive now, and 0, as `most` is kept up to date."""
        return self.alive, 0

    def note(self, x: Tensor, layer: str, given: bool = False) -> list[LiveStorage]:
        """Counts the storages of a tensor unless already known; `given` ones existed before the batch."""
        try:
            return [self._note(storage, layer, given) for storage in storages(x)]
        except Exception:  # from torch or a tensor subclass; it must not reach the user's forward
            self.hidden[layer] = str(x.layout) if type(x) is Tensor else type(x).__name__
            return []

    def note_graph(self, x: Tensor, layer: str) -> None:
        """Counts a tensor as long as its graph is alive; without a graph it may be kept for its value."""
        if x.grad_fn is None:
            return
        with suppress(Exception):  # a custom node
            token = Token()
            metadata: Any = x.grad_fn.metadata
            metadata[GRAPH] = token
            self._add(-id(token), token, layer, sum(storage.nbytes() for storage in storages(x)))

    def older(self) -> tuple[int, dict[str, int]]:
        """Live bytes of earlier batches; and by layer, for layers with bytes of two batches or more."""
        old = [live for live in list(self._live.values()) if live.n_bytes and live.batch < self.batch]
        n_batches = Counter(layer for layer, _ in {(live.layer, live.batch) for live in old})
        by_layer: Counter[str] = Counter()
        for live in old:
            if n_batches[live.layer] > 1:
                by_layer[live.layer] += live.n_bytes
        return sum(live.n_bytes for live in old), dict(by_layer.most_common())

    def _note(self, storage: Any, layer: str, given: bool) -> LiveStorage:
        live = self._live.get(storage_id(storage))
        if live is None:
            live = self._add(storage_id(storage), storage, layer, 0 if given else storage.nbytes())
        return live

    def _add(self, key: int, target: Any, layer: str, n_bytes: int) -> LiveStorage:
        live = LiveStorage(layer, n_bytes, self.batch)
        live.ref = weakref.ref(target, partial(self._freed, key))
        self._live[key] = live
        self.alive += n_bytes
        self.most = max(self.most, self.alive)
        return live

    def _freed(self, key: int, _: Any) -> None:
        live = self._live.pop(key, None)
        if live is not None:
            self.alive -= live.n_bytes

    def clear(self) -> None:
        """Forgets all storages."""
        self._live.clear()
        self.alive = self.most = 0


@dataclass(slots=True, eq=False)
class Call:
    """One call of a layer.

    Attributes:
        layer: name of the layer.
        above: the call around it.
        inputs: storages of its inputs.
        kept_before: bytes kept for the backward when it began.
        mark: argument for the meter's `end`.
        ends: inputs of a compiled layer, at which its graph ends.
        allocated, peak: bytes alive at its end, and peak, relative to its beginning.
        output_bytes: size of its outputs.
    """

    layer: str
    above: "Call | None"
    inputs: list[LiveStorage]
    kept_before: int
    mark: Any
    ends: list[Tensor] = field(default_factory=list)
    allocated: int = 0
    peak: int = 0
    output_bytes: int = 0

    def path(self) -> "list[Call]":
        """This call and those around it, outermost first."""
        return [*(self.above.path() if self.above else []), self]


def innermost_around(a: Call | None, b: Call | None) -> Call | None:
    """The innermost call that contains both; a call contains itself."""
    if a is None or b is None or a is b:
        return a if a is b else None
    both = [x for x, y in zip(a.path(), b.path(), strict=False) if x is y]
    return both[-1] if both else None
