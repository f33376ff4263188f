"""Writes of a loop to its weights and gradients, between a backward and a step."""

import math
from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from hookcb.core.optim import mark_of
from hookcb.core.restore import same_bits
from hookcb.core.torch_private import version_of
from hookcb.gradients.samples import sketch_copy
from hookcb.gradients.stats import is_readable


class StepByHand(Optimizer):
    """Stand-in for the optimizer of a loop that writes to weights itself; its learning rate is unknown."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(list(params), {"lr": math.nan})

    def step(self, closure: Any = None) -> Any:
        """Raises RuntimeError, as the loop makes its steps itself."""
        raise RuntimeError("the loop updates its weights itself, without an optimizer")


class WeightMark:
    """Values of the weights when a backward ended: up to 1,024 elements of each parameter with a gradient.

    On other devices than the CPU, which would need a sync, only writes that increment a parameter's version
    are seen, as by `p.sub_(…)` under `no_grad`, but not by `p.data.sub_(…)`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._marks = [(p, version_of(p), _some(p)) for p in model.parameters() if _can_move(p)]

    def has_moved(self) -> bool:
        """Whether any weight was written to and, on the CPU, has another value."""
        return any(
            version_of(p) != version if some is None else not _is_same(some, _some(p))
            for p, version, some in self._marks
        )


class GradientMark:
    """A gradient as a backward has left it, to see whether the loop writes to it before its step."""

    def __init__(self) -> None:
        self._param: ref[nn.Parameter] | None = None
        self._left: tuple[int, int] | None = None  # None if there is no mark of a gradient

    def note(self, model: nn.Module) -> None:
        """Notes the gradient of a parameter, the same each time as long as it gets one."""
        p = self._noted()
        if p is None or p.grad is None:
            p = next((p for p in model.parameters() if type(p.grad) is Tensor), None)
        self._param, self._left = (None, None) if p is None else (ref(p), mark_of(p.grad))

    def has_changed(self) -> bool:
        """Whether the gradient is still there, and was written to or replaced."""
        p = self._noted()
        grad = None if p is None else p.grad
        return grad is not None and self._left is not None and mark_of(grad) != self._left

    def _noted(self) -> nn.Parameter | None:
        return None if self._param is None else self._param()


def _can_move(p: nn.Parameter) -> bool:
    is_known = not isinstance(p, UninitializedParameter) and not hasattr(p, "full_tensor")  # a collective
    return is_known and p.requires_grad and p.grad is not None


def _some(p: nn.Parameter) -> Tensor | None:
    """A copy of some elements; None if reading them would need a sync."""
    if not p.is_cpu or not is_readable(p) or not p.numel():
        return None
    return sketch_copy(p)


def _is_same(x: Tensor, y: Tensor | None) -> bool:
    return y is not None and x.shape == y.shape and same_bits(x, y)
