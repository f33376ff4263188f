"""Walks of autograd graphs."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor

MAX_NODES = 20_000  # of a graph that are looked at in a training


def node_name(node: Any) -> str:
    """Operation of a node: `Softmax` of `SoftmaxBackward0`."""
    name = "" if node is None else str(node.name()).rpartition("::")[2]
    return name.partition("Backward")[0]


def nodes_behind(roots: Iterable[Any], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """Nodes of the graphs from `roots` back to `ends`, each once; without the ends and what is behind them.

    Args:
        roots: autograd nodes, as the `grad_fn` of outputs; None stands for no graph.
        ends: nodes at which to stop, as those that made the inputs.
    """
    waiting, seen = list(roots), {None, *ends}
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            yield node
            waiting += [behind for behind, _ in node.next_functions]


def leaves_behind(roots: Iterable[Any], at_most: int | None = None) -> Iterator[Tensor]:
    """Leaf tensors that get gradients, in the graphs from `roots` back; of `at_most` nodes, if given."""
    for node in islice(nodes_behind(roots), at_most):
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
