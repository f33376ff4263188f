"""head.range: targets that the model's last operation cannot reach."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.core import graph
from hookcb.core.torch_private import saved
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss_terms import factor_of
from hookcb.diagnosis.measurements.output import SLACK, SQUARES, Output, name_of
from hookcb.diagnosis.run import Run

RANGES = {  # of the outputs of operations
    "Softmax": (0.0, 1.0),
    "Sigmoid": (0.0, 1.0),
    "Hardsigmoid": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Relu": (0.0, math.inf),
    "Softplus": (0.0, math.inf),
    "Exp": (0.0, math.inf),
    "LogSoftmax": (-math.inf, 0.0),
    "LogSigmoid": (-math.inf, 0.0),
}
MAX_SHARE = 0.05  # of targets out of range


class Head(NamedTuple):
    """The operation that limits a model's output, and the range of that, whatever the weights are."""

    name: str  # of the operation in the graph, "Sigmoid"
    low: float
    high: float

    def __str__(self) -> str:
        ends = f"{self.low:.3g} to {self.high:.3g}".replace("inf", "∞")
        return f"range {ends} of the {name_of(self.name)}"


@fault("head.range", Site.LOSS, needs="batch graph", leads_to=EVERYTHING, exact=True)
class HeadOutOfReach(Fault):
    """Targets that the model's last operation cannot reach, of a squared, absolute or Huber error.

    Formula: share of the targets of the first batch outside the range of the softmax, sigmoid, tanh, ReLU or
    the like that the output comes from, scaled and shifted as it is. Limit: 5 %, as a few outliers may be
    out of range on purpose.
    """

    headline = "The model cannot reach its targets"
    passed = "targets out of the model's reach"
    uses = (Output,)

    def on_first_graph(self, run: Run) -> None:
        output = run.measured(Output)
        if (seen := output.beside(*SQUARES)) is None or (head := read_head(seen.output)) is None:
            return
        y = seen.target.detach().float()
        share = float(((y < head.low - SLACK) | (y > head.high + SLACK)).float().mean())
        if share > MAX_SHARE:
            name = name_of(head.name)
            self.see(
                f"{share:.0%} of the targets are outside the {head} that the model ends in: they go from "
                f"{float(y.min()):.3g} to {float(y.max()):.3g}.",
                at=output.layer,
                when=run.step,
                value=share,
                causes=(f"a {name} at the end of a model for other targets",),
                next_steps=(f"Remove the {name}, so that a linear layer is last; or scale the targets",),
            )

    def findings(self, run: Run) -> Iterator[Result]:
        yield from self.told(run, self.seen, run.measured(Output).why_unknown())


def read_head(x: Tensor) -> Head | None:
    """Head of the model that computed `x`, None if no operation limits it or if that is unknown.

    Between the head and `x`, the output may be reshaped, and scaled or shifted by numbers. Numbers that are
    added do not stay in the graph: the shift is the difference between the mean of `x` and that of the scaled
    output of the head.
    """
    node, scale, is_shifted = x.grad_fn, 1.0, False
    while (name := graph.name(node)) not in (*RANGES, "Hardtanh"):
        if (factor := _factor(node, name)) is None or not math.isfinite(factor):
            return None
        scale *= factor
        is_shifted |= name in graph.SHIFTING
        node = graph.only_input(node)
    ends = (saved(node, "min_val"), saved(node, "max_val")) if name == "Hardtanh" else RANGES[name]
    shift = _shift(x, node, scale) if is_shifted else 0.0
    if math.isnan(shift) or not all(isinstance(end, int | float) for end in ends):
        return None
    return Head(name, *sorted(shift + scale * end for end in ends))


def _factor(node: Any, name: str) -> float | None:
    """Factor of a node's only input; None if the node does more than reshape, scale or shift it."""
    if graph.only_input(node) is None:
        return None
    if name in graph.SHIFTING:
        return -1.0 if graph.is_subtracted(node) else 1.0
    return factor_of(node) if name in (*graph.SHAPING, *graph.SCALING, "Neg") else None


def _shift(x: Tensor, node: Any, scale: float) -> float:
    """The number added to `scale` times the head's output, NaN if it is not the same for all elements."""
    output = graph.read_saved(node, "result")
    if not isinstance(output, Tensor) or output.numel() != x.numel():
        return math.nan
    x, output = x.detach().double(), output.detach().double() * scale
    if not bool(torch.isclose(x.std(correction=0), output.std(correction=0), rtol=1e-3, atol=1e-6)):
        return math.nan
    return round(float(x.mean() - output.mean()), 6)
