"""The loss of a backward in progress, found on the stack of the thread that has called it."""

import gc
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.threads import known_to_python
from hookcb.core.torch_private import has_scaled, saved
from hookcb.core.whose import frames_of, garbage_kept


class FoundLoss(NamedTuple):
    """The loss that a backward was called on.

    Attributes:
        value: the loss, a tensor of one element without its graph.
        node: its autograd node, whose saved tensors are freed.
    """

    value: Tensor
    node: Any

    @property
    def may_be_scaled(self) -> bool:
        """Whether it is a product with a number, like the result of `GradScaler.scale`."""
        is_product = graph.name(self.node) == "Mul" and graph.only_input(self.node) is not None
        return is_product and saved(self.node, "self") is None

    def unscaled(self, scaler: GradScaler) -> "FoundLoss":
        """The loss before it was scaled; exact if the scale is a power of two, as it is by default."""
        scale = scaler.scale(torch.ones_like(self.value))
        return FoundLoss(self.value / scale, graph.only_input(self.node))


def find_loss(thread: int, params: Iterable[nn.Parameter]) -> FoundLoss | None:
    """The loss whose backward a thread is running, the sum if there are several; None if not a scalar.

    A backward inside another one, such as that of activation checkpointing, is part of the outer one.

    Args:
        thread: identifier of the thread; gradients may arrive in autograd's own threads, one for each device.
        params: parameters of the model; a backward only for other gradients, such as inputs', trains nothing.
    """
    frame = _outermost_backward(thread)
    if frame is None:
        return None
    given = frame.f_locals
    found = [x for _, x in parts(given[graph.BACKWARDS[frame.f_code]])]
    roots = [x for x in found if isinstance(x, Tensor) and x.numel() == 1]
    weights = given.get("grad_tensors", given.get("grad_outputs"))
    is_sum = len(roots) == 1 or (len(roots) > 1 and weights is None)
    if len(roots) < len(found) or not is_sum or not _has_any(given["inputs"], params):
        return None
    return _sum(roots)


def _outermost_backward(thread: int) -> FrameType | None:
    with garbage_kept():
        frames = frames_of(sys._current_frames().get(known_to_python(thread)), bool)
        return next(reversed([x for x in frames if x.f_code in graph.BACKWARDS]), None)


def _has_any(inputs: Any, params: Iterable[nn.Parameter]) -> bool:
    """Whether a backward with these `inputs` computes gradients of a parameter; without any it does."""
    chosen = set() if inputs is None else {id(x) for _, x in parts(inputs)}
    return not chosen or any(id(p) in chosen for p in params)


def _sum(roots: list[Tensor]) -> FoundLoss | None:
    if len({x.device for x in roots}) > 1:
        return None
    with torch.enable_grad():  # for a node that leads to all losses
        total = roots[0] if len(roots) == 1 else torch.stack([x.reshape(()) for x in roots]).sum()
    return FoundLoss(total.detach(), total.grad_fn)


def scalers_in_use() -> list[GradScaler]:
    """The GradScalers of this process that have scaled a loss."""
    return [x for x in gc.get_objects() if issubclass(type(x), GradScaler) and has_scaled(x)]


def scaler_at_work() -> GradScaler | None:
    """The GradScaler whose step is in progress in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    # no other frame's locals are read, as that would keep them alive with the result
    return None if frame is None else frame.f_locals["self"]


def first_parameter_behind(given: Any) -> Tensor | None:
    """A parameter from which the inputs of a model were computed, according to their graph, or None."""
    return next((leaf for leaf in graph.leaves(graph.roots(given)) if isinstance(leaf, nn.Parameter)), None)
