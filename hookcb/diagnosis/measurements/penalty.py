"""Share of a loss that is a penalty on parameters."""

import math

import torch.nn.functional as F
from torch import Tensor

from hookcb.core import graph
from hookcb.diagnosis.measurements.loss_graph import main_term
from hookcb.diagnosis.measurements.loss_terms import Term, read_terms


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
