"""Metrics: quality of the predictions in a validation."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from fastcore.basics import camel2snake
from torch import Tensor

from hookcb.core import orders
from hookcb.core.batch import batch_size, describe, map_leaves
from hookcb.core.callback import Callback
from hookcb.core.console import warn
from hookcb.records.store import read_numbers

COLUMNS = ("epoch", "train_loss", "valid_loss", "time")


@runtime_checkable
class Metric(Protocol):
    """A metric that accumulates over batches, such as one of torchmetrics."""

    def update(self, pred: Any, target: Any) -> Any:
        """Adds a batch."""

    def compute(self) -> Any:
        """Returns the value over all batches since the last reset."""

    def reset(self) -> Any:
        """Forgets all batches."""


class SampleMean:
    """Average over samples of the values of batches, which stay on their device until they are read.

    Attributes:
        values: value of each batch.
        sizes: number of samples in each.
    """

    def __init__(self) -> None:
        self.values: list[float | Tensor] = []
        self.sizes: list[int] = []

    def add(self, value: float | Tensor, size: int) -> None:
        """Adds a batch."""
        self.values.append(value)
        self.sizes.append(size)

    def sums(self, first: int = 0) -> list[float]:
        """Sum over samples from batch `first` on, and their number."""
        values, sizes = read_numbers(self.values, first)[first:], self.sizes[first:]
        return [sum(v * n for v, n in zip(values, sizes, strict=True)), sum(sizes)]


class Mean(SampleMean):
    """Average of a function over samples.

    Args:
        function: called as `function(pred, *yb)`; returns a scalar.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def update(self, pred: Any, *yb: Any) -> None:
        value = self.function(pred, *yb)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"metric {metric_name(self.function)!r} returned a tensor of shape {tuple(value.shape)}; "
                "reduce it to one number, as with .mean()"
            )
        self.add(value.detach() if isinstance(value, Tensor) else float(value), batch_size((*yb, pred)))

    def compute(self) -> float:
        total, n = self.sums()
        return total / n

    def reset(self) -> None:
        self.values, self.sizes = [], []


class Metrics(Callback):
    """Computes metrics in every validation, for the epoch's row; attached by `Learner(metrics=…)`.

    With `on_train=True` it computes them on training batches instead, as `train_accuracy`: of the predictions
    that were trained on, so of weights that change within the epoch, with dropout.

    Values of a function are averaged over batches, weighted by batch size. That is exact for a mean over
    samples, such as accuracy, but not for others, such as F1; for these, use an object that accumulates.

    Args:
        metrics: functions `(pred, *yb) -> scalar`, or objects with `update(pred, *yb)`, `compute()` and
            `reset()`; one, several, none, or a dict of names and metrics.
        on_train: whether to compute them in training; nothing waits for the device until the epoch's end.
        name: name of the callback in the learner.

    Raises:
        TypeError: If a metric is neither a function nor such an object.
        ValueError: If two metrics have the same name, or one has the name of a column of the Recorder.

    >>> from hookcb import Metrics, accuracy
    >>> Metrics({"top1": accuracy}).names
    ['top1']
    """

    order = orders.METRICS

    def __init__(
        self,
        metrics: Callable[..., Any] | Metric | Iterable[Any] | Mapping[str, Any] | None = (),
        *,
        on_train: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name or ("train_metrics" if on_train else None))
        self.on_train, self.run_train, self.run_valid = on_train, on_train, not on_train
        named = [(f"train_{name}" if on_train else name, metric) for name, metric in _named(metrics)]
        self.names = [name for name, _ in named]
        for name, metric in named:
            if self.names.count(name) > 1 or name in COLUMNS:
                raise ValueError(
                    f"a metric cannot be named {name!r}, as another column has that name; rename it, "
                    "as in metrics={'my_name': metric}"
                )
            if inspect.isclass(metric) or not (callable(metric) or isinstance(metric, Metric)):
                raise TypeError(
                    "a metric must be a function (pred, *yb) -> scalar, or an object, not a class, with "
                    f"update, compute and reset, got {metric!r:.80}"
                )
        self._metrics = [metric if isinstance(metric, Metric) else Mean(metric) for _, metric in named]

    @property
    def has_all_names(self) -> bool:
        """Whether `names` has all columns that this adds; an object may compute several."""
        return all(isinstance(metric, Mean) for metric in self._metrics)

    def before_train(self) -> None:
        if self.on_train:
            self._begin()

    def before_validate(self) -> None:
        if not self.on_train:
            self._begin()

    def _begin(self) -> None:
        # a nested validation must not reset the metrics of the outer one
        metrics = copy.deepcopy(self._metrics) if self.learn.is_nested else self._metrics
        for metric in metrics:
            metric.reset()
        self.phase_state["metrics"] = metrics

    def after_cancel_batch(self) -> None:
        self.phase_state["cancelled"] = True

    def after_batch(self) -> None:
        if self.phase_state.pop("cancelled", False) or "metrics" not in self.phase_state:
            return  # cancelled, or attached in the middle of a validation
        self.phase_state["seen"] = True
        for name, metric in zip(self.names, self.phase_state["metrics"], strict=True):
            try:
                with torch.no_grad():
                    _on_device(metric, self.pred).update(_detached(self.pred), *self.yb)
            except Exception as error:
                error.add_note(f"metric {name!r} of pred {describe(self.pred)} and yb {describe(self.yb)}")
                raise

    def after_train(self) -> None:
        if self.on_train:
            self._end()

    def after_validate(self) -> None:
        if not self.on_train:
            self._end()

    def _end(self) -> None:
        ranks, metrics = self.learn.ranks, self.phase_state.get("metrics", [])
        if not ranks.max([self.phase_state.get("seen", False)])[0]:
            return
        sums = iter(ranks.sum([x for metric in metrics if isinstance(metric, Mean) for x in metric.sums()]))
        for name, metric in zip(self.names, metrics, strict=False):
            value = next(sums) / next(sums) if isinstance(metric, Mean) else self._compute(name, metric)
            # a MetricCollection of torchmetrics returns a dict
            values = value if isinstance(value, Mapping) else {name: value}
            self.learn.row.update({key: float(v) for key, v in values.items()})

    def _compute(self, name: str, metric: Any) -> Any:
        """Value of a metric that accumulates; on several ranks, that of rank 0 if it cannot merge them."""
        ranks = self.learn.ranks
        if ranks.world == 1 or callable(getattr(metric, "sync", None)):  # torchmetrics merges in compute
            return metric.compute()
        warn(
            f"metric {name!r} has no sync(), so its value is that of the samples of rank 0 only", stacklevel=2
        )
        value = metric.compute() if ranks.is_main else None
        return ranks.gather(value)[0]


def _named(metrics: Any) -> list[tuple[str, Any]]:
    if isinstance(metrics, Mapping):
        return list(metrics.items())
    single = callable(metrics) or isinstance(metrics, str) or not isinstance(metrics, Iterable)
    several = [metrics] if single else metrics
    return [(metric_name(metric), metric) for metric in several if metric is not None]


def _detached(pred: Any) -> Any:
    return map_leaves(Tensor.detach, pred, lambda x: isinstance(x, Tensor))


def _on_device(metric: Any, pred: Any) -> Any:
    return metric.to(pred.device) if hasattr(metric, "to") and isinstance(pred, Tensor) else metric


def metric_name(metric: Any) -> str:
    """Name of a function, also inside a `functools.partial`; for an object, its class in snake case."""
    while isinstance(metric, partial):
        metric = metric.func
    name = str(getattr(metric, "__name__", camel2snake(type(metric).__name__)))
    return name if name.isidentifier() else "metric"  # a lambda


def accuracy(pred: Tensor, target: Tensor) -> Tensor:
    """Share of samples with the largest score at the target class, 0..1.

    Args:
        pred: scores, `(N, C)` or `(N, …, C)`.
        target: class indices, `(N)` or `(N, …)`.
    """
    return (pred.argmax(dim=-1) == target).float().mean()
