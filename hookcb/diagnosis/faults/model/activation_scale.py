"""act.scale: activations that grow from layer to layer, or come close to an overflow."""

import math
from collections.abc import Iterator

from hookcb.core.text import as_layer
from hookcb.diagnosis.advice import begins_large, init_advice, lower_rate
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.layer_rows import LayerRows
from hookcb.diagnosis.rules import before, finite, format_factor, in_order, median, persistent, ratio, weights
from hookcb.diagnosis.run import Layer, Passed, Run, Series, Skipped, Span
from hookcb.diagnosis.verdict import Finding

MAX_GROWTH, N_FIRST = 1e3, 3  # std(output) / std(input), in the first three records and in all
MIN_INPUT_STD = 0.01  # a smaller std counts as this: a normalization may and should scale up a small input
MAX_SHARE_OF_DTYPE = 0.1  # of the largest number of the dtype


@fault(
    "act.scale",
    Site.MODULES,
    needs="activations",
    leads_to="grad.* loss.* update.* unit.* nonfinite.* attn.collapse act.collapse",
    shown_by="layers.std",
)
class ActivationScale(Fault):
    """Activations that grow from layer to layer, or come close to the largest number of their dtype.

    Formula: std(output) / std(input), both in the median of the first three records and in that of all, since
    a regression may grow its output as it learns, but does not begin that way. Limit: 1,000, for a warning; a
    layer that keeps the scale has 1. Or max |output| above a tenth of the largest number of its dtype in two
    of ten records, for an error: a sum of ten such numbers is infinite.

    Source: He et al., "Delving Deep into Rectifiers", 2015, for layers that keep the scale.
    """

    headline = "Activations grow from layer to layer"
    uses = (LayerRows,)

    def findings(self, run: Run) -> Iterator[Result]:
        until = run.converged_at()
        unmasked = [x for x in in_order(run) if not _is_masked(x)]
        stds = {x.name: _scale(before(x.series("std"), until)) for x in unmasked}
        if not (layers := [x for x in unmasked if stds[x.name] > 0]):
            yield Skipped(f"no layer was inspected {N_FIRST} times before convergence")
            return
        for layer in layers:
            sizes = layer.series("abs_max")
            shares = Series(sizes.steps, [ratio(x, layer.largest) for x in sizes.values])
            if span := persistent(shares, lambda x: MAX_SHARE_OF_DTYPE < x < math.inf, 2, 10):
                yield self._near_overflow(layer, max(finite(sizes.values)), span)
                return
        base = median(before(run.measured(Inputs).std, until).values)
        base = max(base, MIN_INPUT_STD) if base > 0 else stds[layers[0].name]
        worst = max(layers, key=lambda layer: stds[layer.name])
        grown = stds[worst.name] / base
        if grown > MAX_GROWTH:
            yield self._grown(run, layers, worst, stds, base)
        else:
            yield Passed(f"scale of activations (×{format_factor(grown)})", grown, MAX_GROWTH)

    def _grown(
        self, run: Run, layers: list[Layer], worst: Layer, stds: dict[str, float], base: float
    ) -> Finding:
        upto = layers[: layers.index(worst) + 1]
        previous = [base, *(stds[layer.name] for layer in upto)]
        growth = [stds[layer.name] / was for layer, was in zip(upto, previous, strict=False)]
        # the first one, if all layers grow alike
        at = next(i for i, x in enumerate(growth) if x >= max(growth) / 2)
        layer, most, steps = upto[at], stds[worst.name] / base, worst.series("std").steps
        first = next((step for step, x in worst.series("std") if x > MAX_GROWTH * base), steps[0])
        chain = [p for p in weights(run) if p.layer in {x.name for x in upto} and begins_large([p])]
        return self.finding(
            f"The output of {as_layer(worst.name)} has {format_factor(most)} times the standard "
            f"deviation of the input (limit {MAX_GROWTH:,.0f}). It grows most at {as_layer(layer.name)}, "
            f"×{format_factor(growth[at])}.",
            "warning",
            at=layer,
            when=(first, steps[-1]),
            value=most,
            limit=MAX_GROWTH,
            causes=(
                *(("weights that are too large at initialization",) if chain else ()),
                "no normalization between the layers",
            ),
            next_steps=(
                *((init_advice(chain),) if chain else ()),
                *lower_rate(run, worst),
                "Add normalization between the layers",
            ),
        )

    def _near_overflow(self, layer: Layer, most: float, span: Span) -> Finding:
        return self.finding(
            f"The output of {as_layer(layer.name)} reaches {most:.2g}, and the maximum of its dtype is "
            f"{layer.largest:.2g} (limit {MAX_SHARE_OF_DTYPE:.0%} of it): it may soon overflow.",
            "error",
            at=layer,
            when=span,
            value=most / layer.largest,
            limit=MAX_SHARE_OF_DTYPE,
            causes=("activations that grow from layer to layer", "float16, which has a maximum of 65,504"),
            next_steps=("Use bfloat16 instead of float16, or add a normalization layer before this layer",),
        )


def _scale(series: Series) -> float:
    """The smaller of the medians of the first records and of all: the scale it has from the beginning."""
    is_known = len(series) >= N_FIRST
    return min(median(series.values[:N_FIRST]), median(series.values)) if is_known else math.nan


def _is_masked(layer: Layer) -> bool:
    """Whether its largest number is the same each time, as in scores that are masked with -1e9."""
    values = layer.series("abs_max").values
    return len(values) >= N_FIRST and min(values) == max(values) > 1e3
