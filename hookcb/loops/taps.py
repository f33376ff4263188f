"""How a watch hears of modules compiled in place, and what of a program is in progress."""

import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hookcb.hooks.own import StandIn


class CompiledTap(StandIn):
    """Stands before the call of a module that was compiled in place, as hooks do nothing in its graph.

    Args:
        m: the module.
        begins, gives, ends: called as hooks before and after its forward are, `ends` also where it raises.
    """

    def __init__(self, m: nn.Module, begins: Any, gives: Any, ends: Any) -> None:
        self.own: Any = m._compiled_call_impl
        self.hooks: tuple[Any, Any, Any] | None = begins, gives, ends
        m._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called in place of the module's compiled call."""
        if self.hooks is None:
            return self.own(*args, **kwargs)
        begins, gives, ends = self.hooks
        begins(args, kwargs)
        try:
            output = self.own(*args, **kwargs)
            gives(output)
        finally:
            ends()
        return output

    def close(self, m: nn.Module | None) -> None:
        """Is in the way no longer, also where another one came before it meanwhile."""
        self.hooks = None
        while m is not None and isinstance(tap := m._compiled_call_impl, CompiledTap) and tap.hooks is None:
            m._compiled_call_impl = tap.own


def in_transform() -> bool:
    """Whether a transform of torch.func is at work, whose tensors must not outlive it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """Leaves all transforms of torch.func for a while, as they forbid to write to tensors of ours."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack() if in_transform() else nullcontext()


def n_running(function: str, owner: object) -> int:
    """How many calls of a method of `owner` are in progress in this thread."""
    n = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        n += frame.f_code.co_name == function and frame.f_locals.get("self") is owner
        frame = frame.f_back
    return n


def optimizer_at_work() -> Optimizer | None:
    """The optimizer whose step is in progress in this thread, and calls the model by its closure."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and isinstance(opt := frame.f_locals.get("self"), Optimizer):
            return opt
        frame = frame.f_back
    return None
