"""Reads from the autograd graph what kind of loss it is and what it is computed from."""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hookcb.core.torch_private import input_shape, saved

# Nodes that only scale, reshape, select from or sum their input; `BY_A_NUMBER` if the factor is one number.
SCALING = (
    "Neg", "Mean", "Sum", "View", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Index", "Gather"
)  # fmt: skip
BY_A_NUMBER = ("Div", "Mul")
SHAPING = (
    "View", "UnsafeView", "ReshapeAlias", "Reshape", "Slice", "Select", "Squeeze", "Unsqueeze", "ToCopy",
    "Clone", "Transpose", "Permute", "T", "Alias"
)  # fmt: skip
KINDS = {
    "NllLoss": "nll",
    "NllLoss2D": "nll",
    "MseLoss": "mse",
    "SmoothL1Loss": "huber",
    "HuberLoss": "huber",
    "BinaryCrossEntropy": "binary cross-entropy",
    "BinaryCrossEntropyWithLogits": "binary cross-entropy",
}
COMPILED = "CompiledFunction"  # node of torch.compile
HIDING = {
    COMPILED: "torch.compile",
    "CheckpointFunction": "a checkpointed region with use_reentrant=True",
    "DifferentiableGraph": "TorchScript",
}
HEADS = ("Softmax", "Sigmoid", "Relu")
MEAN = 1  # value of torch's enum of reductions
WEIGHTS = ("weight", "pos_weight")
MAX_NODES = 64
FREED = object()  # stands for a saved tensor that the backward has freed


class LossGraph(NamedTuple):
    """Kind of a loss and its input, as read from its autograd graph.

    Attributes:
        kind: "cross-entropy", "nll" (without log-softmax), "binary cross-entropy", "mse", "huber", or "" for
            any other loss.
        is_pure: whether the loss is that and nothing else, except for scale and sign.
        scale: factor of the mean over samples; NaN for a sum, and if unknown.
        applies: "softmax" or "sigmoid" if the loss applies that itself, else "".
        head: operation that produces the input of the loss, "Softmax", "Sigmoid" or "Relu", else "".
        hidden_by: operation that hides the loss's input, "" if none does.
    """

    kind: str = ""
    is_pure: bool = False
    scale: float = math.nan
    applies: str = ""
    head: str = ""
    hidden_by: str = ""

    @property
    def why_hidden(self) -> str:
        """Reason why the kind or input of the loss is unknown, "" if both are known."""
        if self.hidden_by:
            hiding = HIDING.get(self.hidden_by, f"{self.hidden_by}, a custom autograd function,")
            return f"{hiding} hides what the loss is computed from"
        return "" if self.kind else "the kind of the loss is unknown"


def read_loss(node: Any) -> LossGraph:
    """Reads the nodes next to the loss; runs nothing and keeps nothing alive.

    It may be called while the backward runs, when nodes have freed their saved tensors; a factor of the loss
    is then unknown.

    Args:
        node: `loss.grad_fn`, or None.
    """
    nodes = (at for at in _around(node) if node_name(at[0]) in (*KINDS, "LogSoftmax"))
    loss, is_pure, scale = next(nodes, (None, False, math.nan))
    if loss is None:
        opaque = (node_name(at) for at, *_ in _around(node) if _is_opaque(at))
        return LossGraph(hidden_by=next(opaque, ""))
    name, source = node_name(loss), _input_of(loss)
    is_weighted = any(_saved(loss, name) is not None for name in WEIGHTS)
    is_mean = saved(loss, "reduction", MEAN) == MEAN
    scale = scale if is_mean and not (is_weighted and name.startswith("Binary")) else math.nan
    if name == "LogSoftmax":  # with soft targets, cross-entropy has no node of its own
        return LossGraph("cross-entropy", is_pure, scale, "softmax", *_head(source))
    if KINDS[name] == "nll" and node_name(source) == "LogSoftmax":
        return LossGraph("cross-entropy", is_pure, scale, "softmax", *_head(_input_of(source)))
    applies = "sigmoid" if name == "BinaryCrossEntropyWithLogits" else ""
    return LossGraph(KINDS[name], is_pure, scale, applies, *_head(source))


def node_name(node: Any) -> str:
    """Operation of a node: `Softmax` for `SoftmaxBackward0`."""
    name = "" if node is None else str(node.name()).rpartition("::")[2]
    return name.partition("Backward")[0]


def _around(node: Any) -> Iterator[tuple[Any, bool, float]]:
    """Nodes behind the loss, nearest first; for each, whether only scaling lies between, and the factor."""
    waiting, n = deque([(node, True, 1.0)]), 0
    while waiting and n < MAX_NODES:
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
    """Factor by which a node scales, NaN if unknown; None if it does anything else."""
    name = node_name(node)
    if name not in BY_A_NUMBER:
        return (math.nan if name == "Sum" else -1.0 if name == "Neg" else 1.0) if name in SCALING else None
    if sum(behind is not None for behind, _ in node.next_functions) > 1:
        return None  # both factors depend on the model
    factors = (_saved(node, "other"), _saved(node, "self"))
    if any(x is FREED for x in factors):  # the factors of a 0-d loss are numbers
        return None if input_shape(node) else math.nan
    others = [x.detach() for x in factors if isinstance(x, Tensor)]
    if any(x.numel() != 1 for x in others):  # weights per sample, such as advantages, may be negative
        return None
    number = float(others[0]) if others and others[0].is_cpu else math.nan
    return number if name == "Mul" else 1 / number if number else math.nan


def _saved(node: Any, name: str) -> Any:
    """Tensor that a node has saved; None if it has not, FREED if its backward has run."""
    try:
        return saved(node, name)
    except RuntimeError:
        return FREED


def _input_of(node: Any) -> Any:
    """Node that produces the input of a node, without nodes that only reshape it."""
    while True:
        node = next((behind for behind, _ in node.next_functions if behind is not None), None)
        if node is None or node_name(node) not in SHAPING:
            return node


def head_of(node: Any) -> tuple[str, str]:
    """`head` and `hidden_by` of the `LossGraph` of a loss that gets the output of this node."""
    return _head(_input_of(node) if node is not None and node_name(node) in SHAPING else node)


def _head(node: Any) -> tuple[str, str]:
    name = node_name(node)
    return name if name in HEADS else "", name if _is_opaque(node) else ""


def _is_opaque(node: Any) -> bool:
    """Whether the node hides several operations; names of torch's own nodes end in a digit."""
    if node is None:
        return False
    name = str(node.name())
    return isinstance(node, BackwardCFunction) or name.endswith("Backward") or "CppNode" in name
