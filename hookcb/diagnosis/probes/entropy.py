"""Cross-entropy of the best constant prediction, and of a perfect one, for given labels."""

import math
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from hookcb.diagnosis.probes.loss_graph import LossGraph

Losses = tuple[float, float]  # of the best constant, and of a perfect prediction


def losses_of_bits(y: Tensor, graph: LossGraph) -> Losses:
    """Losses for targets between 0 and 1, of which ones may have weights; each column has its constant."""
    weight = 1.0 if graph.class_weights is None else graph.class_weights.float()

    def loss(p: Tensor) -> float:
        ones, zeros = weight * p, 1 - p
        return float((_x_log_x(ones + zeros) - _x_log_x(ones) - _x_log_x(zeros)).mean())

    return loss(y.mean(0)), loss(y)


def losses_of_classes(batches: Sequence[Tensor], graph: LossGraph) -> Losses:
    """Losses for class indices, or soft targets `(N, C, …)`; NaN for soft targets with weights of classes."""
    if not batches[0].is_floating_point():
        return _losses_of_indices(batches, graph)
    if graph.has_weights or graph.smoothing:
        return math.nan, math.nan
    y = torch.cat(list(batches)).float()
    rows = y.transpose(0, 1).flatten(1).T if y.ndim > 1 else y[None]
    return _entropy(rows.mean(0)), float(-_x_log_x(rows).sum(1).mean())


def _losses_of_indices(batches: Sequence[Tensor], graph: LossGraph) -> Losses:
    """Means over batches, because each divides by the weights of its own samples."""
    indices = [y[(y >= 0) & (y != graph.ignored)].long().flatten() for y in batches]
    n = max([graph.n_classes, *(int(y.max()) + 1 for y in indices if y.numel())])
    weights = torch.ones(n) if graph.class_weights is None else graph.class_weights.float()
    counts = [torch.bincount(y, minlength=n) for y in indices if y.numel()]
    if not counts or len(weights) != n:
        return math.nan, math.nan
    weights = weights.to(counts[0].device)
    # the loss of a sample of class c is -(own of c) log p of c - sum of rest * log p
    own, rest = (1 - graph.smoothing) * weights, graph.smoothing / n * weights
    shares = torch.stack([(x * own + x.sum() * rest) / (x * weights).sum() for x in counts]).mean(0)
    both = own + rest
    perfect = _x_log_x(own + rest.sum()) - (_x_log_x(rest).sum() - _x_log_x(rest) + _x_log_x(both))
    perfect_of = [float((x * perfect).sum() / (x * weights).sum()) for x in counts]
    return _entropy(shares), fmean(perfect_of)


def _entropy(shares: Tensor) -> float:
    """Smallest loss -sum of share * log p over all p; the shares need not sum to 1."""
    return float(_x_log_x(shares.sum()) - _x_log_x(shares).sum())


def _x_log_x(x: Tensor) -> Tensor:
    return torch.xlogy(x, x)
