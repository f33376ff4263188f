"""What is in progress in the program: transforms of torch.func, method calls, optimizer steps."""

import dis
import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from hookcb.core.torch_private import in_transform, transforms_left


def outside_transforms() -> AbstractContextManager[Any]:
    """Leaves all transforms of torch.func for a while, as they forbid writing to callbacks' tensors."""
    return transforms_left() if in_transform() else nullcontext()


def n_running(function: str, owner: object) -> int:
    """Number of calls of a method of `owner` that are in progress in this thread."""
    n = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        n += frame.f_code.co_name == function and frame.f_locals.get("self") is owner
        frame = frame.f_back
    return n


def optimizer_at_work() -> Optimizer | None:
    """The optimizer whose step is in progress in this thread, and calls the model in its closure."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and isinstance(opt := frame.f_locals.get("self"), Optimizer):
            return opt
        frame = frame.f_back
    return None


def is_method_call(frame: FrameType) -> bool:
    """Whether `frame` is reading an attribute in order to call it, as in `w.loss(x)`.

    CPython compiles that into an instruction of its own; if another Python does not, it is False.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    if sys.version_info < (3, 12):
        return dis.opname[code[at]] == "LOAD_METHOD"
    return dis.opname[code[at]] == "LOAD_ATTR" and code[at + 1] & 1 == 1
