"""Gradient flow: how large gradients are along a model's depth, in a training or after one backward."""

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
from hookcb.gradients.capture import GradientReader, StepTaken, reduce_steps
from hookcb.gradients.checks import GradientCheck, GradientHistory, ParamHistory, check_history
from hookcb.gradients.stats import GRAD_STATS
from hookcb.hooks.params import find_params
from hookcb.records.tables import Column, fitted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

READ = (*GRAD_STATS, "mean_abs")  # columns as they are stored


class LayerFlow(NamedTuple):
    """How large the gradients of one layer's own parameters are."""

    layer: str
    mean: float  # |gradient|, over all elements
    max: float  # largest finite |gradient|


class GradientFlow(JupyterMixin, L):  # type: ignore[misc]  # fastcore ships no types
    """Mean and largest |gradient| of each layer in the order of the model: an `L` of `LayerFlow`.

    Layers without a gradient are not in it. Printed, and in a notebook, it is a table.
    """

    def plot(self, figsize: tuple[float, float] | None = None, ax: "Axes | None" = None) -> "Figure":
        """The classic figure: a bar for the largest and a line for the mean, on a logarithmic axis.

        Raises:
            ModuleNotFoundError: without matplotlib.
            ValueError: when there is nothing to draw.
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
    """Flow by layer, of the number of elements and the statistics of each parameter, in order."""
    layers: dict[str, list[str]] = {}
    for name in numels:
        if name in stats and not math.isnan(stats[name]["nonfinite"]):  # else it had no gradient
            layers.setdefault(name.rpartition(".")[0] or name, []).append(name)

    def of(layer: str, names: Sequence[str]) -> LayerFlow:
        mean = sum(stats[name]["mean_abs"] * numels[name] for name in names if numels[name])
        largest = [most for name in names if not math.isnan(most := stats[name]["abs_max"])]
        n = sum(numels[name] for name in names)
        return LayerFlow(layer, mean / max(1, n), max(largest, default=math.nan))

    return GradientFlow(of(layer, names) for layer, names in layers.items())


def gradient_flow(model: nn.Module) -> GradientFlow:
    """Mean and largest |gradient| of each layer, after a `backward()`; `.plot()` draws it.

    Of parameters above 65,536 elements the mean is that of 1,024 of them, off by 3 % as a rule. Reads
    gradients as they are: scaled under a GradScaler, before or after clipping.

    Raises:
        ValueError: where no parameter has a gradient.

    >>> import torch
    >>> from hookcb import gradient_flow
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Tanh())
    >>> model(torch.zeros(3, 2)).sum().backward()
    >>> gradient_flow(model)[0]
    LayerFlow(layer='0', mean=0.0, max=0.0)
    """
    read, _ = _read(model)
    return flow_of({param.name: param.p.numel() for param in find_params(model)}, read)


def check_gradients(model: nn.Module) -> GradientCheck:
    """What is wrong with the gradients after a `backward()`: an empty list where nothing was found.

    NaN and infinite ones, vanishing and exploding ones relative to the model's own scale, parameters that
    have none. One batch says less than a training: `GradientHealth` looks at many.

    Raises:
        ValueError: where no parameter has a gradient.

    >>> import torch
    >>> from hookcb import check_gradients
    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.tensor([[float("nan"), 1.0]])).sum().backward()
    >>> print(check_gradients(model)[0])
    weight has 1 NaN or infinite gradient
    """
    read, reader = _read(model)
    norms = [stats["norm"] for stats in read.values()]
    history = GradientHistory(
        steps=[0],
        total_norm=[math.sqrt(sum(norm**2 for norm in norms))],
        mean_norm=[sum(norms) / len(norms)],
        lr=[math.nan],
        scale=[1.0],
        skipped=[0.0],
        params={
            param.name: ParamHistory(param.kind, param.p.ndim, {k: [v] for k, v in read[param.name].items()})
            for param in find_params(model)
            if param.name in read
        },
        without_grad=reader.without_grad,
        is_of_fit=False,
    )
    return check_history(history)


def _read(model: nn.Module) -> tuple[dict[str, dict[str, float]], GradientReader]:
    """The statistics of the gradients that are there, by name of the parameter."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r:.80}, no nn.Module")
    reader = GradientReader(find_params(model))
    with torch.no_grad():
        step = StepTaken(reader.before_step(), math.nan, 1.0)
        if not step.takens:
            raise ValueError(
                "no parameter has a gradient; call this after loss.backward(), before zero_grad()"
            )
        reader.after_step(step)
        ((_, by_device),) = reduce_steps([step])
    found = {name: values[0].tolist() for columns in by_device for name, values in columns.items()}
    order = [param.name for param in reader.params if param.name in found]
    return {name: dict(zip(READ, found[name], strict=True)) for name in order}, reader
