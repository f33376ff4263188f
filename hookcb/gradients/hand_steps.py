"""Steps that a loop makes by itself, without an optimizer: whether weights have moved since a backward."""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from hookcb.core.restore import same_bits
from hookcb.core.torch_private import version_of
from hookcb.gradients.stats import is_readable, sketch, sketch_copy


class StepByHand(Optimizer):
    """Stand-in for the optimizer of a loop that writes to weights itself; its learning rate is unknown."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(list(params), {"lr": math.nan})

    def step(self, closure: Any = None) -> Any:
        """Raises RuntimeError, as the loop makes its steps itself."""
        raise RuntimeError("the loop makes its steps by itself; there is no optimizer to ask")


class WeightMark:
    """Values of the weights when a backward ended: up to 1,024 elements of each parameter with a gradient.

    On a device that would have to be waited for, only writes are seen that count a parameter's version up,
    as `p.sub_(…)` under `no_grad` does and `p.data.sub_(…)` does not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._marks = [(p, version_of(p), _some(p)) for p in model.parameters() if _can_move(p)]

    def has_moved(self) -> bool:
        """Whether any of them was written to, and is another number if it is on the CPU."""
        return any(
            version_of(p) != version if some is None else not _is_same(some, _some(p))
            for p, version, some in self._marks
        )


def _can_move(p: nn.Parameter) -> bool:
    is_known = not isinstance(p, UninitializedParameter) and not hasattr(p, "full_tensor")  # a collective
    return is_known and p.requires_grad and p.grad is not None


def _some(p: nn.Parameter) -> Tensor | None:
    """A copy of some elements; None if reading them would wait for a device."""
    if not p.is_cpu or not is_readable(p) or not p.numel():
        return None
    view = sketch(p)
    return (sketch_copy(p) if view is None else view).clone()


def _is_same(x: Tensor, y: Tensor | None) -> bool:
    return y is not None and x.shape == y.shape and same_bits(x, y)
