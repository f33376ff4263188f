"""Terms of a loss, as its autograd graph shows them: hand-written losses and penalties too."""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hookcb.core.graph import node_name
from hookcb.core.torch_private import input_shape, saved

SHAPING = (
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Reshape",
    "Slice",
    "Select",
    "Squeeze",
    "Unsqueeze",
    "Expand",
    "ToCopy",
    "Clone",
    "Transpose",
    "Permute",
    "T",
    "Alias",
)
CHOOSING = ("Index", "Gather", "MaskedSelect", "IndexSelect")  # of samples, or of the score of the label
REDUCING = ("Mean", "Sum")
BY_A_NUMBER = ("Div", "Mul")
LAYERS = (
    "Addmm",
    "Mm",
    "Bmm",
    "Baddbmm",
    "Mv",
    "Addmv",
    "Linear",
    "Convolution",
)  # whose output is any number
BOUNDING = ("Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum")
LOGARITHMS = ("Log", "Log2", "Log10")
KINDS = {
    "NllLoss": "nll",
    "NllLoss2D": "nll",
    "MseLoss": "mse",
    "SmoothL1Loss": "huber",
    "HuberLoss": "huber",
    "BinaryCrossEntropy": "binary cross-entropy",
    "BinaryCrossEntropyWithLogits": "binary cross-entropy",
    "KlDiv": "kl",
}
COMPILED = "CompiledFunction"  # node of torch.compile
HIDING = {
    COMPILED: "torch.compile",
    "CheckpointFunction": "a checkpointed region with use_reentrant=True",
    "DifferentiableGraph": "TorchScript",
}
MEAN = 1  # value of torch's enum of reductions
WEIGHTS = ("weight", "pos_weight")
MAX_NODES = 64
FREED = object()  # stands for a saved tensor that the backward has freed


class Term(NamedTuple):
    """One term of a loss.

    Attributes:
        kind: "cross-entropy", "nll", "binary cross-entropy", "mse", "mae", "huber", "kl"; "penalty" on
            parameters; "" for anything else.
        scale: factor of the mean over samples; NaN for a sum or if unknown, inf for a sum of a penalty.
        takes: what it must be given: "scores", "log-probabilities", "probabilities", "values", or "".
        given: node of what the model gives to it.
        is_exact: whether it is a plain mean or sum of that kind, without weights of samples.
        is_complement: whether it is the logarithm of 1 - p.
        target: what torch's loss compares with, None if unknown.
        ignored: class index that torch's loss ignores.
        has_weights: whether classes or elements have weights.
        class_weights: weights of the classes, or of ones; None if there are others, or none.
        smoothing: label smoothing of torch's cross-entropy.
        shape: shape of the elements that are compared, after broadcasting.
        node: node that computes it.
        given_shape: shape of what the model gives to it, before broadcasting, () if unknown.
    """

    kind: str
    scale: float = math.nan
    takes: str = ""
    given: Any = None
    is_exact: bool = True
    is_complement: bool = False
    target: Tensor | None = None
    ignored: int = -100
    has_weights: bool = False
    class_weights: Tensor | None = None
    smoothing: float = 0.0
    shape: tuple[int, ...] = ()
    given_shape: tuple[int, ...] = ()
    node: Any = None


def read_terms(node: Any) -> list[Term]:
    """Terms of the loss with this node; runs nothing and keeps nothing.

    The logarithms of p and 1 - p are one term, a binary cross-entropy written by hand. A logarithm of 1 - p
    alone, or of two different outputs, has no kind: it may be one side of a game.

    Args:
        node: `loss.grad_fn`.
    """
    terms = _named(list(_terms(node, 1.0, [MAX_NODES])))
    return [x._replace(scale=math.nan) if math.isinf(x.scale) and x.kind != "penalty" else x for x in terms]


def _named(terms: list[Term]) -> list[Term]:
    """Terms in which logarithms have the kind of loss that they make up."""
    logs = [term for term in terms if term.kind == "log"]
    others = [term for term in terms if term.kind != "log"]
    if len(logs) == 2 and _without_sign(logs[0].given) is _without_sign(logs[1].given):
        return [min(logs, key=_is_of_complement)._replace(kind="binary cross-entropy"), *others]
    is_loss = len(logs) == 1 and _is_of_classes(logs[0])
    return [*(term._replace(kind="cross-entropy" if is_loss else "") for term in logs), *others]


def _is_of_classes(term: Term) -> bool:
    """Whether a term is minus the logarithm of the probability of one of several classes."""
    shape = input_shape(term.given) if term.given is not None else ()
    has_classes = len(shape or ()) > 1 and shape[-1] > 1
    is_minus_log = term.takes == "probabilities" and not _is_of_complement(term) and not term.scale < 0
    return is_minus_log and has_classes


def _is_of_complement(term: Term) -> bool:
    """Whether a logarithm is that of 1 - p."""
    return term.is_complement or node_name(term.given) == "Neg"


def _without_sign(node: Any) -> Any:
    return behind(node) if node_name(node) == "Neg" else node


def _terms(node: Any, scale: float, budget: list[int]) -> Iterator[Term]:
    budget[0] -= 1
    if node is None or budget[0] < 0:
        return
    if (leaf := _leaf(node, scale)) is not None:
        yield leaf
        return
    name, inputs = node_name(node), node.next_functions
    behind = [n for n, _ in inputs if n is not None]
    factor = factor_of(node)
    if name == "Add" and (smoothed := _smoothed(behind, scale)) is not None:
        yield smoothed
    elif name in ("Add", "Sub") and len(behind) == 2:
        signs = 1.0, saved(node, "alpha", 1) * (-1.0 if name == "Sub" else 1.0)
        for n, sign in zip(behind, signs, strict=True):
            yield from _terms(n, scale * sign, budget)
    elif factor is not None and len(behind) == 1:
        yield from _terms(behind[0], scale * factor, budget)
    elif name == "Mul" and len(behind) == 1:  # by soft targets, or by weights of samples
        shape = input_shape(node)
        for term in _terms(behind[0], math.copysign(math.inf, scale), budget):
            is_exact = term.is_exact and term.kind == "log"
            yield term._replace(is_exact=is_exact, shape=shape or term.shape)
    else:
        near = (at for at in nodes_near(node) if node_name(at) in (*KINDS, "LogSoftmax"))
        found = [leaf._replace(is_exact=False) for at in near if (leaf := _leaf(at, math.nan))]
        yield from found or [Term("penalty" if _is_of_params(node) else "", scale)]


def _leaf(node: Any, scale: float) -> Term | None:
    """The term that a node is, None if it only combines or scales others."""
    name, given = node_name(node), behind(node)
    if name in KINDS:
        return _torch_loss(node, name, scale, given)
    if name == "LogSoftmax":  # of soft targets, or with the label's score chosen by hand
        return Term("cross-entropy", -scale, "scores", given)
    if name == "LogSigmoid":
        return Term("log", -scale, "scores", given)
    if name in LOGARITHMS and input_shape(node):  # not of a loss
        return _logarithm(-scale, given)
    inputs = node.next_functions
    is_square = name == "Mul" and len(inputs) == 2 and inputs[0][0] is inputs[1][0] is not None
    if name == "Abs" or is_square or (name == "Pow" and saved(node, "exponent") == 2):
        return _difference(node, scale, "mae" if name == "Abs" else "mse")
    return None


def _smoothed(parts: list[Any], scale: float) -> Term | None:
    """Term of torch's cross-entropy with label smoothing, the sum of these two nodes; None for other sums."""
    if [node_name(part) for part in parts] != ["Mul", "Mul"]:
        return None
    nll, share = behind(parts[0]), _number_of(parts[0], "Mul")
    if KINDS.get(node_name(nll)) != "nll" or share is None:
        return None
    near, scores = nodes_near(parts[1]), behind(nll)
    is_same = node_name(scores) == "LogSoftmax" and any(at is scores for at in near)
    return _torch_loss(nll, node_name(nll), scale, scores)._replace(smoothing=1 - share) if is_same else None


def _torch_loss(node: Any, name: str, scale: float, given: Any) -> Term:
    target = read_saved(node, "target")
    term = _kind_of_torch(node, name, scale, given)
    weight, of_ones = (read_saved(node, x) for x in WEIGHTS)
    of_classes = of_ones if name.startswith("Binary") and weight is None else weight
    ignored = saved(node, "ignore_index", -100)
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored  # negative numbers are stored as unsigned ones
    target = target if isinstance(target, Tensor) else None
    first = node.next_functions[0][0]
    shape = () if first is None else input_shape(first)
    return term._replace(
        target=target,
        ignored=ignored,
        has_weights=weight is not None or of_ones is not None,
        class_weights=of_classes if isinstance(of_classes, Tensor) else None,
        shape=shape,
        given_shape=_shape_before_broadcast(first),
        node=node,
    )


def _shape_before_broadcast(node: Any) -> tuple[int, ...]:
    while node is not None and node_name(node) == "Expand":  # by which torch broadcasts
        node = node.next_functions[0][0]
    return () if node is None else input_shape(node)


def _kind_of_torch(node: Any, name: str, scale: float, given: Any) -> Term:
    is_weighted = name.startswith("Binary") and read_saved(node, "weight") is not None  # each element
    if is_weighted or saved(node, "reduction", MEAN) != MEAN:
        scale = math.copysign(math.inf, scale)
    if KINDS[name] == "nll":
        if node_name(given) == "LogSoftmax":
            return Term("cross-entropy", scale, "scores", behind(given))
        if node_name(given) in LOGARITHMS:
            term = _logarithm(scale, behind(given))
            return term._replace(kind="cross-entropy")
        return Term("nll", scale, "log-probabilities", given)
    if name == "BinaryCrossEntropy":
        return _logarithm(scale, given)._replace(kind=KINDS[name])
    return Term(KINDS[name], scale, "scores" if name.startswith("Binary") else "values", given)


def _logarithm(scale: float, node: Any) -> Term:
    """Logarithm of a probability, which may be bounded, normalized, or have a small number added."""
    is_complement = False
    for _ in range(MAX_NODES):
        name = node_name(node)
        inputs = [] if node is None else [n for n, _ in node.next_functions if n is not None]
        if name == "Rsub" or (name == "Sub" and node.next_functions[0][0] is None):
            is_complement = not is_complement
        elif name == "Div" and len(inputs) == 2 and _is_sum_of(inputs[1], inputs[0]):
            inputs = inputs[:1]  # p / p.sum()
        elif name not in (*BOUNDING, *SHAPING, *CHOOSING, "Add"):
            break
        if len(inputs) != 1:
            break
        node = inputs[0]
    return Term("log", scale, "probabilities", node, is_complement=is_complement)


def _is_sum_of(node: Any, other: Any) -> bool:
    """Whether a node sums up what another gives."""
    for _ in range(4):
        if node is other:
            return True
        if node is None or node_name(node) not in (*SHAPING, "Sum", "ClampMin", "Add"):
            return False
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return False


def _difference(node: Any, scale: float, kind: str) -> Term | None:
    """Squared or absolute errors against constants; None for anything else, such as two parts of a model."""
    given = behind(node)
    if node_name(given) not in ("Sub", "Rsub"):
        return None
    inputs = [n for n, _ in given.next_functions if n is not None]
    if len(inputs) != 1:
        return None
    return Term(
        kind,
        scale,
        "values",
        behind_shapes(inputs[0]),
        shape=input_shape(node),
        given_shape=_shape_before_broadcast(inputs[0]),
        node=node,
    )


def _is_of_params(node: Any) -> bool:
    """Whether a node depends on parameters alone, and on no layer's output."""
    waiting, n = [node], 0
    while waiting and n < MAX_NODES:
        now = waiting.pop()
        n += 1
        name = node_name(now)
        if name in LAYERS or is_opaque(now):
            return False
        waiting += [at for at, _ in now.next_functions if at is not None]
    return not waiting


def factor_of(node: Any) -> float | None:
    """Factor by which a node scales its only input, inf or NaN if unknown; None if it does more than that."""
    name = node_name(node)
    if name in BY_A_NUMBER:
        return _number_of(node, name)
    if name == "Sum":
        return math.inf  # not known, but positive
    if name == "Neg":
        return -1.0
    return 1.0 if name in ("Mean", *SHAPING, *CHOOSING) else None


def _number_of(node: Any, name: str) -> float | None:
    if sum(n is not None for n, _ in node.next_functions) > 1:
        return None  # of two parts of the model
    factors = (read_saved(node, "other"), read_saved(node, "self"))
    if any(x is FREED for x in factors):  # factors of a loss that is a number are numbers
        return None if input_shape(node) else math.nan
    others = [x for x in factors if isinstance(x, Tensor | float | int)]
    if any(isinstance(x, Tensor) and x.numel() != 1 for x in others):
        return None
    is_known = bool(others) and not (isinstance(others[0], Tensor) and not others[0].is_cpu)
    number = float(others[0]) if is_known else math.nan
    return number if name == "Mul" else 1 / number if number else math.nan


def read_saved(node: Any, name: str) -> Any:
    """A tensor that a node has saved, None if it has not, FREED if its backward has run."""
    try:
        return saved(node, name)
    except RuntimeError:
        return FREED


def nodes_near(node: Any) -> Iterator[Any]:
    """Nodes from the loss back to the last layers, nearest first."""
    waiting, n = deque([node]), 0
    while waiting and n < MAX_NODES:
        if (now := waiting.popleft()) is not None:
            n += 1
            yield now
            if node_name(now) not in LAYERS:
                waiting.extend(at for at, _ in now.next_functions)


def behind(node: Any) -> Any:
    """The node that gives a node its input, past those that only reshape it."""
    return behind_shapes(next((n for n, _ in node.next_functions if n is not None), None))


def behind_shapes(node: Any) -> Any:
    """This node, or the first behind it that does more than reshape."""
    while node is not None and node_name(node) in SHAPING:
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return node


def is_opaque(node: Any) -> bool:
    """Whether a node hides several operations; names of torch's own nodes end in a number."""
    if node is None:
        return False
    own = str(node.name())
    return isinstance(node, BackwardCFunction) or own.endswith("Backward") or "CppNode" in own
