"""Finds the model of a script that a call or a loss belongs to."""

import sys
from types import FrameType

from torch import Tensor, nn

from hookcb.cli.tracked_model import TrackedModel
from hookcb.core.graph import leaves_behind

MAX_NODES = 50_000  # in the graph of a loss, when looking for the models that it depends on


def has_part(root: nn.Module, m: nn.Module) -> bool:
    """Whether `m` is `root`, or a module in it."""
    return any(part is m for part in root.modules())


def owner_at_work(m: nn.Module) -> nn.Module | None:
    """Outermost module that contains `m` and has a method running, else `m`.

    None in the `__init__` of a module, which may call one of its parts to learn a shape.
    """
    frame: FrameType | None = sys._getframe(1)
    root = m
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None  # self, by any name
        if isinstance(owner, nn.Module):
            if code.co_name == "__init__":
                return None
            root = owner if has_part(owner, root) else root
        frame = frame.f_back
    return root


def models_behind(loss: Tensor, waiting: list[TrackedModel]) -> list[TrackedModel]:
    """Models in `waiting`, which wait for a backward, that a loss depends on; in the same order."""
    params = {id(p): model for model in waiting if model.model for p in model.model.parameters()}
    leaves = leaves_behind([loss.grad_fn], MAX_NODES)
    reached = {id(model) for leaf in leaves if (model := params.get(id(leaf)))}
    return [model for model in waiting if id(model) in reached]
