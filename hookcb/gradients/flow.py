"""Size of gradients along the depth of a model, in a training or after one backward."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fastcore.foundation import L
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from torch import nn

from hookcb.core.console import as_text
from hookcb.gradients import plots
from hookcb.gradients.capture import GradientReader, StepCapture, reduce_steps
from hookcb.gradients.stats import GRAD_STATS
from hookcb.hooks.params import find_params
from hookcb.records.tables import Column, fitted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STORED = (*GRAD_STATS, "mean_abs")  # columns of a parameter in its store


class LayerFlow(NamedTuple):
    """Size of the gradients of one layer's own parameters."""

    layer: str
    mean: float  # |gradient|, over all elements
    max: float  # largest finite |gradient|


class GradientFlow(JupyterMixin, L):  # type: ignore[misc]  # fastcore ships no types
    """Mean and largest |gradient| of each layer with gradients, in the order of the model.

    A list (`L`) of `LayerFlow`; printed, and in a notebook, it is a table.
    """

    def plot(self, figsize: tuple[float, float] | None = None, ax: "Axes | None" = None) -> "Figure":
        """Plots a bar for the largest and a line for the mean of each layer, on a logarithmic axis.

        Raises:
            ModuleNotFoundError: Without matplotlib.
            ValueError: If there is nothing to draw.
        """
        return plots.flow_bars([tuple(layer) for layer in self], figsize, ax)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns: list[Column[Any]] = [
            Column("mean |gradient|", lambda layer: f"{layer.mean:.3g}", 1),
            Column("largest", lambda layer: f"{layer.max:.3g}"),
        ]
        title = "gradient flow, in the order of the model"
        yield fitted(self, [layer.layer for layer in self], columns, options, title=title)

    def __str__(self) -> str:
        return as_text(self)


def flow_of(numels: Mapping[str, int], stats: Mapping[str, Mapping[str, float]]) -> GradientFlow:
    """Flow by layer, from the number of elements and the statistics of each parameter."""
    layers: dict[str, list[str]] = {}
    for name in numels:
        if name in stats and not math.isnan(stats[name]["nonfinite"]):  # else it had no gradient
            layers.setdefault(name.rpartition(".")[0] or name, []).append(name)

    def flow(layer: str, names: Sequence[str]) -> LayerFlow:
        mean = sum(stats[name]["mean_abs"] * numels[name] for name in names if numels[name])
        largest = [x for name in names if not math.isnan(x := stats[name]["abs_max"])]
        n = sum(numels[name] for name in names)
        return LayerFlow(layer, mean / max(1, n), max(largest, default=math.nan))

    return GradientFlow(flow(layer, names) for layer, names in layers.items())


def gradient_flow(model: nn.Module) -> GradientFlow:
    """Mean and largest |gradient| of each layer, after a `backward()`; `.plot()` draws it.

    The mean of a parameter with more than 65,536 elements is that of 1,024 of them, usually within 3 %.
    Gradients are read as they are: scaled under a GradScaler, before or after clipping.

    Raises:
        TypeError: If `model` is not an nn.Module.
        ValueError: If no parameter has a gradient.

    >>> import torch
    >>> from hookcb import gradient_flow
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Tanh())
    >>> model(torch.zeros(3, 2)).sum().backward()
    >>> gradient_flow(model)[0]
    LayerFlow(layer='0', mean=0.0, max=0.0)
    """
    capture, stats = read_gradients(model)
    return flow_of({name: about[0] for name, about in capture.about.items()}, stats)


def read_gradients(model: nn.Module) -> tuple[StepCapture, dict[str, dict[str, float]]]:
    """The gradients of a model as they are now, and their statistics by name, in the order of the model.

    Raises:
        TypeError: If `model` is not an nn.Module.
        ValueError: If no parameter has a gradient.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {model!r:.80}")
    reader = GradientReader(find_params(model))
    with torch.no_grad():
        capture = reader.before_step()
        if not capture.about:
            raise ValueError(
                "no parameter has a gradient; call this after loss.backward(), before zero_grad()"
            )
        reader.after_step(capture)
        ((_, by_device),) = reduce_steps([capture])
    rows = {
        name: row
        for names, values in by_device
        for name, row in zip(names, values[:, 0].tolist(), strict=True)
    }
    return capture, {name: dict(zip(STORED, rows[name], strict=True)) for name in capture.about}
