"""The operation between a model and its loss that makes the first NaN or infinity, found in the graph."""

from typing import Any

import torch
from torch import Tensor

from hookcb.core import graph
from hookcb.core.torch_private import saved
from hookcb.nans.nonfinite import kinds

OF_ONE_INPUT = "acos", "asin", "atanh", "log", "log10", "log1p", "log2"  # and their nodes save that

MASKABLE = ("LogSoftmax",)  # gives -inf of a score that is masked by -inf


def operation_in_loss(node: Any, outputs: Any) -> str:
    """Name of the operation, such as `log`, that gives NaN or infinity from finite inputs; "" if unknown.

    Only roots, logarithms, exponentials, quotients, powers and the like save enough to tell, and only until
    the backward frees it.

    Args:
        node: autograd node of the loss.
        outputs: autograd nodes of the model's outputs, which are finite; without any, nothing is looked at.
    """
    bad = [at for at in graph.walk([node], outputs) if _gives_nonfinite(at)] if outputs else []
    first = (at for at in bad if not any(x in bad and x is not at for x in graph.walk([at], outputs)))
    return next((graph.name(at).lower() for at in first), "")


def _gives_nonfinite(node: Any) -> bool:
    try:
        with torch.no_grad():
            made = kinds(_result(node))
            return made.bad or (made.minus_inf and graph.name(node) not in MASKABLE)
    except RuntimeError:  # what it has saved was freed, or changed in place
        return False


def _result(node: Any) -> Any:
    """Result of an operation, as saved or computed again from its inputs; None if neither can be had."""
    if isinstance(result := saved(node, "result"), Tensor):
        return result
    operation, given = graph.name(node).lower(), saved(node, "self")
    if operation == "div" and isinstance(by := saved(node, "other"), Tensor):
        return (1.0 if given is None else given) / by  # only a division by 0 shows without the dividend
    if not isinstance(given, Tensor):
        return None
    if operation == "pow":
        return given ** saved(node, "exponent")
    return getattr(torch, operation)(given) if operation in OF_ONE_INPUT else None
