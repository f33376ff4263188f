"""Gradients of a module's inputs and outputs, followed from each of its calls into the backward pass."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

from hookcb.batch import is_container, map_leaves, parts

if TYPE_CHECKING:
    from hookcb.hooks import Hook

Edge = tuple[Node, int]  # a node of the graph, and which of its outputs
Targets = dict[Edge, list[int]]

CHANGED_INPUT = "the layer changes in place an input that is a view, which hides the gradient of that input"
CHANGED_OUTPUT = "its output is a view, and where a later layer changes it in place its gradient is hidden"
NO_GRADIENT_CAME = "no gradient has come to its output"
NO_GRADIENT = "its output needs no gradient"
FUNCTORCH = "it was called under torch.func, where gradients cannot be followed"


class GradientWatch:
    """Follows each call of a module from its forward to the gradients of its inputs and outputs.

    Not by `register_full_backward_hook`, which raises where a later layer changes the output in place
    (pytorch#61519) and sees no output inside a dict (pytorch#87540). Hooks on the outputs and on the nodes
    of the graph that hand gradients on to the inputs leave forward and graph as they are.
    """

    def __init__(self, hook: "Hook", outputs_only: bool) -> None:
        self.hook, self.outputs_only = hook, outputs_only
        self.running: list[_Call | None] = []  # whose forward is running, the innermost last

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward; gives inputs in place of these where their gradients may be replaced."""
        call = _Call(self.hook, module) if self.hook.is_open() else None
        self.running.append(call)
        if call is not None and self.hook.modify:
            return call.take_aliases(args, kwargs)
        if call is not None:
            call.take_inputs(args, kwargs)
        return None

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After the forward; also where it has raised, then `output` is None."""
        if self.outputs_only:
            call = _Call(self.hook, module) if self.hook.is_open() else None
        else:  # attached in the middle of the forward, it has not seen it begin
            call = self.running.pop() if self.running else None
        if call is not None:
            call.take_outputs(output, self.outputs_only)


class _Slot:
    """Where in a structure the gradient of the i-th tensor belongs."""

    def __init__(self, i: int) -> None:
        self.i = i


class _Call:
    """One call of a module, and the gradients that have come of it."""

    def __init__(self, hook: "Hook", module: nn.Module) -> None:
        self.hook, self.module, self.k = hook, module, 0
        self.tensors: list[Tensor] = []  # that need a gradient, by slot; let go of when the forward is over
        self.seen: list[Any] = []  # inputs, keyword inputs, outputs: each with slots for such tensors
        self.targets: Targets = {}  # where inputs get their gradients, with slots
        self.versions: list[int] = []
        self.grads: dict[int, Tensor] = {}
        self.n_awaited = self.n_left = 0

    # ---- the forward

    def take_inputs(self, args: Any, kwargs: Any) -> None:
        """Before the forward, which may change them in place."""
        self.seen = [self._slotted(args), self._slotted(kwargs)]
        self.versions = [x._version for x in self.tensors]
        for slot, x in enumerate(self.tensors):
            self.targets.setdefault(_edge(x), []).append(slot)

    def take_aliases(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before the forward, gives views of the inputs: what passes a view is of this call alone."""
        self.seen = [self._slotted(args), self._slotted(kwargs)]
        aliases: dict[int, Tensor] = {}  # one tensor given twice stays one, as in self-attention
        for slot, x in enumerate(self.tensors):
            if id(x) not in aliases and x.layout is torch.strided and torch.is_grad_enabled():
                aliases[id(x)] = x.view_as(x)
                aliases[id(x)].register_hook(self._replacing(slot))  # type: ignore[no-untyped-call]
        self.versions = [x._version for x in self.tensors]
        swapped = map_leaves(lambda x: aliases.get(id(x), x), (args, kwargs), lambda x: isinstance(x, Tensor))
        return swapped[0], swapped[1]

    def take_outputs(self, output: Any, outputs_only: bool) -> None:
        """After the forward: finds where the gradients will pass, and waits there."""
        hook, inputs = self.hook, self.tensors
        hook.called = True
        self.tensors = inputs[:]
        self.seen.append(self._slotted(output if isinstance(output, tuple | list) else (output,)))
        outputs = dict(enumerate(self.tensors))
        for slot in range(len(inputs)):
            del outputs[slot]
        self.tensors = []
        if not outputs:
            hook.why_silent = FUNCTORCH if any(map(_is_wrapped, _leaves(output))) else NO_GRADIENT
            return
        is_view = any(x._is_view() for x in outputs.values())
        hook.why_silent = CHANGED_OUTPUT if is_view else NO_GRADIENT_CAME
        self.k = hook.next_call()
        reached: set[int] = set() if hook.modify else self._await_inputs(list(outputs.values()))
        for slot, x in outputs.items():
            if hook.modify and outputs_only:
                x.register_hook(self._replacing(slot))  # type: ignore[no-untyped-call]
            else:
                same = self.targets.get(_edge(x), [])  # an input that was handed through
                reached.update(same)
                self._await_output(x, [slot, *same])
        self._explain(inputs, reached)
        self.targets = {}

    def _slotted(self, item: Any) -> Any:
        def slot(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.requires_grad or _is_wrapped(x):
                return None
            self.tensors.append(x)
            return _Slot(len(self.tensors) - 1)

        return map_leaves(slot, item, lambda x: not is_container(x))

    def _await_output(self, x: Tensor, slots: list[int]) -> None:
        self._await()
        if x.grad_fn is None:  # a tensor hook on a leaf would outlive this graph
            _edge(x)[0].register_prehook(lambda grads: self._arrive((s, grads[0]) for s in slots))
        else:
            x.register_hook(lambda grad: self._arrive((s, grad) for s in slots))  # type: ignore[no-untyped-call]

    def _await_inputs(self, outputs: list[Tensor]) -> set[int]:
        reached: set[int] = set()
        for node, slots in _consumers(outputs, self.targets):
            self._await()
            reached.update(slot for _, slot in slots)
            node.register_hook(self._at_node(slots))
        return reached

    def _at_node(self, slots: list[tuple[int, int]]) -> Callable[[Any, Any], None]:
        def arrive(grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any) -> None:
            self._arrive((slot, grad_inputs[i]) for i, slot in slots)

        return arrive

    def _await(self) -> None:
        self.n_awaited += 1
        self.n_left = self.n_awaited

    def _explain(self, inputs: list[Tensor], reached: set[int]) -> None:
        for slot, x in enumerate(inputs):
            if slot not in reached and x._version != self.versions[slot]:
                self.hook.without_grad = CHANGED_INPUT

    # ---- the backward

    def _arrive(self, grads: Iterable[tuple[int, Tensor | None]]) -> None:
        if self.n_left == self.n_awaited and (self.n_awaited > 1 or self.hook.modify):
            # an output that the loss does not use gets no gradient: the end of the backward ends the wait
            Variable._execution_engine.queue_callback(self._finish)
        for slot, grad in grads:
            if grad is not None:
                self.grads[slot] = self.grads[slot] + grad if slot in self.grads else grad
        self.n_left -= 1
        if self.n_left == 0 and not self.hook.modify:
            self._finish()

    def _finish(self) -> None:
        grads, self.grads, self.n_left = self.grads, {}, self.n_awaited
        if grads and not self.hook.modify and not self.hook.removed:
            self.hook.call(self.module, self._given(grads), self.k)

    def _replacing(self, slot: int) -> Callable[[Tensor], Tensor | None]:
        def replace(grad: Tensor) -> Tensor | None:
            if self.hook.removed:
                return None
            new = self.hook.call(self.module, self._given({**self.grads, slot: grad}), self.k)
            return new if new is None or isinstance(new, Tensor) else self._picked(new, slot)

        return replace

    def _given(self, grads: dict[int, Tensor]) -> tuple[Any, ...]:
        """What the hook function is given: its structures, with gradients in their slots."""
        given = map_leaves(
            lambda x: grads.get(x.i) if isinstance(x, _Slot) else x, self.seen, lambda x: isinstance(x, _Slot)
        )
        if len(given) == 3 and not self.hook.with_kwargs:
            del given[1]
        return tuple(given)

    def _picked(self, new: Any, slot: int) -> Tensor | None:
        """The gradient in that slot of what the hook function has returned."""
        places = self.seen[:2] if len(self.seen) == 3 and self.hook.with_kwargs else self.seen[0]
        slots, grads = _leaves(places), _leaves(new)
        if len(slots) != len(grads):
            raise ValueError(
                f"{self.hook.title} returned {len(grads)} gradients where {len(slots)} are possible; "
                "return a tensor, or as many gradients as there were, None for those to be left"
            )
        picked: Tensor | None = next(
            g for place, g in zip(slots, grads, strict=True) if isinstance(place, _Slot) and place.i == slot
        )
        return picked


def _consumers(outputs: list[Tensor], targets: Targets) -> Iterator[tuple[Node, list[tuple[int, int]]]]:
    """The nodes between `outputs` and `targets` that hand on to a target, each with (index, slot)."""
    if not targets:
        return
    seen = {node for node, _ in targets}  # what lies behind them is not of this call
    todo = [x.grad_fn for x in outputs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        slots = []
        for i, (after, nr) in enumerate(node.next_functions):
            if after is not None:
                slots += [(i, slot) for slot in targets.get((after, nr), ())]
                todo.append(after)
        if slots:
            yield node, slots


def _edge(x: Tensor) -> Edge:
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


def _leaves(item: Any) -> list[Any]:
    return [x for _, x in parts(item)]


def _is_wrapped(x: Any) -> bool:
    return isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)
