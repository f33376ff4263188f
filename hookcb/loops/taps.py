"""Looks up what is in progress in this thread: calls of methods, steps."""

import sys
from collections.abc import Iterator
from types import FrameType

from torch.optim import Optimizer


def n_running(function: str, owner: object) -> int:
    """Number of calls of a method of `owner` that are in progress in this thread."""
    n = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        n += frame.f_code.co_name == function and frame.f_locals.get("self") is owner
        frame = frame.f_back
    return n


def stepping_optimizer() -> Optimizer | None:
    """The optimizer whose step is in progress in this thread; its closure may be calling the model."""
    return next(stepping_optimizers(), None)


def stepping_optimizers() -> Iterator[Optimizer]:
    """The optimizers whose steps are in progress in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and isinstance(opt := frame.f_locals.get("self"), Optimizer):
            yield opt
        frame = frame.f_back
