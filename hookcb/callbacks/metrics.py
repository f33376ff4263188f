"""Metrics: how good the predictions of a validation are."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from fastcore.basics import camel2snake
from torch import Tensor

from hookcb.batch import batch_size, describe
from hookcb.callback import Callback


@runtime_checkable
class Metric(Protocol):
    """What accumulates over batches, as the metrics of torchmetrics do."""

    def update(self, pred: Any, target: Any) -> Any:
        """Takes in a batch."""

    def compute(self) -> Any:
        """The value over all batches since the last reset."""

    def reset(self) -> Any:
        """Forgets all batches."""


def accuracy(pred: Tensor, target: Tensor) -> Tensor:
    """Share of samples whose largest score is the target's, 0..1.

    Args:
        pred: scores, `(N, C)` or `(N, …, C)`.
        target: class indices, `(N)` or `(N, …)`.
    """
    return (pred.argmax(dim=-1) == target).float().mean()


class Metrics(Callback):
    """Computes metrics in every validation, for the epoch's row; attached by `Learner(metrics=…)`.

    A function's values are averaged over samples: batches weigh by their size. That is exact for a mean over
    samples, such as accuracy, and not for others, such as F1: for these give an object that accumulates.

    Args:
        metrics: functions `(pred, *yb) -> scalar`, or objects with `update(pred, *yb)`, `compute()` and
            `reset()`; one, several, none, or a mapping from name to metric.
        name: what the learner calls this callback.

    Raises:
        TypeError: where one is neither.
        ValueError: where two have the same name.

    >>> from hookcb import Metrics, accuracy
    >>> Metrics({"top1": accuracy}).names
    ['top1']
    """

    order = 50

    def __init__(
        self,
        metrics: Callable[..., Any] | Metric | Iterable[Any] | Mapping[str, Any] | None = (),
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if isinstance(metrics, Mapping):
            named = list(metrics.items())
        else:
            several = metrics if isinstance(metrics, Iterable) and not callable(metrics) else [metrics]
            named = [(_name(metric), metric) for metric in several if metric is not None]
        self.names = [name for name, _ in named]
        for name, metric in named:
            if self.names.count(name) > 1:
                raise ValueError(
                    f"two metrics are named {name!r}; name them in a mapping, metrics={{'name': metric}}"
                )
            if inspect.isclass(metric) or not (callable(metric) or isinstance(metric, Metric)):
                raise TypeError(
                    f"metric {metric!r:.80} is no function (pred, *yb) -> scalar, and no object with update, "
                    "compute and reset; of a class give an instance"
                )
        self._metrics = [metric if isinstance(metric, Metric) else _Mean(metric) for _, metric in named]
        self._cancelled = False

    def before_validate(self) -> None:
        self._seen = False
        for metric in self._metrics:
            metric.reset()

    def after_cancel_batch(self) -> None:
        self._cancelled = True

    def after_batch(self) -> None:
        cancelled, self._cancelled = self._cancelled, False
        if self.training or cancelled:
            return
        self._seen = True
        for name, metric in zip(self.names, self._metrics, strict=True):
            try:
                _on_device(metric, self.pred).update(self.pred, *self.yb)
            except Exception as error:
                error.add_note(f"metric {name!r} of pred {describe(self.pred)} and yb {describe(self.yb)}")
                raise

    def after_validate(self) -> None:
        for name, metric in zip(self.names, self._metrics, strict=True) if self._seen else ():
            value = metric.compute()
            several = (
                value if isinstance(value, Mapping) else {name: value}
            )  # a MetricCollection gives a dict
            self.learn.row.update({key: float(v) for key, v in several.items()})


class _Mean:
    """A function's average over samples; its values stay on their device until `compute`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.reset()

    def update(self, pred: Any, *yb: Any) -> None:
        value = self.function(pred, *yb)
        self.values.append(value.detach() if isinstance(value, Tensor) else torch.tensor(float(value)))
        self.sizes.append(batch_size((pred, *yb)))

    def compute(self) -> float:
        values = torch.stack([value.reshape(()).double().cpu() for value in self.values])
        sizes = torch.tensor(self.sizes, dtype=torch.float64)
        return float(values @ sizes / sizes.sum())

    def reset(self) -> None:
        self.values: list[Tensor] = []
        self.sizes: list[int] = []


def _name(metric: Any) -> str:
    while isinstance(metric, partial):
        metric = metric.func
    return str(getattr(metric, "__name__", camel2snake(type(metric).__name__)))


def _on_device(metric: Any, pred: Any) -> Any:
    return metric.to(pred.device) if hasattr(metric, "to") and isinstance(pred, Tensor) else metric
