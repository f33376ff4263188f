"""How a loss joins the losses of a batch's samples: as their mean, or as their sum."""

import inspect
from typing import Any

from torch import Tensor

from hookcb.core.torch_private import saved

OF_ATEN = {1: "mean", 2: "sum"}  # at::Reduction, which the nodes of torch's losses have
UNCHANGED = ("Add", "Sub", "Neg", "View", "Reshape", "Squeeze", "Select", "Clone", "Alias", "ToCopy")
SCALED = ("Mul", "Div")
MOST = 64  # nodes that are looked at


def reduction_of(loss_func: Any, loss: Any) -> str | None:
    """How a loss was reduced, "mean" or "sum"; None if neither its function nor its graph tells.

    A mean with a penalty that is a sum is a mean. A sum that is only found multiplied or divided by something
    may be either.

    Args:
        loss_func: has a `reduction`, as an attribute or as a parameter with a default, as torch's losses do.
        loss: with its graph, whose last operations tell where `loss_func` does not.
    """
    named = getattr(loss_func, "reduction", None) or _default(loss_func)
    if isinstance(named, str) and named != "none":
        return "sum" if named == "sum" else "mean"
    return _in_graph(loss.grad_fn) if isinstance(loss, Tensor) else None


def _default(loss_func: Any) -> Any:
    """The default of its parameter `reduction`, of a partial what was given."""
    try:
        parameter = inspect.signature(loss_func).parameters.get("reduction")
    except (TypeError, ValueError):  # none, or a builtin without a signature
        return None
    return None if parameter is None else parameter.default


def _in_graph(root: Any) -> str | None:
    plain, waiting, n = set(), [(root, False)], 0
    while waiting and n < MOST:
        (node, is_scaled), n = waiting.pop(), n + 1
        kind = "" if node is None else node.name()
        reduction = OF_ATEN.get(saved(node, "reduction", 0))
        if kind.startswith("MeanBackward") or reduction == "mean":
            return "mean"
        if kind.startswith("SumBackward") or reduction == "sum":
            plain.add(not is_scaled)
        elif kind.startswith(UNCHANGED + SCALED):
            is_scaled |= kind.startswith(SCALED)
            waiting += [(behind, is_scaled) for behind, _ in node.next_functions]
    return "sum" if True in plain else None
