"""Terms of a loss, as its autograd graph shows them: hand-written losses and penalties too."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from hookcb.core import graph
from hookcb.core.torch_private import input_shape, saved

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
MEAN = 1  # value of torch's enum of reductions
SAME_PROBABILITY = (*graph.BOUNDING, *graph.SHAPING, *graph.CHOOSING, "Add")
SUM = (*graph.SHAPING, "Sum", "ClampMin", "Add")  # of probabilities
BROADCAST = ("Expand",)  # of an input of a loss
MAX_NODES = 64


class Term(NamedTuple):
    """One term of a loss."""

    kind: str  # "cross-entropy", "nll" (without log-softmax), "mse" …, "penalty" on parameters, "" for others
    scale: float = math.nan  # factor of the mean over samples; NaN for a sum or if unknown, inf for a penalty
    takes: str = ""  # what it must be given: "scores", "log-probabilities", "probabilities", "values", or ""
    given: Any = None  # node of what the model gives to it
    is_exact: bool = True  # whether it is a plain mean or sum of that kind, without weights of samples
    is_complement: bool = False  # whether it is the logarithm of 1 - p
    target: Tensor | None = None  # what torch's loss compares with
    ignored: int = -100  # class index that torch's loss ignores
    has_weights: bool = False  # whether classes or elements have weights
    class_weights: Tensor | None = None  # those of classes, or of ones; None if there are others
    smoothing: float = 0.0
    shape: tuple[int, ...] = ()  # of the elements that are compared, after broadcasting
    given_shape: tuple[int, ...] = ()  # of what the model gives to it, before that; () if unknown
    node: Any = None  # that computes it


def read_terms(node: Any) -> list[Term]:
    """Terms of the loss with this node; runs nothing and keeps nothing.

    The logarithms of p and 1 - p are one term, a binary cross-entropy written by hand. A logarithm of 1 - p
    alone, or of two different outputs, has no kind: it may be one side of a game.
    """
    terms = list(_terms(node, 1.0, [MAX_NODES]))
    logs = [term for term in terms if term.kind == "log"]
    others = [term for term in terms if term.kind != "log"]
    if len(logs) == 2 and len({graph.peel(log.given, (*graph.SHAPING, "Neg")) for log in logs}) == 1:
        logs, kind = [min(logs, key=_is_of_complement)], "binary cross-entropy"
    else:
        kind = "cross-entropy" if len(logs) == 1 and _is_of_classes(logs[0]) else ""
    terms = [*(term._replace(kind=kind) for term in logs), *others]
    return [x._replace(scale=math.nan) if math.isinf(x.scale) and x.kind != "penalty" else x for x in terms]


def main_term(terms: Sequence[Term]) -> Term | None:
    """The first term of a known kind; exact ones come first."""
    known = [term for term in terms if term.kind not in ("", "penalty")]
    return next((term for term in known if term.is_exact), known[0] if known else None)


def _is_of_classes(term: Term) -> bool:
    """Whether a term is minus the logarithm of the probability of one of several classes."""
    shape = input_shape(term.given)
    is_minus_log = term.takes == "probabilities" and not _is_of_complement(term) and not term.scale < 0
    return is_minus_log and len(shape) > 1 and shape[-1] > 1


def _is_of_complement(term: Term) -> bool:
    return term.is_complement or graph.name(term.given) == "Neg"


def _terms(node: Any, scale: float, budget: list[int]) -> Iterator[Term]:
    budget[0] -= 1
    if node is None or budget[0] < 0:
        return
    if (leaf := _leaf(node, scale)) is not None:
        yield leaf
        return
    name, inputs, factor = graph.name(node), graph.inputs(node), factor_of(node)
    if name == "Add" and (smoothed := _smoothed(inputs, scale)) is not None:
        yield smoothed
    elif name in ("Add", "Sub") and len(inputs) == 2:
        yield from _terms(inputs[0], scale, budget)
        yield from _terms(inputs[1], scale * saved(node, "alpha", 1) * (-1 if name == "Sub" else 1), budget)
    elif factor is not None and len(inputs) == 1:
        yield from _terms(inputs[0], scale * factor, budget)
    elif name == "Mul" and len(inputs) == 1:  # by soft targets, or by weights of samples
        shape = input_shape(node)
        for term in _terms(inputs[0], math.copysign(math.inf, scale), budget):
            is_exact = term.is_exact and term.kind == "log"
            yield term._replace(is_exact=is_exact, shape=shape or term.shape)
    else:
        near = (at for at in graph.near(node, MAX_NODES) if graph.name(at) in (*KINDS, "LogSoftmax"))
        found = [leaf._replace(is_exact=False) for at in near if (leaf := _leaf(at, math.nan))]
        yield from found or [Term("penalty" if _is_of_params(node) else "", scale)]


def _leaf(node: Any, scale: float) -> Term | None:
    """The term that a node is, None if it only combines or scales others."""
    name, inputs = graph.name(node), graph.inputs(node)
    given = graph.peel(inputs[0]) if inputs else None
    if name in KINDS:
        return _torch_loss(node, name, scale, given)
    if name in ("LogSoftmax", "LogSigmoid"):  # of soft targets, or with the label's score chosen by hand
        return Term("cross-entropy" if name == "LogSoftmax" else "log", -scale, "scores", given)
    if name in graph.LOGARITHMS and input_shape(node):  # not of a loss
        return _logarithm(-scale, given)
    is_square = name == "Mul" and len(inputs) == 2 and inputs[0] is inputs[1]
    if name == "Abs" or is_square or (name == "Pow" and saved(node, "exponent") == 2):
        return _difference(node, scale, "mae" if name == "Abs" else "mse")
    return None


def _smoothed(parts: list[Any], scale: float) -> Term | None:
    """Term of torch's cross-entropy with label smoothing, the sum of these two nodes; None for other sums."""
    if [graph.name(part) for part in parts] != ["Mul", "Mul"]:
        return None
    nll, share = graph.behind(parts[0]), _number_of(parts[0], "Mul")
    scores = graph.behind(nll)
    if KINDS.get(graph.name(nll)) != "nll" or share is None or graph.name(scores) != "LogSoftmax":
        return None
    is_same = any(at is scores for at in graph.near(parts[1], MAX_NODES))
    return _torch_loss(nll, graph.name(nll), scale, scores)._replace(smoothing=1 - share) if is_same else None


def _torch_loss(node: Any, name: str, scale: float, given: Any) -> Term:
    target, weight, of_ones = (graph.read_saved(node, x) for x in ("target", "weight", "pos_weight"))
    is_binary, first = name.startswith("Binary"), node.next_functions[0][0]
    is_weighted = is_binary and weight is not None  # each element
    if is_weighted or saved(node, "reduction", MEAN) != MEAN:
        scale = math.copysign(math.inf, scale)
    of_classes = of_ones if is_binary and weight is None else weight
    return _kind_of_torch(name, scale, given)._replace(
        target=target if isinstance(target, Tensor) else None,
        ignored=saved(node, "ignore_index", -100),
        has_weights=weight is not None or of_ones is not None,
        class_weights=of_classes if isinstance(of_classes, Tensor) else None,
        shape=input_shape(first),
        given_shape=input_shape(graph.peel(first, BROADCAST)),
        node=node,
    )


def _kind_of_torch(name: str, scale: float, given: Any) -> Term:
    if KINDS[name] == "nll":
        if graph.name(given) == "LogSoftmax":
            return Term("cross-entropy", scale, "scores", graph.behind(given))
        if graph.name(given) in graph.LOGARITHMS:
            return _logarithm(scale, graph.behind(given))._replace(kind="cross-entropy")
        return Term("nll", scale, "log-probabilities", given)
    if name == "BinaryCrossEntropy":
        return _logarithm(scale, given)._replace(kind=KINDS[name])
    return Term(KINDS[name], scale, "scores" if name.startswith("Binary") else "values", given)


def _logarithm(scale: float, node: Any) -> Term:
    """Logarithm of a probability, which may be bounded, normalized, or have a small number added."""
    is_complement = False
    while True:
        name, inputs = graph.name(node), graph.inputs(node)
        is_ratio = name == "Div" and len(inputs) == 2 and inputs[0] in islice(graph.chain(inputs[1], SUM), 4)
        is_flipped = graph.is_subtracted(node)
        is_same = len(inputs) == 1 and (is_flipped or name in SAME_PROBABILITY)
        is_complement ^= is_flipped
        if not (is_same or is_ratio):  # p / p.sum()
            return Term("log", scale, "probabilities", node, is_complement=is_complement)
        node = inputs[0]


def _difference(node: Any, scale: float, kind: str) -> Term | None:
    """Squared or absolute errors against constants; None for anything else, such as two parts of a model."""
    given = graph.behind(node)
    of = graph.only_input(given)
    if graph.name(given) not in ("Sub", "Rsub") or of is None:
        return None
    shape, before = input_shape(node), input_shape(graph.peel(of, BROADCAST))
    return Term(kind, scale, "values", graph.peel(of), shape=shape, given_shape=before, node=node)


def _is_of_params(node: Any) -> bool:
    """Whether a node depends on parameters alone, and on no layer's output."""
    nodes = list(graph.walk([node], at_most=MAX_NODES + 1))
    is_other = any(graph.name(at) in graph.LAYERS or graph.is_opaque(at) for at in nodes)
    return len(nodes) <= MAX_NODES and not is_other


def factor_of_mean(node: Any) -> float:
    """Number by which a loss multiplies a mean; NaN if it is unknown, or the loss is no mean."""
    product = 1.0
    while (name := graph.name(node)) in graph.SCALING:
        factor = _number_of(node, name)
        if factor is None:
            return math.nan
        product, node = product * factor, graph.only_input(node)
    is_mean = saved(node, "reduction", None) == MEAN if name in KINDS else name == "Mean"
    return product if is_mean else math.nan


def factor_of(node: Any) -> float | None:
    """Factor by which a node scales its only input, inf or NaN if unknown; None if it does more than that."""
    name = graph.name(node)
    if name in graph.SCALING:
        return _number_of(node, name)
    known = {"Sum": math.inf, "Neg": -1.0}  # of a sum it is not known, but positive
    return known.get(name, 1.0 if name in ("Mean", *graph.SHAPING, *graph.CHOOSING) else None)


def _number_of(node: Any, name: str) -> float | None:
    if len(graph.inputs(node)) > 1:
        return None  # of two parts of the model
    others = graph.factors(node)
    if others is None:  # factors of a loss that is a number are numbers
        return None if input_shape(node) else math.nan
    if any(isinstance(x, Tensor) and x.numel() != 1 for x in others):
        return None
    is_known = bool(others) and not (isinstance(others[0], Tensor) and not others[0].is_cpu)
    number = float(others[0]) if is_known else math.nan
    return number if name == "Mul" else 1 / number if number else math.nan
