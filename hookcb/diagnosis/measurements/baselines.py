"""Losses of the best constant prediction, and of a perfect one, for given labels."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hookcb.diagnosis.measurements.loss_graph import LossGraph


class Losses(NamedTuple):
    """Losses of predictions that do not come from a model."""

    constant: float = math.nan  # of the best prediction that is the same for all samples
    perfect: float = 0.0  # of the targets themselves as the prediction, above 0 if they are soft or smoothed
    noise: float = 0.0  # standard deviation of `constant` from batch to batch


def losses_of_bits(batches: Sequence[Tensor], graph: LossGraph) -> Losses:
    """Losses for targets between 0 and 1, of which ones may have weights; each column has its constant."""
    y = torch.cat(list(batches)).float()
    weight = y.new_ones(()) if graph.class_weights is None else graph.class_weights.float()
    if weight.ndim >= y.ndim:  # a weight for each sample
        return Losses()
    weight = weight.to(y.device)

    def best(p: Tensor) -> Tensor:
        ones, zeros = weight * p, 1 - p
        return _x_log_x(ones + zeros) - _x_log_x(ones) - _x_log_x(zeros)

    p = weight * y.mean(0) / (weight * y.mean(0) + 1 - y.mean(0))
    errors = -torch.xlogy(weight * y, p) - torch.xlogy(1 - y, 1 - p)
    return Losses(float(best(y.mean(0)).mean()), float(best(y).mean()), noise_of(errors, batches))


def noise_of(errors: Tensor, batches: Sequence[Tensor]) -> float:
    """Standard deviation of the mean error from batch to batch."""
    means = torch.stack([x.mean() for x in torch.split(errors, [len(y) for y in batches])])
    return float(means.std(correction=0))


def losses_of_classes(batches: Sequence[Tensor], graph: LossGraph) -> Losses:
    """Losses for class indices, or soft targets `(N, C, …)`; NaN for soft targets with weights of classes."""
    if not batches[0].is_floating_point():
        return _losses_of_indices(batches, graph)
    if graph.has_weights or graph.smoothing:
        return Losses()
    rows = [y.float().transpose(0, 1).flatten(1).T if y.ndim > 1 else y[None].float() for y in batches]
    perfect = -_x_log_x(torch.cat(rows)).sum(1).mean()
    return _losses(torch.stack([x.mean(0) for x in rows]), float(perfect))


def _losses_of_indices(batches: Sequence[Tensor], graph: LossGraph) -> Losses:
    """Means over batches, because each divides by the weights of its own samples."""
    indices = [y[(y >= 0) & (y != graph.ignored)].long().flatten() for y in batches]
    indices = [y for y in indices if y.numel()]
    n = max([graph.n_classes, *(int(y.max()) + 1 for y in indices)])
    weights = batches[0].new_ones(n, dtype=torch.float32)
    if graph.class_weights is not None:
        weights = graph.class_weights.float()
    if not indices or len(weights) != n:
        return Losses()
    counts = torch.stack([torch.bincount(y, minlength=n) for y in indices])  # by batch and class
    weights = weights.to(counts.device)
    # the loss of a sample of class c is -(own of c) log p of c - sum of rest * log p
    own, rest = (1 - graph.smoothing) * weights, graph.smoothing / n * weights
    divisors = (counts * weights).sum(1)
    shares = (counts * own + counts.sum(1, keepdim=True) * rest) / divisors[:, None]
    both = own + rest
    perfect = _x_log_x(own + rest.sum()) - (_x_log_x(rest).sum() - _x_log_x(rest) + _x_log_x(both))
    return _losses(shares, float(((counts * perfect).sum(1) / divisors).mean()))


def _losses(shares: Tensor, perfect: float) -> Losses:
    mean = shares.mean(0)
    errors = -torch.xlogy(shares, mean / mean.sum()).sum(1)
    return Losses(float(errors.mean()), perfect, float(errors.std(correction=0)))


def _x_log_x(x: Tensor) -> Tensor:
    return torch.xlogy(x, x)
