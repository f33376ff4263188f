"""dropout.extreme, dropout.in_eval, dropout.scores: dropout that drops too much, or is in the wrong place."""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hookcb.core import graph
from hookcb.core.torch_private import Dropout, saved
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.layer_rows import LayerRows
from hookcb.diagnosis.measurements.loss_terms import main_term, read_terms
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules

EXTREME = 0.9
N_MEANT = 3  # evaluations of a batch in a row of validations, as for a mean over masks of dropout
MAX_ELEMENTS = 65_536  # of a mask that are read
SURE = 5.0  # standard deviations


@fault(
    "dropout.extreme",
    Site.MODULES,
    needs="model",
    leads_to="loss.flat loss.trivial unit.dead loss.init act.scale",
    subject="dropout",
)
class ExtremeDropout(Fault):
    """A dropout layer that drops nine in ten elements or more.

    Formula: p ≥ 0.9.

    Source: Srivastava et al., "Dropout", 2014, who drop 0.5 of the hidden units and 0.2 of the inputs.
    """

    headline = "A dropout drops nearly everything"
    severity = "warning"
    passed = "extreme dropout"

    def on_model(self, run: Run) -> None:
        for name, m in named_modules(run.loop.model).items():
            p = m.p if isinstance(m, Dropout) else 0.0
            p = max(p, m.dropout) if isinstance(m, nn.MultiheadAttention | nn.RNNBase) else p
            if p >= EXTREME:
                self.see(
                    f"Layer {name or type(m).__name__} drops {p:.0%} of its input during training (limit "
                    f"{EXTREME:.0%}).",
                    at=name,
                    value=p,
                    causes=("p is the share that is dropped, not the share that is kept",),
                    next_steps=("Try p=0.1 to 0.5",),
                )


@fault("dropout.in_eval", Site.MODULES, needs="batches", exact=True)
class DropoutInEval(Fault):
    """Dropout that stays on in eval mode, so that the same input gets another answer each time.

    Exact: the first call in eval mode without gradients draws a mask of dropout. A note if three calls or
    more with the same inputs follow each other without a training batch between them, as Monte Carlo dropout
    makes on purpose.

    Source: Gal & Ghahramani, "Dropout as a Bayesian Approximation", 2016, for dropout that is meant.
    """

    headline = "Dropout stays on in eval mode"
    severity = "warning"
    passed = "dropout in eval mode"
    uses = (Operations,)

    def findings(self, run: Run) -> Iterator[Result]:
        operations = run.measured(Operations)
        is_meant = (n := operations.n_alike) >= N_MEANT
        often = f" It evaluates the same batch {n} times, as Monte Carlo dropout does." if is_meant else ""
        seen = [
            self.finding(
                f"{f'Layer {layer}' if layer else 'The model'} applies dropout in eval mode, so it gives "
                f"different answers for one input, and validations are noisier and worse than it is.{often}",
                "info" if is_meant else "warning",
                at=layer,
                when=step,
                causes=("F.dropout(x, p), or dropout_p of an attention, without training=self.training",),
                next_steps=(
                    "Pass training=self.training to F.dropout, and dropout_p=p if self.training else 0.0 to "
                    "an attention",
                ),
            )
            for layer, step in operations.dropping.items()
        ]
        unless = "" if operations.has_evaluated else "too little was seen of the calls in eval mode"
        return self.told(run, seen, unless)


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
