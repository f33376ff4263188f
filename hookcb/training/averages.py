"""Metrics: functions of a batch, and objects that accumulate over batches."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from fastcore.basics import camel2snake
from torch import Tensor

from hookcb.core.batch import batch_size


@runtime_checkable
class Metric(Protocol):
    """What accumulates over batches, as the metrics of torchmetrics do."""

    def update(self, pred: Any, target: Any) -> Any:
        """Takes in a batch."""

    def compute(self) -> Any:
        """The value over all batches since the last reset."""

    def reset(self) -> Any:
        """Forgets all batches."""


class Mean:
    """A function's average over samples; its values stay on their device until `compute`.

    Args:
        function: called as `function(pred, *yb)`, gives a scalar.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.reset()

    def update(self, pred: Any, *yb: Any) -> None:
        """Takes in a batch, which weighs by its size.

        Raises:
            ValueError: if the function gives a tensor of more than one element, or of none.
        """
        value = self.function(pred, *yb)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"metric {metric_name(self.function)!r} gave a tensor of shape {tuple(value.shape)}; "
                "reduce it to one number, as with .mean()"
            )
        self.values.append(value.detach() if isinstance(value, Tensor) else torch.tensor(float(value)))
        self.sizes.append(batch_size((*yb, pred)))

    def compute(self) -> float:
        """The average over samples since the last reset."""
        values = torch.stack([value.reshape(()).cpu().double() for value in self.values])
        sizes = torch.tensor(self.sizes, dtype=torch.float64)
        return float(values @ sizes / sizes.sum())

    def reset(self) -> None:
        """Forgets all batches."""
        self.values: list[Tensor] = []
        self.sizes: list[int] = []


def metric_name(metric: Any) -> str:
    """A function's own name, also through `functools.partial`; an object's class in snake case."""
    while isinstance(metric, partial):
        metric = metric.func
    name = str(getattr(metric, "__name__", camel2snake(type(metric).__name__)))
    return name if name.isidentifier() else "metric"  # a lambda


def accuracy(pred: Tensor, target: Tensor) -> Tensor:
    """Share of samples whose largest score is the target's, 0..1.

    Args:
        pred: scores, `(N, C)` or `(N, …, C)`.
        target: class indices, `(N)` or `(N, …)`.
    """
    return (pred.argmax(dim=-1) == target).float().mean()
