"""Checks of layer outputs: saturation, growing activations, and outputs equal for all samples."""

import math
from collections.abc import Iterator

from hookcb.core.text import as_layer
from hookcb.diagnosis.advice import begins_large, init_advice, is_trained, lower_rate
from hookcb.diagnosis.checks.attenuated import attenuated_gradients
from hookcb.diagnosis.fault import Result, Site
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import (
    LATEST,
    MAX_SATURATED,
    MIN_BATCHES,
    before,
    does_well,
    finding,
    findings_of,
    finite,
    format_factor,
    has_learned,
    is_trivial,
    median,
    persistent,
    ratio,
    trailing,
    weights,
)
from hookcb.diagnosis.run import SPARSE_KINDS, Layer, Passed, Run, Series, Skipped, Span
from hookcb.diagnosis.verdict import Finding, Severity

MAX_SATURATED_WARNING = 0.9  # share of units
MAX_GROWTH, N_FIRST = 1e3, 3  # std(output) / std(input), in the first three records and in all
MIN_INPUT_STD = 0.01  # a smaller std counts as this: a normalization may and should scale up a small input
MAX_SHARE_OF_DTYPE = 0.1  # of the largest number of the dtype
MIN_SPREAD_LEFT = 1e-3  # by one layer, share of the spread before it; if more is left the loss is gradual
MIN_SPREAD = 1e-6  # variance across the batch / second moment; float32 resolves 1e-14 of a square


def _in_order(evidence: Run) -> list[Layer]:
    return sorted(evidence.layers.values(), key=lambda layer: layer.place)


def _head(evidence: Run) -> float:
    """Place of the last layer with weights; of the last layer if no place is known."""
    places = [p.place_of_layer for p in weights(evidence) if p.place_of_layer is not None]
    places = places or [layer.place for layer in evidence.layers.values()]
    return max(places, default=math.inf)


@check(
    "unit.saturated",
    site=Site.MODULES,
    shown_by="layers.saturated",
    draws_limit=True,
    needs=("activations",),
    leads_to=("grad.attenuated", "loss.flat", "loss.trivial", "act.collapse", "update.too_small"),
    subject="flat ends",
)
def saturated_units(evidence: Run) -> Iterator[Result]:
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
    until, head = evidence.converged_at(), _head(evidence)
    layers = [x for x in _in_order(evidence) if x.place < head and len(x.series("saturated"))]
    shares = [(layer, before(layer.series("saturated"), until)) for layer in layers]
    shares = [(layer, series) for layer, series in shares if len(series) >= LATEST]
    if not shares:
        yield Skipped(f"no tanh or sigmoid inside the model was inspected {LATEST} times")
        return
    worst = max(median(series.values) for _, series in shares)
    if does_well(evidence):
        yield Passed(f"saturated units ({worst:.0%}, but the model does well)")
        return
    for layer, series in shares:
        if span := trailing(series, lambda x: x > MAX_SATURATED):
            began = median(series.values[:LATEST]) > MAX_SATURATED
            yield _saturated(evidence, layer, median(series.values[-span.n :]), span, began)
            return
    yield Passed(f"saturated units ({worst:.0%})", worst, MAX_SATURATED)


def _saturated(evidence: Run, layer: Layer, share: float, span: Span, began: bool) -> Finding:
    feeds = [p for p in weights(evidence) if p.place_of_layer is not None and p.place_of_layer < layer.place]
    is_large = begins_large(feeds[-1:])
    is_harmful = evidence.n_batches >= MIN_BATCHES and not has_learned(evidence, evidence.first_loss)
    severity: Severity = "error" if share > MAX_SATURATED_WARNING and is_harmful else "warning"
    return finding(
        "unit.saturated",
        severity if began else "info",
        at=layer,
        when=span,
        value=share,
        limit=MAX_SATURATED,
        message=f"Layer {layer.name}: {share:.0%} of its outputs are at the flat ends of {layer.kind}, where "
        f"almost no gradient passes (limit {MAX_SATURATED:.0%}).",
        causes=(
            "the layer before it outputs values that are too large",
            *(("a step that was too large",) if is_trained(evidence, layer) else ()),
        ),
        next_steps=(
            *(("Initialize the layer before it with smaller weights",) if is_large else ()),
            *lower_rate(evidence, layer),
            "Add a normalization layer before it",
        ),
    )


@check(
    "act.scale",
    site=Site.MODULES,
    shown_by="layers.std",
    needs=("activations",),
    leads_to=("grad.*", "loss.*", "update.*", "unit.*", "nonfinite.*", "attn.collapse", "act.collapse"),
)
def activation_scale(evidence: Run) -> Iterator[Result]:
    """Activations that grow from layer to layer, or come close to the largest number of their dtype.

    Formula: std(output) / std(input), both in the median of the first three records and in that of all, since
    a regression may grow its output as it learns, but does not begin that way. Limit: 1,000, for a warning; a
    layer that keeps the scale has 1. Or max |output| above a tenth of the largest number of its dtype in two
    of ten records, for an error: a sum of ten such numbers is infinite.

    Source: He et al., "Delving Deep into Rectifiers", 2015, for layers that keep the scale.
    """
    until = evidence.converged_at()
    layers = [x for x in _in_order(evidence) if len(x.series("std")) and not _is_masked(x)]
    stds = {x.name: _scale(before(x.series("std"), until)) for x in layers}
    stds = {name: std for name, std in stds.items() if std > 0}
    layers = [layer for layer in layers if layer.name in stds]
    if not layers:
        yield Skipped(f"no layer was inspected {N_FIRST} times before convergence")
        return
    for layer in layers:
        sizes = layer.series("abs_max")
        shares = Series(sizes.steps, [ratio(x, layer.largest) for x in sizes.values])
        if span := persistent(shares, lambda x: MAX_SHARE_OF_DTYPE < x < math.inf, 2, 10):
            yield _near_overflow(layer, max(finite(sizes.values)), span)
            return
    base = median(before(evidence.measured(Inputs).std, until).values)
    base = max(base, MIN_INPUT_STD) if base > 0 else stds[layers[0].name]
    worst = max(layers, key=lambda layer: stds[layer.name])
    grown = stds[worst.name] / base
    if grown > MAX_GROWTH:
        yield _grown(evidence, layers, worst, stds, base)
    else:
        yield Passed(f"scale of activations (×{format_factor(grown)})", grown, MAX_GROWTH)


def _scale(series: Series) -> float:
    """The smaller of the medians of the first records and of all: the scale it has from the beginning."""
    if len(series) < N_FIRST:
        return math.nan
    return min(median(series.values[:N_FIRST]), median(series.values))


def _is_masked(layer: Layer) -> bool:
    """Whether its largest number is the same each time, as in scores that are masked with -1e9."""
    values = layer.series("abs_max").values
    return len(values) >= N_FIRST and min(values) == max(values) > 1e3


def _grown(evidence: Run, layers: list[Layer], worst: Layer, stds: dict[str, float], base: float) -> Finding:
    upto = layers[: layers.index(worst) + 1]
    previous = [base, *(stds[layer.name] for layer in upto)]
    growth = [stds[layer.name] / was for layer, was in zip(upto, previous, strict=False)]
    # the first one, if all layers grow alike
    at = next(i for i, x in enumerate(growth) if x >= max(growth) / 2)
    layer, most = upto[at], stds[worst.name] / base
    steps = worst.series("std").steps
    first = next((step for step, x in worst.series("std") if x > MAX_GROWTH * base), steps[0])
    chain = [p for p in weights(evidence) if p.layer in {x.name for x in upto} and begins_large([p])]
    return finding(
        "act.scale",
        "warning",
        at=layer,
        when=(first, steps[-1]),
        value=most,
        limit=MAX_GROWTH,
        message=f"The output of {as_layer(worst.name)} has {format_factor(most)} times the standard "
        f"deviation of the input (limit {MAX_GROWTH:,.0f}). It grows most at {as_layer(layer.name)}, "
        f"×{format_factor(growth[at])}.",
        causes=(
            *(("weights that are too large at initialization",) if chain else ()),
            "no normalization between the layers",
        ),
        next_steps=(
            *((init_advice(chain),) if chain else ()),
            *lower_rate(evidence, worst),
            "Add normalization between the layers",
        ),
    )


def _near_overflow(layer: Layer, most: float, span: Span) -> Finding:
    return finding(
        "act.scale",
        "error",
        at=layer,
        when=span,
        value=most / layer.largest,
        limit=MAX_SHARE_OF_DTYPE,
        message=f"The output of {as_layer(layer.name)} reaches {most:.2g}, and the maximum of its dtype is "
        f"{layer.largest:.2g} (limit {MAX_SHARE_OF_DTYPE:.0%} of it): it may soon overflow.",
        causes=("activations that grow from layer to layer", "float16, which has a maximum of 65,504"),
        next_steps=("Use bfloat16 instead of float16, or add a normalization layer before this layer",),
    )


@check(
    "act.collapse",
    site=Site.MODULES,
    shown_by="layers.spread",
    draws_limit=True,
    needs=("activations",),
    leads_to=("loss.flat", "loss.trivial", "grad.attenuated", "unit.dead"),
)
def collapsed_activations(evidence: Run) -> Iterator[Result]:
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
    until = evidence.converged_at()
    layers = [x for x in _in_order(evidence) if x.kind not in SPARSE_KINDS]
    spans, lowest, n_looked = {}, math.inf, 0
    for layer in layers:
        series = before(_spread(layer), until)
        if len(series) >= LATEST:
            n_looked += 1
            spans[layer.name] = trailing(series, lambda x: x < MIN_SPREAD)
            lowest = min(lowest, median(series.values))
    if not n_looked:
        yield Skipped(f"no layer had its outputs compared across the batch {LATEST} times")
        return
    known = [layer for layer in layers if layer.name in spans]
    first: tuple[Layer, Span] | None = None
    previous = math.inf
    for layer in reversed(known):
        usual = median(before(_spread(layer), until).values)
        if (span := spans[layer.name]) is None:
            previous = usual
            break
        first = layer, span
    if first and first[0].place < _head(evidence):
        layer, span = first
        spreads = before(_spread(layer), until)
        severity: Severity = "error"
        if median(spreads.values) > MIN_SPREAD_LEFT * previous:
            severity = "warning" if _is_harmful(evidence, span, spreads) else "info"
        collapsed = median(spreads.values[-span.n :])
        yield _collapsed(layer, collapsed, span, severity, lower_rate(evidence, layer))
    else:
        alive = _most_alive_at_end(known, _head(evidence), until)
        yield Passed(
            f"outputs that are the same for all samples (spread {lowest:.1g} or more)", alive, MIN_SPREAD
        )


def _is_harmful(evidence: Run, span: Span, spreads: Series) -> bool:
    """Whether outputs were the same from the beginning, and nothing else says why nothing was learned."""
    begins_so = span.first == spreads.steps[0]
    return begins_so and is_trivial(evidence) and not findings_of(attenuated_gradients, evidence)


def _most_alive_at_end(known: list[Layer], head: float, until: float) -> float:
    """Largest spread from the last layer before the head on: all of these would have to collapse."""
    last = max((layer.place for layer in known if layer.place < head), default=math.inf)
    spreads = [median(before(_spread(layer), until).values) for layer in known if layer.place >= last]
    return max(finite(spreads), default=math.nan)


def _spread(layer: Layer) -> Series:
    """The spread; 0 if the whole output is zero, for which it is not defined."""
    spreads = dict(layer.series("spread"))
    zeros = {step: 0.0 for step, x in layer.series("abs_max") if x == 0}
    pairs = sorted((spreads | zeros).items()) if "spread" in layer.stats else []
    return Series([step for step, _ in pairs], [x for _, x in pairs])


def _collapsed(
    layer: Layer, spread: float, span: Span, severity: Severity, slower: tuple[str, ...]
) -> Finding:
    return finding(
        "act.collapse",
        severity,
        at=layer,
        when=span,
        value=spread,
        limit=MIN_SPREAD,
        message=f"From layer {layer.name} on, outputs are the same for every sample: their variance across "
        f"the batch is {spread:.1g} of their second moment (limit {MIN_SPREAD:.0e}).",
        causes=(
            "units that are saturated or dead",
            "an input that does not reach this layer, or is constant",
        ),
        next_steps=(
            f"Look at the input of {as_layer(layer.name)}, and at its bias and initialization",
            *slower,
        ),
    )
