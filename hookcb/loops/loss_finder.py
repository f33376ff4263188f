"""LossFinder: the losses that backwards are called on, before a GradScaler has scaled them."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.weak import WeakIdKeyDictionary

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.call_hook import CallHook, Observer
from hookcb.core.torch_private import RUN_BACKWARD

SCALER = "hookcb.scaler"  # in the metadata of the node of a scaled loss: a reference to the GradScaler
MAX_NODES = 20  # between what a backward is called on and scaled losses, as where these are summed


class FoundLoss(NamedTuple):
    """The loss that a backward was called on.

    Attributes:
        value: the loss, a tensor of one element without its graph.
        node: its autograd node, whose saved tensors are freed.
    """

    value: Tensor
    node: Any


class Backward(NamedTuple):
    """A backward that is running.

    Attributes:
        roots: the tensors that it was called on, as they were before a GradScaler has scaled them.
        weights: the gradients with which it began, 1 where none was given.
        inputs: the tensors whose gradients it computes; all parameters if empty.
        scaler: the GradScaler that has scaled them, None if none has.
        is_scaled: whether roots are scaled still, as a sum of scaled losses is.
    """

    roots: tuple[Any, ...]
    weights: tuple[Tensor, ...]
    inputs: tuple[Any, ...]
    scaler: GradScaler | None
    is_scaled: bool = False

    def trains(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether it computes gradients of one of these; one for inputs only trains nothing."""
        chosen = {id(x) for x in self.inputs}
        return not chosen or any(id(p) in chosen for p in params)

    def loss(self) -> FoundLoss | None:
        """Its loss, the weighted sum if there are several; None if one is not a scalar."""
        if not all(isinstance(x, Tensor) and x.numel() == 1 for x in self.roots):
            return None
        if len({x.device for x in self.roots}) > 1:
            return None
        value, node = self.roots[0].detach(), self.roots[0].grad_fn
        if len(self.roots) > 1:
            with torch.enable_grad():  # for a node that leads to all losses
                losses = torch.stack([x.reshape(()) for x in self.roots])
                node = losses.sum().grad_fn
            value = (losses.detach() * torch.stack([x.reshape(()) for x in self.weights])).sum()
        if self.scaler is not None and self.is_scaled:  # exact if the scale is a power of two, as by default
            value = value / self.scaler.scale(torch.ones_like(value))
        return FoundLoss(value, node)


class LossFinder:
    """Sees the backwards that the current thread begins, until it is removed.

    A backward inside of another one, such as that of activation checkpointing, is part of it.

    Args:
        failed: called with an exception of this class, which is not raised into the backward.
        begins: called when a backward begins.
        in_forks: whether to go on in processes that are forked from this one.

    Attributes:
        running: the backward in progress, None outside of backwards.
    """

    def __init__(
        self,
        failed: Callable[[Exception], object],
        begins: Callable[[Backward], object] | None = None,
        in_forks: bool = False,
    ) -> None:
        self.running: Backward | None = None
        self._failed, self._begins, self._in_forks = failed, begins, in_forks
        self._unscaled: Any = WeakIdKeyDictionary()  # from scaled losses to the loss, and its GradScaler
        self._scalers: set[type] = set()
        self._hooks: list[CallHook] = []
        self._observe(torch.autograd, RUN_BACKWARD, self._observe_backward, nested=False)
        self._observe(GradScaler, "__init__", self._observe_scaler, all_threads=True)
        self._follow_scalers(GradScaler)

    def remove(self) -> None:
        """Leaves torch as it was; a second time does nothing."""
        while self._hooks:
            self._hooks.pop().remove()
        self.running = None

    def _observe(self, holder: Any, name: str, observer: Any, **options: Any) -> None:
        self._hooks.append(CallHook(holder, name, observer, self._failed, in_forks=self._in_forks, **options))

    def _follow_scalers(self, kind: type[Any]) -> None:
        """Sees what GradScalers of a class scale, and those of its subclasses that do it in their own way."""
        if "scale" in vars(kind) and kind not in self._scalers:
            self._scalers.add(kind)
            self._observe(kind, "scale", self._observe_scale, all_threads=True)
        for subclass in kind.__subclasses__():
            self._follow_scalers(subclass)

    def _observe_scaler(self, scaler: GradScaler, /, *args: Any, **kwargs: Any) -> Observer:
        self._follow_scalers(GradScaler)  # its class may be new
        yield

    def _observe_scale(self, scaler: GradScaler, /, outputs: Any) -> Observer:
        scaled = yield
        for (_, to), (_, of) in zip(parts(scaled), parts(outputs), strict=False):
            if isinstance(to, Tensor) and to is not of:
                self._unscaled[to] = of, scaler
                if to.grad_fn is not None:
                    metadata: Any = to.grad_fn.metadata  # a property, despite its type
                    metadata[SCALER] = ref(scaler)

    def _observe_backward(
        self, roots: Any, weights: Any, keep: Any, create: Any, inputs: Any, /, *args: Any, **kwargs: Any
    ) -> Observer:
        found = [self._unscaled.get(x, (x, None)) if isinstance(x, Tensor) else (x, None) for x in roots]
        scaler = next((by for _, by in found if by is not None), None)
        behind = None if scaler is not None else _scaler_behind(roots)
        self.running = Backward(
            tuple(x for x, _ in found), weights, inputs, scaler or behind, behind is not None
        )
        try:
            if self._begins is not None:
                self._begins(self.running)
            yield
        finally:
            self.running = None


def _scaler_behind(roots: Iterable[Any]) -> GradScaler | None:
    near = graph.walk(graph.roots(roots), at_most=MAX_NODES, nearest_first=True)
    marks = (node.metadata[SCALER]() for node in near if SCALER in node.metadata)
    return next((x for x in marks if x is not None), None)


def first_parameter_behind(given: Any) -> Tensor | None:
    """A parameter from which the inputs of a model were computed, according to their graph, or None."""
    return next((leaf for leaf in graph.leaves(graph.roots(given)) if isinstance(leaf, nn.Parameter)), None)
