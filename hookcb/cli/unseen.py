"""Why no model was seen that an optimizer trains."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from hookcb.cli.ownership import modules_alive
from hookcb.core.torch_private import in_backward, plain_class
from hookcb.hooks.modules import has_compiled
from hookcb.hooks.optimizer_steps import params_of

IN_FUNCTION = "called only inside an autograd.Function, as by odeint_adjoint or a checkpoint, which hides it"
WITHOUT_GRAD = "called only without gradients"
NOT_CALLED = (
    "never called itself: its forward() or its weights are used directly, so that no hook runs; "
    "call the module, model(x) rather than model.forward(x)"
)
MAYBE_COMPILED = (
    "never called where hooks run: in a function that torch.compile compiles, or by its forward() directly; "
    "compile the model rather than the function that calls it, and call model(x)"
)
NO_MODULE = "parameters that belong to no nn.Module, whose calls could be seen"


def how_called() -> str:
    """How a module is called that this call does not train: in an autograd.Function, or without gradients."""
    frame: FrameType | None = sys._getframe(1)
    forwards = {getattr(x.forward, "__code__", None) for x in _derived(torch.autograd.Function)}
    while frame is not None:
        if frame.f_code in forwards:  # that of `apply` is no frame since torch 2.15
            return IN_FUNCTION
        frame = frame.f_back
    return IN_FUNCTION if in_backward() else WITHOUT_GRAD


def _derived(kind: type) -> Iterator[Any]:
    x: type
    for x in type.__subclasses__(kind):
        yield x
        yield from _derived(x)


def why_unseen(opt: Optimizer, called: Any) -> str:
    """The object that an optimizer trains, and why it was not seen as a model; "" if it has no parameters.

    Args:
        opt: the optimizer.
        called: by module, how it was called if it was called, see `how_called`.
    """
    if not (ids := params_of(opt)):
        return ""
    modules = modules_alive()
    outer = {id(child): m for m in modules for child in m.children()}
    holder = next((m for m in modules if not ids.isdisjoint(map(id, m.parameters(recurse=False)))), None)
    if holder is None:
        return NO_MODULE
    path = [holder]
    while (m := outer.get(id(path[-1]))) is not None and all(m is not x for x in path):
        path.append(m)
    not_called = MAYBE_COMPILED if has_compiled() else NOT_CALLED
    ways = [called[m] for m in [*path, *path[-1].modules()] if m in called]
    why = IN_FUNCTION if IN_FUNCTION in ways else next(iter(ways), not_called)
    return f"{plain_class(path[-1]).__name__}, which is {why}"
