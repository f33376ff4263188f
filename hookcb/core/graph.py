"""Vocabulary of autograd graphs: names of operations, what is behind a node, and walks."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hookcb.core.batch import parts
from hookcb.core.torch_private import saved

MAX_NODES = 20_000  # of a graph that are looked at in a training

# operations, as `name` gives them
SAME_ORDER = (  # of the elements
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Alias",
    "Clone",
    "ToCopy",
)
MOVING = (*SAME_ORDER, "Slice", "Transpose", "Permute", "T")
SHAPING = (*MOVING, "Select", "Expand")
CHOOSING = ("Index", "Gather", "MaskedSelect", "IndexSelect")  # of samples, or of the score of the label
SCALING = ("Div", "Mul")
SHIFTING = ("Add", "Sub", "Rsub")
BOUNDING = ("Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum")
LOGARITHMS = ("Log", "Log2", "Log10")
HEADS = ("Softmax", "Sigmoid", "Relu")
OF_LAYERS = ("Addmm", "Linear", "Convolution")  # which losses do not have
LAYERS = (*OF_LAYERS, "Mm", "Bmm", "Baddbmm", "Mv", "Addmv")  # whose output is any number
COMPILED = "CompiledFunction"  # node of torch.compile
HIDING = {
    COMPILED: "torch.compile",
    "CheckpointFunction": "a checkpointed region with use_reentrant=True",
    "DifferentiableGraph": "TorchScript",
}
# code of the functions that run a backward, with the name of the argument that holds the losses
BACKWARDS = {torch.autograd.backward.__code__: "tensors", torch.autograd.grad.__code__: "outputs"}
FREED = object()  # stands for a saved tensor that the backward has freed, or that is hidden by a hook
KEPT = "hookcb_kept"  # in the metadata of a node: what `read_saved` gives while its backward runs
MAX_OF_LOSS = 16  # nodes in which that is looked for
FACTORS, LABELS, WEIGHTED = ("other", "self"), ("target",), ("target", "weight")
KEPT_OF = {  # what is kept of operations
    **dict.fromkeys(SCALING, FACTORS),
    **dict.fromkeys(("MseLoss", "SmoothL1Loss", "HuberLoss", "KlDiv"), LABELS),
    **dict.fromkeys(("NllLoss", "NllLoss2D", "BinaryCrossEntropy"), WEIGHTED),
    "BinaryCrossEntropyWithLogits": (*WEIGHTED, "pos_weight"),
}


def name(node: Any) -> str:
    """Operation of a node: `Softmax` of `SoftmaxBackward0`; "" of None."""
    return "" if node is None else _short(node.name())


@cache
def _short(name: str) -> str:
    return name.rpartition("::")[2].partition("Backward")[0]


def roots(value: Any) -> list[Any]:
    """Nodes that computed the tensors of a value, which may be nested in tuples, lists and mappings."""
    nodes = [x.grad_fn for _, x in parts(value) if isinstance(x, Tensor)]
    return [node for node in nodes if node is not None]


def inputs(node: Any) -> list[Any]:
    """Nodes that computed the inputs of a node, without those that need no gradient; none for None."""
    return [] if node is None else [behind for behind, _ in node.next_functions if behind is not None]


def only_input(node: Any) -> Any:
    """The only input of a node that needs a gradient; None if there are several, or none."""
    behind = inputs(node)
    return behind[0] if len(behind) == 1 else None


def chain(node: Any, ops: Iterable[str]) -> Iterator[Any]:
    """A node and the first input of each that is one of `ops`, in a row."""
    while node is not None:
        yield node
        node = next(iter(inputs(node)), None) if name(node) in ops else None


def peel(node: Any, ops: Iterable[str] = SHAPING) -> Any:
    """This node, or the first behind it that is none of `ops`."""
    while name(node) in ops:
        node = next(iter(inputs(node)), None)
    return node


def behind(node: Any) -> Any:
    """The node that gives a node its first input, past those that only reshape it."""
    return peel(next(iter(inputs(node)), None))


def leaf(node: Any) -> Tensor | None:
    """The leaf tensor whose gradient a node accumulates; None for other nodes."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, Tensor) else None


def walk(
    roots: Iterable[Any],
    ends: Iterable[Any] = (),
    at_most: int | None = None,
    through: Callable[[Any], bool] | None = None,
    nearest_first: bool = False,
) -> Iterator[Any]:
    """Nodes of the graphs from `roots` back to `ends`, each once; without the ends and what is behind them.

    Args:
        roots: autograd nodes, as the `grad_fn` of outputs; None stands for no graph.
        ends: nodes at which to stop, as those that made the inputs.
        at_most: number of nodes after which to stop, if given.
        through: whether to go on behind a node, if given.
        nearest_first: whether nodes come by their distance from the roots; else one branch after the other.
    """
    waiting, seen, n = deque(roots), {None, *ends}, 0
    take = waiting.popleft if nearest_first else waiting.pop
    while waiting and n != at_most:
        if (node := take()) not in seen:
            seen.add(node)
            n += 1
            if through is None or through(node):
                waiting.extend([behind for behind, _ in node.next_functions])
            yield node


def leaves(roots: Iterable[Any], at_most: int | None = None) -> Iterator[Tensor]:
    """Leaf tensors that get gradients, in the graphs from `roots` back; of `at_most` nodes, if given."""
    return (x for node in walk(roots, at_most=at_most) if (x := leaf(node)) is not None)


def near(node: Any, at_most: int) -> Iterator[Any]:
    """Nodes from a loss back to the last layers, nearest first."""
    return walk([node], at_most=at_most, through=lambda at: name(at) not in LAYERS, nearest_first=True)


def is_subtracted(node: Any) -> bool:
    """Whether a node subtracts its input from a number."""
    op = name(node)
    return op == "Rsub" or (op == "Sub" and node.next_functions[0][0] is None)


def is_opaque(node: Any) -> bool:
    """Whether a node hides several operations; names of torch's own nodes end in a number."""
    if node is None:
        return False
    own = str(node.name())
    return isinstance(node, BackwardCFunction) or own.endswith("Backward") or "CppNode" in own


def factors(node: Any) -> list[Any] | None:
    """Tensors and numbers that a node multiplies or divides by, if it has saved them; None if freed."""
    found = [read_saved(node, field) for field in ("other", "self")]
    is_freed = any(x is FREED for x in found)
    return None if is_freed else [x for x in found if isinstance(x, Tensor | float | int)]


def read_saved(node: Any, field: str) -> Any:
    """A tensor that a node has saved, None if it has not, FREED if its backward has run."""
    try:
        return saved(node, field)
    except RuntimeError:
        return node.metadata.get(KEPT, {}).get(field, FREED)


def keep_saved(roots: Iterable[Any]) -> list[Any]:
    """Keeps labels and factors that losses have saved, which the backward that begins is about to free.

    Returns the nodes that have some, for `drop_saved`.
    """
    nodes: list[Any] = []
    waiting, n = deque(roots), 0
    while waiting and n < MAX_OF_LOSS:  # in each batch, so without `walk`, which takes twice the calls
        if (node := waiting.popleft()) is None or (op := name(node)) in LAYERS:
            continue
        n += 1
        waiting.extend([behind for behind, _ in node.next_functions])
        if (fields := KEPT_OF.get(op)) is None:
            continue
        kept = {field: read_saved(node, field) for field in fields}
        are_large = fields is FACTORS and any(isinstance(x, Tensor) and x.numel() > 1 for x in kept.values())
        if not are_large and any(isinstance(x, Tensor) for x in kept.values()):
            node.metadata[KEPT] = kept
            nodes.append(node)
    return nodes


def drop_saved(nodes: Iterable[Any]) -> None:
    """Undoes `keep_saved`."""
    for node in nodes:
        node.metadata.pop(KEPT, None)


def uses(node: Any, at_most: int) -> Counter[Any] | None:
    """Nodes of the graph behind `node`, and how many others use each.

    None if the graph hides a part of it, or has more nodes than `at_most`.
    """
    nodes = list(walk([node], at_most=at_most + 1))
    if len(nodes) > at_most or any(map(is_opaque, nodes)):
        return None
    return Counter([*nodes[:1], *(behind for at in nodes for behind in inputs(at))])
