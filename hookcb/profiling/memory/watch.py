"""MemoryWatch: memory of each call of a layer during a forward."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from hookcb.core.torch_private import compiled_call, parameters_of
from hookcb.hooks.compiled import CompiledTap
from hookcb.hooks.hook import Hooks
from hookcb.hooks.modules import outermost_compiled, unwrapped
from hookcb.profiling.memory.allocator import Allocator, Meter
from hookcb.profiling.memory.ledger import LOSS, OUTSIDE, Call, Ledger, LiveStorage, innermost_around
from hookcb.profiling.memory.saved_tensors import SavedTensors
from hookcb.profiling.memory.sizes import n_bytes, tensors_in

COMPILED = "compiled"


@dataclass(slots=True)
class Forward:
    """Memory of the forward and the loss of a batch.

    Attributes:
        calls: calls of layers, in the order in which they began.
        saved: storages kept by the graph, in the order in which they were saved.
        kept: bytes of these storages.
        n_before_loss: number of storages saved before the model's forward ended.
        kept_by_loss: bytes of the storages that the loss saved first.
        peak: peak of the bytes alive, above those at the beginning.
        other_hooks: name of foreign hooks on saved tensors, by layer that ran under them; only the outermost
            of nested layers.
        why_unknown: reason why the kept bytes are unknown, else empty.
        allocated_before: bytes allocated by CUDA's allocator before; None without CUDA.
        old_bytes: bytes of earlier watched batches that are still alive after it.
        stays: these bytes by the layer that made them.
        hidden: type or layout of tensors whose memory is unknown, by layer.
        compiled: names of the compiled layers.
    """

    calls: list[Call] = field(default_factory=list)
    saved: list[LiveStorage] = field(default_factory=list)
    kept: int = 0
    n_before_loss: int = 0
    kept_by_loss: int = 0
    peak: int = 0
    other_hooks: dict[str, str] = field(default_factory=dict)
    why_unknown: str = ""
    allocated_before: int | None = None
    old_bytes: int = 0
    stays: dict[str, int] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)
    compiled: tuple[str, ...] = ()


class MemoryWatch:
    """Hooks on the layers of a model and on the tensors it saves, for one forward at a time.

    A compiled module counts as one layer: there are no hooks inside, which would trigger a compilation, and
    the tensors that its graph keeps are read from the graph.

    Args:
        layers: layers by name, in order.
        is_open: called at each call of a layer, which does not count if it returns False.

    Attributes:
        ledger: the live storages.
        seen: memory of a forward that has ended, until `take`.
        inside: layers inside compiled ones, with the reason why they are not called.
    """

    def __init__(self, layers: Mapping[str, nn.Module], is_open: Callable[[], bool]) -> None:
        # weak, as the model may be freed before this
        self.layers, self.is_open = WeakValueDictionary(layers), is_open
        self.ledger = Ledger()
        self.seen: Forward | None = None
        self.inside: dict[str, str] = {}
        self._forward: Forward | None = None  # the one in progress
        self._saved = SavedTensors(self._see)
        self._names: dict[int, str] = {}
        self._model = ""  # class of the model
        self._running: list[Call] = []
        self._hooks: list[Hooks | CompiledTap] = []
        self._where = OUTSIDE
        self._meter: Meter = self.ledger
        self._mark: Any = None

    # ---- from the beginning of the forward to the loss

    def begin(self, model: nn.Module, given: object, is_called: bool = False) -> None:
        """Adds the hooks; `given` contains the tensors of the batch.

        If the model `is_called` already, its own hooks are too late for its beginning.
        """
        self.drop()
        state = [*model.parameters(), *model.buffers()]
        allocator = Allocator.for_tensors(state)
        forward, self._where, self._meter = Forward(), OUTSIDE, allocator or self.ledger
        forward.allocated_before = allocator.counts()[0] if allocator else None
        self.ledger.begin_batch()
        self._give([*state, *tensors_in(given)])
        try:
            self._attach(model, forward)
            forward.why_unknown = self._saved.start()
        except BaseException:
            self.drop()
            raise
        self._forward, self._mark = forward, self._meter.begin()
        if is_called and id(model) in self._names and compiled_call(model) is None:
            self.enter(model, given, {})

    def begin_loss(self, given: object) -> None:
        """Attributes tensors saved from now on to the loss; `given` contains the targets."""
        if self._forward is not None:
            self._where, self._forward.n_before_loss = LOSS, len(self._forward.saved)
            self._give(tensors_in(given))

    def end(self, loss: object) -> None:
        """Removes the hooks and sets `seen`; the graph of `loss` is tracked until it is freed."""
        forward = self._forward
        if forward is None:
            return
        self._detach()
        _, forward.peak = self._meter.end(self._mark)
        of_loss = [live for live in forward.saved[forward.n_before_loss :] if live.saved_in is None]
        forward.saved = _alive(forward.saved)  # a graph may have been freed meanwhile
        forward.kept = sum(live.n_bytes for live in forward.saved)
        forward.kept_by_loss = sum(live.n_bytes for live in _alive(of_loss))
        forward.old_bytes, forward.stays = self.ledger.older()
        forward.hidden = dict(self.ledger.hidden)
        for x in tensors_in(loss):
            self.ledger.note_graph(x, LOSS)
        self.seen = forward

    def take(self) -> Forward | None:
        """Returns `seen` and forgets it."""
        seen = self.seen
        self.drop()
        return seen

    def drop(self) -> None:
        """Removes the hooks and forgets the batch; does nothing the second time."""
        self._detach()
        self.seen = None

    def close(self) -> None:
        """Removes the hooks and forgets everything."""
        self.drop()
        self.ledger.clear()

    def _give(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            self.ledger.note(x, OUTSIDE, given=True)

    # ---- hooks

    def _attach(self, model: nn.Module, forward: Forward) -> None:
        self._model, compiled = type(unwrapped(model)).__name__, outermost_compiled(model)
        inside = {id(m): name for name, outer in compiled.items() for m in outer.modules()}
        forward.compiled = tuple(compiled)
        self.inside = {
            name: f"it is inside {inside[id(m)] or self._model}, which is compiled"
            for name, m in self.layers.items()
            if id(m) in inside and name not in compiled
        }
        # always with the model, because its inputs existed before
        layers = {"": unwrapped(model), **self.layers}
        plain = {
            name: m
            for name, m in layers.items()
            if id(m) not in inside and not isinstance(m, torch.jit.ScriptModule)
        }
        self._names = {id(m): name for name, m in (plain | compiled).items()}
        in_place = [m for m in compiled.values() if compiled_call(m) is not None]
        hooked = {name: m for name, m in (plain | compiled).items() if compiled_call(m) is None}
        enter = {"pre": True, "with_kwargs": True}
        leave = {"prepend": True, "always_call": True}  # before other hooks, which may allocate
        self._hooks += [Hooks(hooked, self.enter, detach=False, gate=self.acts, **enter)]
        self._hooks += [Hooks(hooked, self.leave, detach=False, gate=self.acts, **leave)]
        self._hooks += [
            CompiledTap(m, partial(self.enter, m), partial(self.leave, m, ()), gate=self.acts)
            for m in in_place
        ]

    def _detach(self) -> None:
        self._forward = None
        self._saved.stop()
        for hooks in self._hooks:
            hooks.remove()
        self._running, self._hooks, self._names = [], [], {}

    def acts(self) -> bool:
        """Whether calls count now; not while torch.compile traces, so that it leaves this code out."""
        return not torch.compiler.is_compiling() and self._forward is not None and self.is_open()

    def enter(self, m: nn.Module, args: Any, kwargs: Any) -> None:
        """Begins a call of a layer."""
        forward = self._forward
        if forward is None or id(m) not in self._names:  # a replica of DataParallel
            return
        inputs, above = tensors_in((args, kwargs)), self._running[-1] if self._running else None
        # FSDP has replaced the parameters by whole ones
        self._give(p for p in parameters_of(m).values() if p is not None)
        if above is None and not self._names[id(m)]:  # the model; callbacks may have changed its batch
            self._give(inputs)
        noted = [live for x in inputs for live in self._note(x, self._label(above))]
        call = Call(self._names[id(m)], above, noted, forward.kept, self._meter.begin())
        forward.calls.append(call)
        self._running.append(call)
        if call.layer in forward.compiled:
            self._saved.step_aside(COMPILED)
            call.ends = inputs
        other = self._saved.other_hooks()
        if other and (above is None or self._label(above) not in forward.other_hooks):
            forward.other_hooks[self._label(call)] = other

    def leave(self, m: nn.Module, args: Any, output: Any) -> None:
        """Ends a call of a layer; `output` is None if it raised."""
        forward, layer = self._forward, self._names.get(id(m))
        call = next((call for call in reversed(self._running) if call.layer == layer), None)
        if forward is None or call is None:  # a hook before ours raised, for example
            return
        outputs = tensors_in(output)
        if call.layer in forward.compiled:
            self._saved.see_graph(outputs, call.ends)
            self._saved.step_back(COMPILED)
            call.ends = []
        for x in outputs:
            self.ledger.note(x, self._label(call))
            with suppress(Exception):  # the ledger has noted that its memory is hidden
                call.output_bytes += n_bytes(x)
        done = None
        while done is not call:
            done = self._running.pop()
            done.allocated, done.peak = self._meter.end(done.mark)

    def _see(self, x: Tensor) -> str:
        call = self._running[-1] if self._running else None
        layer = self._label(call)
        if self._forward is not None:
            for live in self._note(x, layer):
                self._keep(self._forward, live, call)
        return layer

    def _note(self, x: Tensor, layer: str) -> list[LiveStorage]:
        """Storages of a tensor, without those that existed before this batch."""
        noted = self.ledger.note(x, layer)
        return [live for live in noted if live.n_bytes and live.batch == self.ledger.batch]

    def _keep(self, forward: Forward, live: LiveStorage, call: Call | None) -> None:
        if live.is_saved:
            live.within = innermost_around(live.within, call)
            return
        live.is_saved, live.saved_in, live.within = True, call, call
        forward.saved.append(live)
        forward.kept += live.n_bytes

    def _label(self, call: Call | None) -> str:
        """Name of the layer of a call; for the whole model, its class."""
        if call is None:
            return self._where
        return call.layer or self._model


def _alive(storages: Iterable[LiveStorage]) -> list[LiveStorage]:
    return [storage for storage in storages if storage.ref() is not None]
