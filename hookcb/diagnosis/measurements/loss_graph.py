"""Reads from the autograd graph what kind of loss it is and what it is computed from."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from hookcb.core import graph
from hookcb.diagnosis.measurements.loss_terms import MAX_NODES, Term, main_term, read_terms

MAX_OPERATIONS = 1_000  # that are counted


class LossGraph(NamedTuple):
    """Kind of a loss and its input, as read from its autograd graph."""

    kind: str = ""  # as of a `Term`, "" for any other loss
    is_pure: bool = False  # whether the loss is that and nothing else, except for scale and sign
    scale: float = math.nan  # factor of the mean over samples; NaN for a sum, and if unknown
    applies: str = ""  # "softmax" or "sigmoid" if the loss applies that itself
    head: str = ""  # operation that produces the input of the loss: "Softmax", "Sigmoid" or "Relu"
    hidden_by: str = ""  # operation that hides the input of the loss
    takes: str = ""  # input that it expects: "scores", "log-probabilities", "probabilities", "values"
    is_raw: bool = False  # whether its input is the raw output of a linear or convolutional layer
    has_penalty: bool = False  # whether it is that and penalties on parameters
    ignored: int = -100  # class index that it ignores
    has_weights: bool = False  # whether classes or elements have weights
    class_weights: Tensor | None = None  # copy of those of classes, or of ones; None if there are others
    smoothing: float = 0.0
    n_classes: int = 0  # number of scores of a cross-entropy, 0 if unknown
    kinds: tuple[str, ...] = ()  # of all losses in a sum, without penalties; () if it is none for certain

    @property
    def sure_kind(self) -> str:
        """Kind of the loss if it is nothing else, except for penalties; else ""."""
        return self.kind if self.is_pure or self.has_penalty else ""

    @property
    def why_hidden(self) -> str:
        """Reason why the kind or input of the loss is unknown, "" if both are known."""
        if self.hidden_by:
            hiding = graph.HIDING.get(self.hidden_by, f"{self.hidden_by}, a custom autograd function,")
            return f"{hiding} hides what the loss is computed from"
        return "" if self.kind else "the kind of the loss is unknown"


def read_loss(node: Any) -> LossGraph:
    """Reads the nodes next to the loss; runs nothing and keeps nothing alive.

    It may be called while the backward runs, when nodes have freed their saved tensors; a factor of the loss
    is then unknown.
    """
    terms = read_terms(node)
    main = main_term(terms)
    if main is None:
        hiding = (graph.name(at) for at in graph.near(node, MAX_NODES) if graph.is_opaque(at))
        return LossGraph(hidden_by=next(hiding, ""))
    head, hidden_by = head_of(main.given)
    applied = "sigmoid" if main.kind == "binary cross-entropy" else "softmax"
    return LossGraph(
        main.kind,
        len(terms) == 1 and main.is_exact,
        main.scale,
        applied if main.takes == "scores" else "",
        head,
        hidden_by,
        main.takes,
        graph.name(main.given) in graph.LAYERS,
        len(terms) > 1 and main.is_exact and all(_is_penalty(x) for x in terms if x is not main),
        main.ignored,
        main.has_weights,
        None if main.class_weights is None else main.class_weights.detach().clone(),
        main.smoothing,
        main.given_shape[1] if main.kind == "cross-entropy" and len(main.given_shape) > 1 else 0,
        _kinds(terms),
    )


def _kinds(terms: Sequence[Term]) -> tuple[str, ...]:
    """Kinds of the losses of a sum, or of one that is negated as a whole; () for any other sum."""
    losses = [term for term in terms if not _is_penalty(term)]
    is_sum = all(x.scale > 0 for x in losses) or all(x.scale < 0 for x in losses) or len(losses) == 1
    return tuple(x.kind for x in losses) if is_sum and all(x.kind and x.is_exact for x in losses) else ()


def _is_penalty(term: Term) -> bool:
    return term.kind == "penalty" and not term.scale < 0


def last_parameters(node: Any) -> Iterator[Tensor]:
    """Parameters of the last layers before the loss."""
    layers = (at for at in graph.near(node, MAX_NODES) if graph.name(at) in graph.LAYERS)
    leaves = (graph.leaf(graph.peel(behind)) for at in layers for behind in graph.inputs(at))
    return (leaf for leaf in leaves if isinstance(leaf, nn.Parameter))


def n_between(node: Any, output: Any) -> int:
    """Number of operations from a model's output to its loss.

    It is 0 if the one does not lead to the other, or there are layers too, as of another call of the model or
    of a discriminator.
    """
    outputs = set(graph.roots(output)) - {node}
    n, is_reached = 0, False
    for at in graph.walk([node], outputs, MAX_OPERATIONS):
        if graph.name(at) in graph.OF_LAYERS or isinstance(graph.leaf(at), nn.Parameter):
            return 0
        n, is_reached = n + 1, is_reached or not outputs.isdisjoint(graph.inputs(at))
    return n if is_reached else 0


def head_of(node: Any) -> tuple[str, str]:
    """`head` and `hidden_by` of a `LossGraph` that gets the output of this node."""
    name = graph.name(node := graph.peel(node))
    return name if name in graph.HEADS else "", name if graph.is_opaque(node) else ""


def penalty_of(loss: Tensor) -> Tensor | None:
    """Part of a loss that is not its main term; a number on its device, None if unknown.

    Call it before the backward, which frees what the main term is computed from.
    """
    main = main_term(read_terms(loss.grad_fn))
    value = None if main is None or not math.isfinite(main.scale) else _value(main)
    return None if main is None or value is None else loss.detach() - main.scale * value


def _value(term: Term) -> Tensor | None:
    """Mean over samples of a term, from what its node has saved."""
    given = graph.read_saved(term.node, "self")
    if not isinstance(given, Tensor):
        return None
    given, name = given.detach(), graph.name(term.node)
    if name in ("Abs", "Pow", "Mul"):  # of differences
        return (given.abs() if name == "Abs" else given.square()).mean()
    if (y := term.target) is None:
        return None
    weight = term.class_weights
    if name in ("NllLoss", "NllLoss2D"):  # of log-probabilities, of which log_softmax changes nothing
        return F.cross_entropy(given, y, weight, ignore_index=term.ignored, label_smoothing=term.smoothing)
    if name == "BinaryCrossEntropyWithLogits":
        return F.binary_cross_entropy_with_logits(given, y, pos_weight=weight)
    if name == "BinaryCrossEntropy":
        return F.binary_cross_entropy(given, y)
    return F.mse_loss(given, y) if name == "MseLoss" else None
