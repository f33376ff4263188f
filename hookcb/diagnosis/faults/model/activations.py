"""act.scale, act.collapse, unit.saturated: outputs that grow, become alike, or stay at flat ends."""

import math
from collections.abc import Iterator

from hookcb.core.text import as_layer
from hookcb.diagnosis import rules
from hookcb.diagnosis.advice import begins_large, init_advice, is_trained, lower_rate
from hookcb.diagnosis.fault import Fault, Result, Site, fault, findings_of
from hookcb.diagnosis.figure import over_names, over_steps
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.layer_rows import LayerRows
from hookcb.diagnosis.run import SPARSE_KINDS, Layer, Passed, Run, Series, Skipped, Span
from hookcb.diagnosis.verdict import Finding, Severity

MAX_GROWTH, N_FIRST = 1e3, 3  # std(output) / std(input), in the first three records and in all
MIN_INPUT_STD = 0.01  # a smaller std counts as this: a normalization may and should scale up a small input
MAX_SHARE_OF_DTYPE = 0.1  # of the largest number of the dtype
MIN_SPREAD_LEFT = 1e-3  # by one layer, share of the spread before it; if more is left the loss is gradual
MIN_SPREAD = 1e-6  # variance across the batch / second moment; float32 resolves 1e-14 of a square
MAX_SATURATED_WARNING = 0.9  # share of units


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
        unmasked = [x for x in rules.in_order(run) if not _is_masked(x)]
        stds = {x.name: _scale(rules.before(x.series("std"), until)) for x in unmasked}
        if not (layers := [x for x in unmasked if stds[x.name] > 0]):
            yield Skipped(f"no layer was inspected {N_FIRST} times before convergence")
            return
        for layer in layers:
            sizes = layer.series("abs_max")
            shares = Series(sizes.steps, [rules.ratio(x, layer.largest) for x in sizes.values])
            if span := rules.persistent(shares, lambda x: MAX_SHARE_OF_DTYPE < x < math.inf, 2, 10):
                yield self._near_overflow(layer, max(rules.finite(sizes.values)), span, shares)
                return
        base = rules.median(rules.before(run.measured(Inputs).std, until).values)
        base = max(base, MIN_INPUT_STD) if base > 0 else stds[layers[0].name]
        worst = max(layers, key=lambda layer: stds[layer.name])
        grown = stds[worst.name] / base
        if grown > MAX_GROWTH:
            yield self._grown(run, layers[: layers.index(worst) + 1], stds, base)
        else:
            yield Passed(f"scale of activations (×{rules.format_factor(grown)})", grown, MAX_GROWTH)

    def _near_overflow(self, layer: Layer, most: float, span: Span, shares: Series) -> Finding:
        title = "largest |output| / the maximum of its dtype"
        return self.finding(
            f"The output of {as_layer(layer.name)} reaches {most:.2g}, and the maximum of its dtype is "
            f"{layer.largest:.2g} (limit {MAX_SHARE_OF_DTYPE:.0%} of it): it may soon overflow.",
            at=layer,
            when=span,
            value=most / layer.largest,
            limit=MAX_SHARE_OF_DTYPE,
            causes=("activations that grow from layer to layer", "float16, which has a maximum of 65,504"),
            next_steps=("Use bfloat16 instead of float16, or add a normalization layer before this layer",),
            figure=over_steps(title, {title: shares}, MAX_SHARE_OF_DTYPE),
        )

    def _grown(self, run: Run, layers: list[Layer], stds: dict[str, float], base: float) -> Finding:
        previous = [base, *(stds[layer.name] for layer in layers)]
        growth = [stds[layer.name] / was for layer, was in zip(layers, previous, strict=False)]
        # the first one, if all layers grow alike
        at = next(i for i, x in enumerate(growth) if x >= max(growth) / 2)
        worst, layer = layers[-1], layers[at]
        most, stats = stds[worst.name] / base, worst.series("std")
        first = next((step for step, x in stats if x > MAX_GROWTH * base), stats.steps[0])
        shares = {x.name: stds[x.name] / base for x in layers}
        chain = [p for p in rules.weights(run) if p.layer in {x.name for x in layers} and begins_large([p])]
        return self.finding(
            f"The output of {as_layer(worst.name)} has {rules.format_factor(most)} times the standard "
            f"deviation of the input (limit {MAX_GROWTH:,.0f}). It grows most at {as_layer(layer.name)}, "
            f"×{rules.format_factor(growth[at])}.",
            "warning",
            at=layer,
            when=(first, stats.steps[-1]),
            value=most,
            limit=MAX_GROWTH,
            causes=(
                *(("weights that are too large from the first step on",) if chain else ()),
                "no normalization between the layers",
            ),
            next_steps=(
                *((init_advice(chain),) if chain else ()),
                *lower_rate(run, worst),
                "Add normalization between the layers",
            ),
            figure=over_names("std of each output / that of the input", shares, MAX_GROWTH),
        )


def _scale(series: Series) -> float:
    """The smaller of the medians of the first records and of all: the scale it has from the beginning."""
    is_known = len(series) >= N_FIRST
    return min(rules.median(series.values[:N_FIRST]), rules.median(series.values)) if is_known else math.nan


def _is_masked(layer: Layer) -> bool:
    """Whether its largest number is the same each time, as in scores that are masked with -1e9."""
    values = layer.series("abs_max").values
    return len(values) >= N_FIRST and min(values) == max(values) > 1e3


@fault(
    "act.collapse",
    Site.MODULES,
    needs="activations",
    leads_to="loss.flat loss.trivial grad.attenuated unit.dead",
    shown_by="layers.spread",
    draws_limit=True,
)
class CollapsedActivations(Fault):
    """Outputs that are the same for every sample of a batch, so the samples can no longer be told apart.

    Formula: variance across the batch / second moment, the median over five records up to the last before
    convergence. Limit: 1e-6, a difference of a thousandth between samples. The finding names the first layer
    from which all layers to the end of the model have collapsed: layers that get a constant by design
    (positions, a learned query), or are followed by a batch norm that spreads their outputs, do not count. A
    head alone is not reported: a regression on targets of 2,000 ± 2 has such outputs. Only a note if the
    spread is lost gradually, by a factor below 1,000 at the layer named, as gradients then say more: a
    warning if they do not fade, the outputs are so from the first record on, and the model ends no better
    than a constant.

    Source: Schoenholz et al., "Deep Information Propagation", 2017, for how inputs become alike with depth.
    """

    headline = "Outputs are the same for every sample"
    uses = (LayerRows,)

    def findings(self, run: Run) -> Iterator[Result]:
        until, head = run.converged_at(), rules.place_of_head(run)
        layers = [x for x in rules.in_order(run) if x.kind not in SPARSE_KINDS]
        spreads = {x.name: rules.before(_spread(x), until) for x in layers}
        if not (known := [x for x in layers if len(spreads[x.name]) >= rules.LATEST]):
            yield Skipped(f"no layer had its outputs compared across the batch {rules.LATEST} times")
            return
        usual = {x.name: rules.median(spreads[x.name].values) for x in known}
        first, previous = None, math.inf
        for layer in reversed(known):
            if (span := rules.trailing(spreads[layer.name], lambda x: x < MIN_SPREAD)) is None:
                previous = usual[layer.name]
                break
            first = layer, span
        if first and first[0].place < head:
            layer, span = first
            is_gradual = usual[layer.name] > MIN_SPREAD_LEFT * previous
            yield self._collapsed(run, layer, spreads[layer.name], span, is_gradual)
        else:
            # all layers from the last one before the head on would have to collapse
            last = max((x.place for x in known if x.place < head), default=math.inf)
            most = max((usual[x.name] for x in known if x.place >= last), default=math.nan)
            text = f"outputs that are the same for all samples (spread {min(usual.values()):.1g} or more)"
            yield Passed(text, most, MIN_SPREAD)

    def _collapsed(self, run: Run, layer: Layer, spreads: Series, span: Span, is_gradual: bool) -> Finding:
        severity: Severity = "error"
        if is_gradual:  # it does harm if it begins so, and nothing else says why nothing was learned
            begins_so = span.first == spreads.steps[0]
            is_harmful = begins_so and rules.is_trivial(run) and not findings_of("grad.attenuated", run)
            severity = "warning" if is_harmful else "info"
        spread = rules.median(spreads.values[-span.n :])
        return self.finding(
            f"From layer {layer.name} on, outputs are the same for every sample: their variance across "
            f"the batch is {spread:.1g} of their second moment (limit {MIN_SPREAD:.0e}).",
            severity,
            at=layer,
            when=span,
            value=spread,
            limit=MIN_SPREAD,
            causes=(
                "units that are saturated or dead",
                "an input that does not reach this layer, or is constant",
            ),
            next_steps=(
                f"Look at the input of {as_layer(layer.name)}, and at its bias and initialization",
                *lower_rate(run, layer),
            ),
        )


def _spread(layer: Layer) -> Series:
    """The spread; 0 if the whole output is zero, for which it is not defined."""
    spreads = dict(layer.series("spread"))
    zeros = {step: 0.0 for step, x in layer.series("abs_max") if x == 0}
    return rules.series_of(sorted((spreads | zeros).items()) if "spread" in layer.stats else ())


@fault(
    "unit.saturated",
    Site.MODULES,
    needs="activations",
    leads_to="grad.attenuated loss.flat loss.trivial act.collapse update.too_small",
    subject="flat ends",
    shown_by="layers.saturated",
    draws_limit=True,
)
class SaturatedUnits(Fault):
    """Saturated units of tanh and sigmoid, which pass almost no gradient.

    Formula: median over five records, up to the last one before convergence, of the share of outputs with
    |tanh| above 0.97 or a sigmoid outside (0.03, 0.97). Limit: half of the units; an error above 0.9 after
    50 batches, unless the loss has fallen by a fifth, as a model may do well despite them. A note if they
    were not saturated in the first five records, as they have then learned it. Layers after the last
    weights are left out, as the output of a confident classifier should saturate. No finding if the loss
    reaches a fifth of that of the best constant, an R² of 0.8: the model does well despite them.

    Source: Glorot & Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    2010.
    """

    headline = "Units are stuck at the flat ends"
    uses = (LayerRows,)

    def findings(self, run: Run) -> Iterator[Result]:
        until, head = run.converged_at(), rules.place_of_head(run)
        layers = [x for x in rules.in_order(run) if x.place < head]
        shares = [(layer, rules.before(layer.series("saturated"), until)) for layer in layers]
        if not (shares := [(layer, series) for layer, series in shares if len(series) >= rules.LATEST]):
            yield Skipped(f"no tanh or sigmoid inside the model was inspected {rules.LATEST} times")
            return
        worst = max(rules.median(series.values) for _, series in shares)
        if rules.does_well(run):
            yield Passed(f"saturated units ({worst:.0%}, but the model does well)")
            return
        for layer, series in shares:
            if span := rules.trailing(series, lambda x: x > rules.MAX_SATURATED):
                yield self._saturated(run, layer, series, span)
                return
        yield Passed(f"saturated units ({worst:.0%})", worst, rules.MAX_SATURATED)

    def _saturated(self, run: Run, layer: Layer, series: Series, span: Span) -> Finding:
        share = rules.median(series.values[-span.n :])
        severity: Severity = "warning"
        if rules.median(series.values[: rules.LATEST]) <= rules.MAX_SATURATED:
            severity = "info"
        elif share > MAX_SATURATED_WARNING and run.n_batches >= rules.MIN_BATCHES:
            severity = "warning" if rules.has_learned(run, run.first_loss) else "error"
        places = [(p.place_of_layer, p) for p in rules.weights(run)]
        is_large = begins_large([p for place, p in places if place is not None and place < layer.place][-1:])
        return self.finding(
            f"Layer {layer.name}: {share:.0%} of its outputs are at the flat ends of {layer.kind}, where "
            f"almost no gradient passes (limit {rules.MAX_SATURATED:.0%}).",
            severity,
            at=layer,
            when=span,
            value=share,
            limit=rules.MAX_SATURATED,
            causes=(
                "the layer before it outputs values that are too large",
                *(("a step that was too large",) if is_trained(run, layer) else ()),
            ),
            next_steps=(
                *(("Initialize the layer before it with smaller weights",) if is_large else ()),
                *lower_rate(run, layer),
                "Add a normalization layer before it",
            ),
        )
