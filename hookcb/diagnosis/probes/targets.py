"""Targets of inspected batches, and the loss of the best constant prediction for them."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hookcb.core.batch import parts
from hookcb.diagnosis.probes.loss_graph import LossGraph

MAX_ELEMENTS = 16_384  # of a batch that are kept, spread over it
MAX_BATCHES = 64
MAX_DRIFT = 0.1  # of the variance; two halves of 160 shuffled values each differ by 0.0125


class Targets:
    """Copies of targets, on their device until they are read."""

    def __init__(self) -> None:
        self._batches: list[Tensor] = []

    @property
    def is_known(self) -> bool:
        """Whether targets were seen."""
        return bool(self._batches)

    def add_batch(self, yb: Any) -> None:
        """Copies the first tensor of a batch's targets; every n-th sample of a large one."""
        y = next((y for _, y in parts(yb) if isinstance(y, Tensor) and y.ndim and y.numel()), None)
        if y is None or y.is_complex() or len(self._batches) == MAX_BATCHES:
            return
        stride = math.ceil(y.numel() / MAX_ELEMENTS)
        kept = y.detach()[::stride]
        first = self._batches[0] if self._batches else kept
        if (kept.shape[1:], kept.dtype, kept.device) == (first.shape[1:], first.dtype, first.device):
            self._batches.append(kept.clone())

    def constant(self, graph: LossGraph) -> float:
        """Loss of the best prediction that is the same for all samples; NaN if unknown.

        That is the mean of each column for squares, its median for absolute values and Huber losses, and the
        class shares for cross-entropy. It is unknown for values that drift, such as those that a model makes
        itself in reinforcement learning.
        """
        if not self._batches or not graph.is_pure or graph.has_weights or math.isnan(graph.scale):
            return math.nan
        y = torch.cat(self._batches)
        if graph.kind == "cross-entropy":
            return graph.scale * float(_entropy(_class_shares(y, graph.ignored)).sum())
        y = y.float()
        if graph.kind == "binary cross-entropy":
            p = y.mean(0)
            return graph.scale * float((_entropy(p) + _entropy(1 - p)).mean())
        spread = y.var(0, correction=0).mean()
        if self._drift() > MAX_DRIFT * float(spread):
            return math.nan
        if graph.kind == "mse":
            return graph.scale * float(spread)
        middle = y.median(0).values
        if graph.kind == "mae":
            return graph.scale * float((y - middle).abs().mean())
        if graph.kind == "huber":
            return graph.scale * float(F.smooth_l1_loss(middle.expand_as(y), y))
        return math.nan

    def _drift(self) -> float:
        """Mean square of the difference between the means of the first and the second half of the batches."""
        half = len(self._batches) // 2
        first, second = (
            torch.cat(x).float().mean(0) for x in (self._batches[: half or 1], self._batches[half:])
        )
        return float((first - second).square().mean())


def _class_shares(y: Tensor, ignored: int) -> Tensor:
    """Share of each class in class indices, without ignored ones, or in soft targets `(N, C, …)`."""
    if y.is_floating_point():
        return y.transpose(0, 1).flatten(1).float().mean(1) if y.ndim > 1 else y.float()
    counts = torch.bincount(y[(y >= 0) & (y != ignored)].long().flatten())
    return counts / counts.sum()


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p)
