"""Gradients of a module's inputs and outputs, followed from each of its calls into the backward pass."""

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from hookcb.core.batch import is_container, map_leaves, parts
from hookcb.core.torch_private import (
    after_backward,
    is_transform_tensor,
    is_view,
    running_node,
    sequence_nr,
    version_of,
    will_run,
)
from hookcb.hooks.own import register
from hookcb.hooks.taps import HookLike, Tap, check_gradient

Edge = tuple[Node, int]  # a node of the graph, and which of its outputs
Targets = dict[Edge, list[int]]
Edges = list[tuple[int, list[int]]]  # index and slots of each edge of a node

CHANGED_INPUT = "the layer changes in place an input that is a view, which hides the gradient of that input"
CHANGED_OUTPUT = "its output is a view, and a later layer that changes it in place hides its gradient"
NO_GRADIENT_CAME = "its output received no gradient"
NO_GRADIENT = "its output needs no gradient"
FUNCTORCH = "it was called under torch.func, where gradients cannot be followed"


class GradientWatch:
    """Follows each call of a module from its forward to the gradients of its inputs and outputs.

    It does not use `register_full_backward_hook`, which raises if a later layer changes the output in place
    (pytorch#61519) and sees no output inside a dict (pytorch#87540). Hooks on the outputs, and on the graph
    nodes that pass gradients to the inputs, leave forward and graph unchanged.
    """

    def __init__(self, hook: HookLike, outputs_only: bool) -> None:
        self.hook, self.outputs_only = hook, outputs_only
        self.local = _Local()
        self.leaves: Any = WeakTensorKeyDictionary()  # outputs of the module, each with its listener

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called before the forward, which may change its inputs in place."""
        call = _Call(self, module) if self.hook.gate() else None
        if call is not None:
            call.take_inputs(args, kwargs)
        self.local.running.append(call)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Called after the forward; if that raised, `output` is None."""
        if self.outputs_only:
            call = _Call(self, module) if self.hook.gate() else None
        else:  # a hook attached in the middle of the forward has not seen it begin
            call = self.local.running.pop() if self.local.running else None
        if call is not None:
            call.take_outputs(output)

    def on_leaf(self, x: Tensor, arrive: Callable[[Tensor], Any]) -> None:
        """Calls `arrive` with the gradient of a leaf, instead of the function of an earlier call.

        A hook on a leaf outlives the graph, so one hook stays until this is closed.
        """
        if x not in self.leaves:
            waiting: list[Callable[[Tensor], Any]] = []
            handle = register(x.register_hook, lambda grad: waiting[0](grad))
            self.leaves[x] = waiting, handle
        self.leaves[x][0][:] = [arrive]

    def close(self) -> None:
        """Stops waiting for gradients."""
        for _, handle in self.leaves.values():
            handle.remove()
        self.leaves.clear()


class _Local(threading.local):
    """Running calls of a module in this thread, the innermost last."""

    def __init__(self) -> None:
        self.running: list[_Call | None] = []


class _Slot:
    """Placeholder in a structure for the gradient of the i-th tensor."""

    def __init__(self, i: int) -> None:
        self.i = i


class _Call:
    """One call of a module, and its gradients so far."""

    def __init__(self, watch: GradientWatch, module: nn.Module) -> None:
        self.watch, self.hook, self.module = watch, watch.hook, module
        self.tensors: list[Tensor] = []  # tensors that need a gradient, by slot; released after the forward
        self.seen: list[Any] = []  # inputs, keyword inputs, outputs: each with slots for tensors
        self.targets: Targets = {}  # edges that the gradients of inputs pass, with slots
        self.versions: list[int] = []
        self.grads: dict[int, Tensor] = {}
        self.n_awaited = self.n_left = 0
        self.call: tuple[int, int] | None = None  # identifies the call
        self.time = 0  # orders calls

    # ---- the forward

    def take_inputs(self, args: Any, kwargs: Any) -> None:
        """Notes the edges that the gradients of the inputs will pass."""
        self.seen = [self._slotted(args), self._slotted(kwargs)]
        self.versions = [version_of(x) for x in self.tensors]
        for slot, x in enumerate(self.tensors):
            self.targets.setdefault(_edge(x), []).append(slot)

    def take_outputs(self, output: Any) -> None:
        """Registers hooks where the gradients will pass."""
        hook, n_inputs = self.hook, len(self.tensors)
        self.seen.append(self._slotted(output if isinstance(output, tuple | list) else (output,)))
        inputs, outputs = self.tensors[:n_inputs], self.tensors[n_inputs:]
        self.tensors = []
        recomputing_for = running_node()  # under activation checkpointing
        if not outputs:
            hook.n_without_graph += recomputing_for is None
            hook.why_silent = FUNCTORCH if any(map(_is_wrapped, _leaves(output))) else NO_GRADIENT
            return
        has_view = any(is_view(x) for x in outputs)
        hook.why_silent = CHANGED_OUTPUT if has_view else NO_GRADIENT_CAME
        made_by = recomputing_for or outputs[0].grad_fn
        self.time = sequence_nr(made_by) if made_by else 0
        if recomputing_for is None or hook.n_without_graph:
            self.call = hook.next_call(self.time)
            hook.n_without_graph -= recomputing_for is not None
        # else the first forward had a graph that receives the gradients: this one counts only if it does too
        reached = self._await_inputs(outputs)
        for slot, x in enumerate(outputs, start=n_inputs):
            reached.update(self._await_output(x, slot))
        for slot, x in enumerate(inputs):
            if slot not in reached and version_of(x) != self.versions[slot]:
                hook.without_grad = CHANGED_INPUT
        self.targets = {}

    def _slotted(self, item: Any) -> Any:
        def slot(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.requires_grad or _is_wrapped(x):
                return None
            self.tensors.append(x)
            return _Slot(len(self.tensors) - 1)

        return map_leaves(slot, item, lambda x: not is_container(x))

    def _await_output(self, x: Tensor, slot: int) -> list[int]:
        """Waits for the gradient of an output; returns the slots of inputs that are this same tensor."""
        same = self.targets.get(_edge(x), [])
        arrive: Callable[[Tensor], Tensor | None]
        if self.hook.modify and (self.watch.outputs_only or same):
            arrive = partial(self._replaced, [*same, slot])
        else:
            self._await()
            arrive = partial(self._arrive_at, [slot, *same])
        if x.grad_fn is None:
            self.watch.on_leaf(x, arrive)
        else:
            register(x.register_hook, arrive)
        return same

    def _await_inputs(self, outputs: list[Tensor]) -> set[int]:
        """Waits at the nodes that pass gradients to inputs; returns the slots of inputs with such a node."""
        places = list(_consumers(outputs, self.targets))
        nodes: dict[int, list[Node]] = {}  # by slot
        for node, edges in places:
            for _, slots in edges:
                nodes.setdefault(slots[0], []).append(node)
        held = _Held({slot: of_slot for slot, of_slot in nodes.items() if len(of_slot) > 1})
        for node, edges in places:
            if self.hook.modify:
                node.register_hook(partial(self._replace_at, edges, held))
            else:
                self._await()
                node.register_hook(partial(self._pass, edges))
        return {slot for _, edges in places for _, slots in edges for slot in slots}

    def _await(self) -> None:
        self.n_awaited += 1
        self.n_left = self.n_awaited

    # ---- the backward

    def _arrive_at(self, slots: list[int], grad: Tensor) -> None:
        self._arrive((slot, grad) for slot in slots)

    def _pass(self, edges: Edges, grad_inputs: tuple[Tensor | None, ...], _: Any) -> None:
        self._arrive((slot, grad_inputs[i]) for i, slots in edges for slot in slots)

    def _arrive(self, grads: Iterable[tuple[int, Tensor | None]]) -> None:
        if self.n_left == self.n_awaited and (self.n_awaited > 1 or self.hook.modify):
            # an output that the loss does not use gets no gradient, so the end of the backward ends the wait
            after_backward(self._finish)
        for slot, grad in grads:
            if grad is not None:
                self.grads[slot] = self.grads[slot] + grad if slot in self.grads else grad
        self.n_left -= 1
        if self.n_left == 0 and not self.hook.modify:
            self._finish()

    def _finish(self) -> None:
        grads, self.grads, self.n_left = self.grads, {}, self.n_awaited
        if grads and not self.hook.modify and not self.hook.removed:
            self._tell(grads)

    def _replace_at(
        self, edges: Edges, held: "_Held", grad_inputs: tuple[Tensor | None, ...], _: Any
    ) -> tuple[Tensor | None, ...]:
        new = list(grad_inputs)
        for i, slots in edges:
            whole = held.add(slots[0], new[i])
            part = new[i]
            if part is not None:
                new[i] = torch.zeros_like(part) if whole is None else self._replaced(slots, whole)
        return tuple(new)

    def _replaced(self, slots: list[int], grad: Tensor) -> Tensor:
        """The hook function's replacement for a gradient; `grad` itself if the function returns None."""
        if self.hook.removed:
            return grad
        new = self._tell({**self.grads, **dict.fromkeys(slots, grad)})
        if new is not None and not isinstance(new, Tensor):
            new = self._picked(new, slots[0])
        if new is None:
            return grad
        check_gradient(self.hook, new, grad)
        return new  # type: ignore[no-any-return]  # a tensor, as was checked

    def _tell(self, grads: dict[int, Tensor]) -> Any:
        """Calls the hook with inputs and outputs, in which gradients stand in place of tensors."""
        given = map_leaves(
            lambda x: grads.get(x.i) if isinstance(x, _Slot) else x, self.seen, lambda x: isinstance(x, _Slot)
        )
        if len(given) == 3 and not self.hook.with_kwargs:
            del given[1]
        self.call = self.call or self.hook.next_call(self.time)
        return self.hook.call(self.module, tuple(given), self.call)

    def _picked(self, new: Any, slot: int) -> Any:
        """The gradient in a slot of the hook function's result."""
        places = self.seen[:2] if len(self.seen) == 3 and self.hook.with_kwargs else self.seen[0]
        slots, grads = _leaves(places), _leaves(new)
        if len(slots) != len(grads):
            raise ValueError(
                f"{self.hook.title} returned {len(grads)} gradients, expected {len(slots)}; "
                "return a tensor, or one gradient for each, None for those to keep"
            )
        places_and_grads = zip(slots, grads, strict=True)
        return next(g for place, g in places_and_grads if isinstance(place, _Slot) and place.i == slot)


class _Held:
    """Sums of gradients that several nodes contribute to, until the last has run."""

    def __init__(self, nodes: dict[int, list[Node]]) -> None:
        self.nodes = nodes
        self.sums: dict[int, Tensor | None] = {}
        self.n_left: dict[int, int] = {}

    def add(self, slot: int, part: Tensor | None) -> Tensor | None:
        """The whole gradient when the last part has been added; None before."""
        if slot not in self.nodes:
            return part
        if not self.n_left.get(slot):
            coming = map(will_run, self.nodes[slot])
            self.n_left[slot], self.sums[slot] = sum(coming), None
        total = self.sums[slot]
        if part is not None:
            self.sums[slot] = part if total is None else total + part
        self.n_left[slot] -= 1
        return self.sums.pop(slot) if self.n_left[slot] == 0 else None


def _consumers(outputs: list[Tensor], targets: Targets) -> Iterator[tuple[Node, Edges]]:
    """Nodes between `outputs` and `targets` that pass gradients to a target, with the edges."""
    if not targets:
        return
    seen = {node for node, _ in targets}  # nodes beyond them belong to other calls
    todo = [x.grad_fn for x in outputs]
    while todo:  # as in graph.walk, which would read next_functions twice, in each call of a module
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        edges = []
        for i, (after, nr) in enumerate(node.next_functions):
            if after is not None:
                if slots := targets.get((after, nr)):
                    edges.append((i, slots))
                todo.append(after)
        if edges:
            yield node, edges


def _edge(x: Tensor) -> Edge:
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


def _leaves(item: Any) -> list[Any]:
    return [x for _, x in parts(item)]


def _is_wrapped(x: Any) -> bool:
    return isinstance(x, Tensor) and is_transform_tensor(x)


class EnterTap(Tap):
    """Forward pre-hook of a module: notes the edges that the gradients of its inputs will pass."""

    def __init__(self, hook: HookLike | None = None, watch: "GradientWatch | None" = None) -> None:
        super().__init__(hook)
        self.watch = watch

    def __call__(self, module: nn.Module, *seen: Any) -> Any:
        """Called with positional and keyword inputs."""
        return self.watch.enter(module, *seen) if self.hook is not None and self.watch else None

    def close(self) -> None:
        """Detaches it from its hook."""
        if self.watch is not None:
            self.watch.close()
        self.hook = self.watch = None


class LeaveTap(EnterTap):
    """Forward hook of a module: follows the gradients of its outputs."""

    def __call__(self, module: nn.Module, *seen: Any) -> None:
        """Called with positional and keyword inputs and the output."""
        if self.hook is not None and self.watch:
            self.watch.leave(module, *seen)


@cache  # not at import: torch._dynamo takes a second
def keep_gradient_taps_out_of_graphs() -> None:
    """Makes torch.compile break its graph at these taps, because hooks on tensors cannot be traced."""
    for tap in (EnterTap, LeaveTap):
        tap.__call__ = torch.compiler.disable(tap.__call__)  # type: ignore[method-assign, no-untyped-call]
