"""What a loss is made of, as its autograd graph tells."""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hookcb.core.torch_private import input_shape, saved

# Nodes that only scale, reshape, choose from or sum up what they are given; these two by a single number.
SCALING = (
    "Neg",
    "Mean",
    "Sum",
    "View",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
    "Index",
    "Gather",
)
BY_A_NUMBER = ("Div", "Mul")
SHAPING = (
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Reshape",
    "Slice",
    "Select",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
    "Transpose",
    "Permute",
    "T",
    "Alias",
)
KINDS = {
    "NllLoss": "nll",
    "NllLoss2D": "nll",
    "MseLoss": "mse",
    "SmoothL1Loss": "huber",
    "HuberLoss": "huber",
    "BinaryCrossEntropy": "binary cross-entropy",
    "BinaryCrossEntropyWithLogits": "binary cross-entropy",
}
COMPILED = "CompiledFunction"  # which runs what torch.compile has made
HIDING = {
    COMPILED: "torch.compile",
    "CheckpointFunction": "a checkpointed region with use_reentrant=True",
    "DifferentiableGraph": "TorchScript",
}
HEADS = ("Softmax", "Sigmoid", "Relu")
MEAN = 1  # of the reductions of torch
WEIGHTS = ("weight", "pos_weight")
MOST_NODES = 64
FREED = object()  # stands for a tensor that a node had saved


class LossGraph(NamedTuple):
    """What a loss is.

    Attributes:
        kind: "cross-entropy", "nll" of what is no log-softmax, "binary cross-entropy", "mse", "huber",
            or "" where it is something else.
        is_pure: whether the loss is that and nothing else, but for its scale and sign.
        scale: what the mean over samples is multiplied by; NaN of a sum, and where that is not known.
        applies: "softmax" or "sigmoid", where the loss does that itself.
        head: what the loss is given by, "Softmax", "Sigmoid", "Relu", or "".
        hidden_by: the operation that hides what is behind it, "" if nothing does.
    """

    kind: str = ""
    is_pure: bool = False
    scale: float = math.nan
    applies: str = ""
    head: str = ""
    hidden_by: str = ""

    @property
    def why_hidden(self) -> str:
        """Why it is not known what gives the loss, "" if it is."""
        if self.hidden_by:
            what = HIDING.get(
                self.hidden_by, f"{self.hidden_by}, an autograd function that is not torch's own,"
            )
            return f"{what} hides what gives the loss"
        return "" if self.kind else "the kind of the loss is not known"


def read_loss(node: Any) -> LossGraph:
    """Looks at the nodes next to the loss; runs nothing and keeps nothing.

    It may be asked while the backward runs, when the loss's nodes have freed what they had saved; a number
    that the loss was multiplied by is then not known.

    Args:
        node: `loss.grad_fn`, None where there is none.
    """
    nodes = (at for at in _around(node) if node_name(at[0]) in (*KINDS, "LogSoftmax"))
    found, is_pure, scale = next(nodes, (None, False, math.nan))
    if found is None:
        opaque = (node_name(at) for at, *_ in _around(node) if _is_opaque(at))
        return LossGraph(hidden_by=next(opaque, ""))
    name, given = node_name(found), _behind(found)
    is_weighted = any(_saved(found, name) is not None for name in WEIGHTS)
    is_mean = saved(found, "reduction", MEAN) == MEAN
    scale = scale if is_mean and not (is_weighted and name.startswith("Binary")) else math.nan
    if name == "LogSoftmax":  # of soft targets, which have no node of their own
        return LossGraph("cross-entropy", is_pure, scale, "softmax", *_head(given))
    if KINDS[name] == "nll" and node_name(given) == "LogSoftmax":
        return LossGraph("cross-entropy", is_pure, scale, "softmax", *_head(_behind(given)))
    applies = "sigmoid" if name == "BinaryCrossEntropyWithLogits" else ""
    return LossGraph(KINDS[name], is_pure, scale, applies, *_head(given))


def node_name(node: Any) -> str:
    """Of a node the operation: `Softmax` of `SoftmaxBackward0`."""
    name = "" if node is None else str(node.name()).rpartition("::")[2]
    return name.partition("Backward")[0]


def _around(node: Any) -> Iterator[tuple[Any, bool, float]]:
    """Nodes from the loss backwards, nearest first: whether only scaling lies between, and by how much."""
    waiting, n = deque([(node, True, 1.0)]), 0
    while waiting and n < MOST_NODES:
        now, is_pure, scale = waiting.popleft()
        if now is None:
            continue
        n += 1
        yield now, is_pure, scale
        factor = _factor(now)
        waiting.extend(
            (behind, is_pure and factor is not None, scale * (factor or 1.0))
            for behind, _ in now.next_functions
        )


def _factor(node: Any) -> float | None:
    """What a node multiplies by, NaN where that is not known; None where it does something else."""
    name = node_name(node)
    if name not in BY_A_NUMBER:
        return (math.nan if name == "Sum" else -1.0 if name == "Neg" else 1.0) if name in SCALING else None
    if sum(behind is not None for behind, _ in node.next_functions) > 1:
        return None  # of two parts of the model
    factors = (_saved(node, "other"), _saved(node, "self"))
    if any(x is FREED for x in factors):  # of a loss that is a number its factors are numbers
        return None if input_shape(node) else math.nan
    others = [x.detach() for x in factors if isinstance(x, Tensor)]
    if any(x.numel() != 1 for x in others):  # advantages and weights of samples may be negative
        return None
    number = float(others[0]) if others and others[0].is_cpu else math.nan
    return number if name == "Mul" else 1 / number if number else math.nan


def _saved(node: Any, name: str) -> Any:
    """A tensor that a node has saved, None if it has not, FREED if its backward has run."""
    try:
        return saved(node, name)
    except RuntimeError:
        return FREED


def _behind(node: Any) -> Any:
    """What a node is given by, without what only reshapes it."""
    while True:
        node = next((behind for behind, _ in node.next_functions if behind is not None), None)
        if node is None or node_name(node) not in SHAPING:
            return node


def head_of(node: Any) -> tuple[str, str]:
    """`head` and `hidden_by` of a `LossGraph` that is given what this node makes."""
    return _head(_behind(node) if node is not None and node_name(node) in SHAPING else node)


def _head(node: Any) -> tuple[str, str]:
    name = node_name(node)
    return name if name in HEADS else "", name if _is_opaque(node) else ""


def _is_opaque(node: Any) -> bool:
    """Whether it stands for several operations, which its graph does not show; torch's own have a number."""
    if node is None:
        return False
    own = str(node.name())
    return isinstance(node, BackwardCFunction) or own.endswith("Backward") or "CppNode" in own
