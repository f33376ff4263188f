"""Detects whether a loss is the mean or the sum over the samples of a batch."""

import inspect
from typing import Any

from torch import Tensor

from hookcb.core.torch_private import saved

ATEN_NAMES = {1: "mean", 2: "sum"}  # at::Reduction, saved in the nodes of torch's losses
UNCHANGED = ("Add", "Sub", "Neg", "View", "Reshape", "Squeeze", "Select", "Clone", "Alias", "ToCopy")
SCALED = ("Mul", "Div")
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
    plain, waiting, n = set(), [(root, False)], 0
    while waiting and n < MAX_NODES:
        (node, is_scaled), n = waiting.pop(), n + 1
        kind = "" if node is None else node.name()
        reduction = ATEN_NAMES.get(saved(node, "reduction", 0))
        if kind.startswith("MeanBackward") or reduction == "mean":
            return "mean"
        if kind.startswith("SumBackward") or reduction == "sum":
            plain.add(not is_scaled)
        elif kind.startswith(UNCHANGED + SCALED):
            is_scaled |= kind.startswith(SCALED)
            waiting += [(behind, is_scaled) for behind, _ in node.next_functions]
    return "sum" if True in plain else None
