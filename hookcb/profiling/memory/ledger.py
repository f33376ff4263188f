"""Which storages are alive, told by weak references: nothing is kept alive by being counted."""

import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from hookcb.core.torch_private import storage_id
from hookcb.profiling.memory.sizes import storages

OUTSIDE, LOSS = "(outside the layers)", "(loss)"  # where no layer runs, before the model is done and after
GRAPH = "hookcb.memory"  # key in the metadata of a node


@dataclass(slots=True, eq=False)
class Held:
    """A storage that has been seen, until it is freed.

    Attributes:
        layer: where it was first seen.
        n_bytes: its size; 0 where it was there before the batch.
        batch: number of the batch that made it.
        is_saved: whether this batch's graph keeps it.
        saved_in: the innermost call of a layer that saved it first; None outside of all.
        within: the innermost call that all are in which saved it.
        ref: to the storage, or to what lives as long.
    """

    layer: str
    n_bytes: int
    batch: int
    is_saved: bool = False
    saved_in: "Call | None" = None
    within: "Call | None" = None
    ref: Any = None


class Token:
    """Lives as long as the node of a graph that has it in its metadata."""


class Ledger:
    """The storages that batches have made and that are still alive.

    Attributes:
        alive: bytes of them now.
        most: the most at a time, since the innermost `begin`.
        hidden: tensors whose memory could not be told, by layer, with their type or layout.
    """

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self.batch = self.alive = self.most = 0
        self.hidden: dict[str, str] = {}

    def begin_batch(self) -> None:
        """From now on what is new is of another batch, and nothing counts as given."""
        self.batch += 1
        self._held = {key: held for key, held in self._held.items() if held.n_bytes}
        for held in self._held.values():
            held.is_saved, held.saved_in, held.within = False, None, None
        self.most = self.alive

    def begin(self) -> tuple[int, int]:
        """What `end` needs to tell what happens from now on."""
        mark = self.alive, self.most
        self.most = self.alive
        return mark

    def end(self, mark: tuple[int, int]) -> tuple[int, int]:
        """Bytes alive now, and the most there were, less those there were at `begin`."""
        before, most_outside = mark
        most = self.most
        self.most = max(most, most_outside)
        return self.alive - before, most - before

    def note(self, x: Tensor, layer: str, given: bool = False) -> list[Held]:
        """Counts the storages of a tensor unless they are known; `given` ones were there before the batch."""
        try:
            return [self._note(storage, layer, given) for storage in storages(x)]
        except Exception:  # of torch or of the user's own kind of tensor; it must not reach the forward
            self.hidden[layer] = str(x.layout) if type(x) is Tensor else type(x).__name__
            return []

    def note_graph(self, x: Tensor, layer: str) -> None:
        """Counts a tensor as long as its graph is kept; without that it may be kept for its value."""
        if x.grad_fn is None:
            return
        with suppress(Exception):  # a node of the user's own kind
            token = Token()
            metadata: Any = x.grad_fn.metadata
            metadata[GRAPH] = token
            self._add(-id(token), token, layer, sum(storage.nbytes() for storage in storages(x)))

    def older(self) -> tuple[int, dict[str, int]]:
        """Bytes of earlier batches that are still alive, and how many by layer, of those with two or more."""
        old = [held for held in list(self._held.values()) if held.n_bytes and held.batch < self.batch]
        n_batches = Counter(layer for layer, _ in {(held.layer, held.batch) for held in old})
        by_layer: Counter[str] = Counter()
        for held in old:
            if n_batches[held.layer] > 1:
                by_layer[held.layer] += held.n_bytes
        return sum(held.n_bytes for held in old), dict(by_layer.most_common())

    def _note(self, storage: Any, layer: str, given: bool) -> Held:
        held = self._held.get(storage_id(storage))
        if held is None:
            held = self._add(storage_id(storage), storage, layer, 0 if given else storage.nbytes())
        return held

    def _add(self, key: int, target: Any, layer: str, n_bytes: int) -> Held:
        held = Held(layer, n_bytes, self.batch)
        held.ref = weakref.ref(target, partial(self._freed, key))
        self._held[key] = held
        self.alive += n_bytes
        self.most = max(self.most, self.alive)
        return held

    def _freed(self, key: int, _: Any) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.alive -= held.n_bytes

    def clear(self) -> None:
        """Forgets all."""
        self._held.clear()
        self.alive = self.most = 0


@dataclass(slots=True, eq=False)
class Call:
    """One call of a layer.

    Attributes:
        layer: its name.
        above: the call of the layer it was called in.
        inputs: the storages of its inputs.
        kept_before: bytes kept for the backward when it began.
        mark: what the meter needs at its end.
        ends: the inputs of a compiled layer, at which its graph ends.
        allocated, peak: bytes alive at its end, and the most, less those at its beginning.
        output_bytes: size of its outputs.
    """

    layer: str
    above: "Call | None"
    inputs: list[Held]
    kept_before: int
    mark: Any
    ends: list[Tensor] = field(default_factory=list)
    allocated: int = 0
    peak: int = 0
    output_bytes: int = 0

    def path(self) -> "list[Call]":
        """It and those it was called in, the outermost first."""
        return [*(self.above.path() if self.above else []), self]


def innermost_around(a: Call | None, b: Call | None) -> Call | None:
    """The innermost call that both are, or are in."""
    if a is None or b is None or a is b:
        return a if a is b else None
    both = [x for x, y in zip(a.path(), b.path(), strict=False) if x is y]
    return both[-1] if both else None
