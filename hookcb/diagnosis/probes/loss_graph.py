"""Kind, scale and input of a loss, as its autograd graph shows them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hookcb.diagnosis.probes.loss_terms import (
    HIDING,
    LAYERS,
    Term,
    behind_shapes,
    is_opaque,
    node_name,
    nodes_near,
    read_terms,
)

HEADS = ("Softmax", "Sigmoid", "Relu")


class LossGraph(NamedTuple):
    """What a loss is.

    Attributes:
        kind: "cross-entropy", "nll" of what is no log-softmax, "binary cross-entropy", "mse", "mae", "huber",
            "kl", or "" for anything else.
        is_pure: whether the loss is that and nothing else, but for its scale and sign.
        scale: factor of the mean over samples; NaN of a sum, and if it is not known.
        applies: "softmax" or "sigmoid", if the loss does that itself.
        head: operation whose output the loss is given, "Softmax", "Sigmoid", "Relu", or "".
        hidden_by: the operation that hides what is behind it, "" if nothing does.
        takes: what the loss must be given: "scores", "log-probabilities", "probabilities", "values", or "".
        is_raw: whether it is given the output of a linear or convolutional layer as it is.
        has_penalty: whether a penalty on parameters is added to it.
    """

    kind: str = ""
    is_pure: bool = False
    scale: float = math.nan
    applies: str = ""
    head: str = ""
    hidden_by: str = ""
    takes: str = ""
    is_raw: bool = False
    has_penalty: bool = False

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
    """Reads what a loss is from the nodes next to it; runs nothing.

    It may be called while the backward runs, when the loss's nodes have freed what they had saved; a number
    that the loss was multiplied by is then not known.

    Args:
        node: `loss.grad_fn`, None if there is none.
    """
    terms = read_terms(node)
    main = main_term(terms)
    if main is None:
        return LossGraph(hidden_by=next((node_name(at) for at in nodes_near(node) if is_opaque(at)), ""))
    head, hidden_by = _head(main.given)
    return LossGraph(
        main.kind,
        len(terms) == 1 and main.is_exact,
        main.scale,
        _applied(main),
        head,
        hidden_by,
        main.takes,
        node_name(main.given) in LAYERS,
        any(term.kind == "penalty" and term.scale > 0 for term in terms),
    )


def main_term(terms: Sequence[Term]) -> Term | None:
    """The first term of a known kind; one that is nothing else comes before others."""
    known = [term for term in terms if term.kind not in ("", "penalty")]
    return next((term for term in known if term.is_exact), known[0] if known else None)


def target_of(node: Any) -> Tensor | None:
    """Targets that a loss of torch has saved for its backward, None if unknown."""
    main = main_term(read_terms(node))
    return None if main is None else main.target


def _applied(term: Term) -> str:
    if term.takes != "scores":
        return ""
    return "sigmoid" if term.kind == "binary cross-entropy" else "softmax"


def head_of(node: Any) -> tuple[str, str]:
    """`head` and `hidden_by` of a `LossGraph` that is given what this node makes."""
    return _head(behind_shapes(node))


def _head(node: Any) -> tuple[str, str]:
    name = node_name(node)
    return name if name in HEADS else "", name if is_opaque(node) else ""
