"""dropout.scores: dropout between the last layer and the loss."""

import math
from typing import Any

from torch import Tensor

from hookcb.core import graph
from hookcb.core.torch_private import saved
from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.measurements.layer_rows import LayerRows
from hookcb.diagnosis.measurements.loss_terms import main_term, read_terms
from hookcb.diagnosis.run import Run

MAX_ELEMENTS = 65_536  # of a mask that are read
SURE = 5.0  # standard deviations


@fault("dropout.scores", Site.LOSS, needs="batch graph", leads_to="loss.* update.* head.range", exact=True)
class ScoresDropout(Fault):
    """A dropout after the last layer, whose output the loss gets.

    Exact: the node of the autograd graph before the loss, or before its softmax, sigmoid or ReLU: a dropout,
    or a product with a mask of 0 and 1 / (1 - p).

    Source: Srivastava et al., "Dropout", 2014, who drop inputs and hidden units, not outputs.
    """

    headline = "Dropout follows the last layer"
    severity = "warning"
    passed = "dropout before the loss"
    unless = "too little was seen of the input of the loss"
    uses = (LayerRows,)

    def on_first_graph(self, run: Run) -> None:
        self.look(run.loop.loss_node, run.measured(LayerRows).last, run.step)

    def look(self, node: Any, layer: str, step: int | None) -> None:
        """Reads the graph of a loss; `layer` is the last one that was called."""
        share = dropped_share(node)
        if not math.isnan(share):
            self.unless = ""
        if share > 0:
            self.see(
                f"Dropout sets {share:.0%} of the model's output to 0 just before the loss, which then "
                "compares zeros, not predictions, with the targets.",
                at=layer,
                when=(step, step),
                value=share,
                causes=("a dropout after the last layer",),
                next_steps=("Move the dropout before the last linear layer, or remove it",),
            )


def dropped_share(node: Any) -> float:
    """Share of the loss's input that a dropout sets to 0; 0 without dropout, NaN if the input is unknown."""
    if (main := main_term(read_terms(node))) is None:
        return math.nan
    given = graph.behind(main.given) if graph.name(main.given) in graph.HEADS else main.given
    if graph.name(given) == "NativeDropout":
        return float(saved(given, "p", math.nan))
    if graph.name(given) != "Mul" or graph.only_input(given) is None:
        return 0.0
    if (factors := graph.factors(given)) is None:
        return math.nan
    return max((_zeros_of_mask(x) for x in factors if isinstance(x, Tensor)), default=0.0)


def _zeros_of_mask(x: Tensor) -> float:
    """Share of zeros of a mask of 0 and 1 / (1 - p), as dropout draws it; 0 for other tensors."""
    x = x.detach().flatten()[:MAX_ELEMENTS].double()
    top = float(x.max()) if x.numel() else 0.0
    if top <= 1 or not bool(((x == 0) | (x == top)).all()):
        return 0.0
    p, zeros = 1 - 1 / top, float((x == 0).double().mean())
    return zeros if zeros and abs(zeros - p) <= SURE * math.sqrt(p * (1 - p) / x.numel()) else 0.0
