"""Detects whether a loss is the mean or the sum over the samples of a batch."""

import inspect
from typing import Any

from torch import Tensor

from hookcb.core import graph
from hookcb.core.torch_private import saved

ATEN_NAMES = {1: "mean", 2: "sum"}  # at::Reduction, saved in the nodes of torch's losses
UNCHANGED = ("Add", "Sub", "Neg", *graph.SHAPING)
MAX_NODES = 64


def reduction_of(loss_func: Any, loss: Any) -> str | None:
    """Reduction of a loss, "mean" or "sum"; None if neither its function nor its graph shows it.

    A mean plus a penalty that is a sum is a mean. A sum that is multiplied or divided by something may be
    either.

    Args:
        loss_func: the loss function; it may have a `reduction`, as an attribute or as a parameter with a
            default, as torch's losses do.
        loss: a loss with its graph; its last operations are inspected if `loss_func` has no `reduction`.
    """
    named = getattr(loss_func, "reduction", None) or _default(loss_func)
    if isinstance(named, str) and named != "none":
        return "sum" if named == "sum" else "mean"
    return _in_graph(loss.grad_fn) if isinstance(loss, Tensor) else None


def _default(loss_func: Any) -> Any:
    """Default of the parameter `reduction`; for a partial, the value it was given."""
    try:
        parameter = inspect.signature(loss_func).parameters.get("reduction")
    except (TypeError, ValueError):  # None, or a builtin without a signature
        return None
    return None if parameter is None else parameter.default


def _in_graph(root: Any) -> str | None:
    if "mean" in _reductions(root, (*UNCHANGED, *graph.SCALING)):
        return "mean"
    return "sum" if "sum" in _reductions(root, UNCHANGED) else None


def _reductions(root: Any, ops: tuple[str, ...]) -> set[str]:
    """Operations, or the reductions of torch's losses, that are behind nothing but `ops`."""
    nodes = graph.walk([root], at_most=MAX_NODES, through=lambda at: graph.name(at) in ops)
    return {ATEN_NAMES.get(saved(at, "reduction", 0), graph.name(at).lower()) for at in nodes}
