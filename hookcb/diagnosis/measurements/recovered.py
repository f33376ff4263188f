"""Targets recovered from the gradient of a loss, where the loss itself has freed them."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.diagnosis.measurements.loss_graph import main_term
from hookcb.diagnosis.measurements.loss_terms import read_terms

MAX_ERROR = 1e-3  # of the loss that the recovered targets give; rounding to float32 stays below 1e-4


def recovered_target(node: Any, pred: Any, grad: Tensor | None, loss: Any) -> Tensor | None:
    """Targets of the batch whose backward has begun, None if they cannot be told for certain.

    The gradient of a mean loss shows them: 2 (x - y) / n of squares, (p - y) / n of a cross-entropy, p the
    softmax or sigmoid of the scores x. They count only if the loss that they give is that of the training.
    On a GPU nothing is recovered, as comparing the two would wait for it. `grad` is the gradient with respect
    to `pred`; the graph that begins at `node` has freed its saved tensors.
    """
    main = main_term(read_terms(node))
    outputs = [x for _, x in parts(pred) if isinstance(x, Tensor) and x.grad_fn is not None]
    if main is None or grad is None or not isinstance(loss, Tensor) or not grad.is_cpu:
        return None
    end = graph.peel(outputs[0].grad_fn) if len(outputs) == 1 else None
    is_log = main.kind == "cross-entropy" and graph.name(end) == "LogSoftmax"
    if end is None or (graph.behind(end) if is_log else end) is not main.given:
        return None
    x, g = outputs[0].detach().float(), grad.float()
    if x.shape != g.shape or not x.numel():
        return None
    scale = main.scale if math.isfinite(main.scale) and main.scale else 1.0
    value = float(loss) / scale
    for y, own in _candidates(main.kind, "log-probabilities" if is_log else main.takes, x, g / scale):
        if abs(float(own) - value) <= MAX_ERROR * abs(value):
            return y
    return None


def _candidates(kind: str, takes: str, x: Tensor, g: Tensor) -> list[tuple[Tensor, Tensor]]:
    n = x.numel()
    if kind == "mse":
        y = x - g * n / 2
        return [(y, F.mse_loss(x, y))]
    if kind == "binary cross-entropy" and takes == "scores":
        y = _bits(x.sigmoid() - g * n)
        return [(y, F.binary_cross_entropy_with_logits(x, y))]
    if kind == "binary cross-entropy" and takes == "probabilities" and bool(((x >= 0) & (x <= 1)).all()):
        y = _bits(x - g * n * x * (1 - x))
        return [(y, F.binary_cross_entropy(x, y.clamp(0, 1)))] if bool(((y >= 0) & (y <= 1)).all()) else []
    if kind in ("cross-entropy", "nll") and x.ndim > 1:
        dims = (x.ndim - 1, 1) if x.ndim > 2 else (1,)
        return [_classes(x, g, dim, is_log=takes == "log-probabilities") for dim in dims]
    return []


def _bits(y: Tensor) -> Tensor:
    """Targets without the rounding of those that are 0 or 1."""
    whole = y.round()
    return torch.where((y - whole).abs() < MAX_ERROR, whole, y)


def _classes(x: Tensor, g: Tensor, dim: int, is_log: bool) -> tuple[Tensor, Tensor]:
    """Class indices, and the loss that they give; of the gradients in a row only the target's is negative."""
    x, g = x.movedim(dim, -1), g.movedim(dim, -1)
    y = g.argmin(-1)
    logs = x if is_log else x.log_softmax(-1)
    counts = (g != 0).any(-1)
    own = -logs.gather(-1, y[..., None])[..., 0]
    return y.where(counts, -100), own[counts].mean()
