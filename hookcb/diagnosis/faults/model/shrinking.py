"""init.shrinking: weights that begin too small for the number of layers."""

import math
from collections.abc import Iterator
from itertools import pairwise

from hookcb.core.text import as_layer
from hookcb.diagnosis import rules
from hookcb.diagnosis.advice import init_scale
from hookcb.diagnosis.fault import Fault, Result, Site, fault, findings_of
from hookcb.diagnosis.figure import Figure, over_names
from hookcb.diagnosis.measurements.layer_rows import LayerRows
from hookcb.diagnosis.run import Layer, Param, Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding

MIN_SIGNAL = 0.01  # of the first layer that is left in the last one; four layers of torch's default keep 0.02
MIN_LAYERS = 4
MIN_KEPT, MAX_KEPT = 0.05, 1.0  # by each layer; a single one that loses more is another fault
MAX_SCALE = 1.2  # times 1/sqrt(fan in), below which a weight begins too small for a ReLU; that keeps 1.4
FLAT = ("Sigmoid", "LogSigmoid", "Hardsigmoid")  # which shrink a signal however their weights begin
DEFAULT = 0.5, 0.65  # of torch's layers, 0.58
TROUBLE = ("act.collapse", "grad.attenuated", "loss.flat", "loss.trivial", "unit.dead", "update.too_small")


@fault(
    "init.shrinking",
    Site.MODULES,
    needs="activations gradients",
    leads_to="unit.dead act.collapse grad.attenuated update.too_small loss.flat loss.trivial",
    shown_by="layers.std",
)
class ShrinkingSignal(Fault):
    """Weights that begin so small that the differences between samples shrink from layer to layer.

    Formula: root of the variance across the batch in the output of the last hidden layer / that of the first
    one, in the first inspected batch, with every layer between the two keeping between 0.05 and 1 of it,
    over at least four layers with weights, half of which begin below 1.2 / sqrt(fan in). Limit: 0.01. Only
    told if something shows that little is learned: act.collapse, grad.attenuated, loss.flat, loss.trivial,
    unit.dead or update.too_small. A ReLU keeps the variance if its weights have a std of 1.41 / sqrt(fan
    in); torch's default has 0.58 and leaves 0.4 per layer, 0.001 after eight. Layers with sigmoids are left
    to `grad.attenuated`, as no initialization keeps their signal.

    Source: He et al., "Delving Deep into Rectifiers", 2015.
    """

    headline = "The signal shrinks from layer to layer"
    severity = "warning"
    uses = (LayerRows,)

    def findings(self, run: Run) -> Iterator[Result]:
        hidden, head = _weight_by_layer(run), rules.place_of_head(run)
        layers = [x for x in rules.in_order(run) if x.name in hidden and x.place < head]
        known = [(layer, x) for layer in layers if math.isfinite(x := _signal(layer)) and x > 0]
        if len(known) < MIN_LAYERS or len(known) < len(layers):
            yield Skipped(f"fewer than {MIN_LAYERS} layers in a row had outputs of several samples compared")
            return
        sizes = [x for _, x in known]
        left, kept = sizes[-1] / sizes[0], [b / a for a, b in pairwise(sizes)]
        scale = rules.median(init_scale(hidden[layer.name]) for layer, _ in known)
        is_gradual = min(kept) > MIN_KEPT and max(kept) < MAX_KEPT
        is_flat = any(layer.kind in FLAT for layer in run.layers.values())
        if left >= MIN_SIGNAL:
            text = f"a signal that shrinks from layer to layer (×{rules.format_factor(left)})"
            yield Passed(text, left, MIN_SIGNAL)
        elif is_flat or not is_gradual or not scale < MAX_SCALE:
            yield Skipped("the signal shrinks, but not because all weights begin too small for a ReLU")
        elif not any(f.severity != "info" for code in TROUBLE for f in findings_of(code, run)):
            yield Passed("a signal that is too small to learn from")
        else:
            shares = {layer.name: x / sizes[0] for layer, x in known}
            title = "differences between samples / those after the first layer, before the first step"
            figure = over_names(title, shares, MIN_SIGNAL)
            yield self._shrinking(list(hidden), known[0][0], known[-1][0], left, scale, len(kept), figure)

    def _shrinking(
        self, hidden: list[str], first: Layer, last: Layer, left: float, scale: float, n: int, figure: Figure
    ) -> Finding:
        default = ", torch's default" if DEFAULT[0] < scale < DEFAULT[1] else ""
        n_layers = hidden.index(last.name) - hidden.index(first.name) + 1
        return self.finding(
            f"The differences between samples shrink ×{left ** (1 / n):.2g} per layer over {n} layers: "
            f"{as_layer(last.name)} begins with {left:.1g} of those after {as_layer(first.name)} (limit "
            f"{MIN_SIGNAL:g}), so the last layers see nearly the same for every sample.",
            at=first,
            when=0,
            value=left,
            limit=MIN_SIGNAL,
            causes=(
                f"weights that begin with a std of {scale:.2g} / sqrt(fan in){default}, while a ReLU needs "
                "1.4",
                "many layers without normalization or a shortcut",
            ),
            next_steps=(
                f"Initialize the {n_layers} layers with torch.nn.init.kaiming_normal_(layer.weight, "
                "nonlinearity='relu')",
                "Or add normalization or residual connections",
            ),
            figure=figure,
        )


def _weight_by_layer(run: Run) -> dict[str, Param]:
    """The weight of each linear or convolutional layer, by its name."""
    return {p.layer: p for p in rules.weights(run) if p.kind == "Linear" or p.kind.startswith("Conv")}


def _signal(layer: Layer) -> float:
    """Root of the variance across the batch in the first record; NaN if it is unknown."""
    mean, std = (dict(layer.series(stat)) for stat in ("mean", "std"))
    for step, share in layer.series("spread"):
        if step in mean and step in std and share >= 0:
            return math.sqrt(share * (mean[step] ** 2 + std[step] ** 2))
    return math.nan
