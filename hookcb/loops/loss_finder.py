"""LossFinder: the losses that backwards are called on, before a GradScaler has scaled them."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.call_hook import CallHook, Observer
from hookcb.core.torch_private import RUN_BACKWARD, is_batched_gradient

SCALED = "hookcb_scaled"  # in the metadata of a node: the loss that a GradScaler has scaled, and the scaler
MAX_SINCE = 16  # nodes that are looked at for what a loop has done to a loss after it was scaled


class FoundLoss(NamedTuple):
    """The loss that a backward was called on.

    Attributes:
        value: the loss, a tensor of one element without its graph.
        node: its autograd node, whose saved tensors are freed but for what `graph.keep_saved` keeps.
    """

    value: Tensor
    node: Any


class Backward(NamedTuple):
    """A backward that is running.

    Attributes:
        roots: the tensors that it was called on.
        losses: these as they were before a GradScaler has scaled them.
        weights: the gradients with which it began, 1 where none was given.
        inputs: the tensors whose gradients it computes; all parameters if empty.
        scaler: the GradScaler that has scaled the roots, None if none has.
    """

    roots: tuple[Any, ...]
    losses: tuple[Any, ...]
    weights: tuple[Tensor, ...]
    inputs: tuple[Any, ...]
    scaler: GradScaler | None

    def trains(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether it computes gradients of one of these; one for inputs only trains nothing."""
        chosen = {id(x) for x in self.inputs}
        return not chosen or any(id(p) in chosen for p in params)

    def loss(self) -> FoundLoss | None:
        """Its loss, the weighted sum if there are several; None if one is not a real scalar."""
        if not all(map(is_real_scalar, self.losses)):
            return None
        if len(self.losses) == 1:
            return FoundLoss(self.losses[0].detach(), self.losses[0].grad_fn)
        if len({x.device for x in self.losses}) > 1 or any(map(is_batched_gradient, self.weights)):
            return None  # each of these weights gives a sum of its own
        with torch.enable_grad():  # for a node that leads to all losses
            stacked = torch.stack([x.reshape(()) for x in self.losses])
            node = stacked.sum().grad_fn
        weights = torch.stack([x.reshape(()) for x in self.weights])
        return FoundLoss((stacked.detach() * weights).sum(), node)


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
        self._has_scaled = False  # whether a GradScaler has scaled anything
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

    def _observe_scale(self, scaler: GradScaler, /, *args: Any, **kwargs: Any) -> Observer:
        scaled = yield
        outputs = next(iter((*args, *kwargs.values())), None)  # a subclass may name them in its own way
        for (_, to), (_, of) in zip(parts(scaled), parts(outputs), strict=False):
            if isinstance(to, Tensor) and to is not of and to.grad_fn is not None:
                metadata: Any = to.grad_fn.metadata
                metadata[SCALED] = of if of.numel() == 1 else None, scaler  # nothing large is kept
                self._has_scaled = True

    def _unscaled(self, root: Any) -> tuple[Any, GradScaler | None]:
        """A root of a backward as it was before it was scaled, and the GradScaler that did so."""
        if not self._has_scaled or not isinstance(root, Tensor):
            return root, None
        for node in graph.walk([root.grad_fn], at_most=MAX_SINCE, nearest_first=True):
            if (scaled := node.metadata.get(SCALED)) is not None:
                of, scaler = scaled
                is_whole = node is root.grad_fn and of is not None
                return (of if is_whole else _divided(root, scaler)), scaler
        return root, None

    def _observe_backward(
        self, roots: Any, weights: Any, keep: Any, create: Any, inputs: Any, /, *args: Any, **kwargs: Any
    ) -> Observer:
        found = [self._unscaled(x) for x in roots]
        scaler = next((by for _, by in found if by is not None), None)
        losses = tuple(x for x, _ in found)
        kept = graph.keep_saved(x.grad_fn for x in losses if is_real_scalar(x))
        self.running = Backward(roots, losses, weights, inputs, scaler)
        try:
            if self._begins is not None:
                self._begins(self.running)
            yield
        finally:
            graph.drop_saved(kept)
            self.running = None


def is_real_scalar(x: Any) -> bool:
    """Whether something is a tensor of one real number, as a loss is."""
    return isinstance(x, Tensor) and x.numel() == 1 and not x.is_complex()


def _divided(root: Tensor, scaler: GradScaler) -> Tensor:
    """A tensor made of scaled losses, such as a share or a sum, divided by the scale."""
    with torch.enable_grad():  # for a node
        return root / scaler.scale(torch.ones_like(root.detach()))


def first_parameter_behind(given: Any) -> Tensor | None:
    """A parameter from which the inputs of a model were computed, according to their graph, or None."""
    return next((leaf for leaf in graph.leaves(graph.roots(given)) if isinstance(leaf, nn.Parameter)), None)
