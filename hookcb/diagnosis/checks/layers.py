"""Checks of what layers put out: saturated units, growing activations, outputs that are all the same."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.checks.finding import finding
from hookcb.diagnosis.checks.updates import begins_large, lower_rate, told_init
from hookcb.diagnosis.evidence import SPARSE_KINDS, Evidence, Layer, Series
from hookcb.diagnosis.registry import Passed, Result, Site, Skipped, check
from hookcb.diagnosis.trends import (
    LATEST,
    Span,
    before,
    does_well,
    finite,
    format_factor,
    median,
    persistent,
    ratio,
    trailing,
    weights,
)
from hookcb.diagnosis.verdict import Finding

SATURATED, SATURATED_ERROR = 0.5, 0.9  # share of units
GROWN, AT_FIRST = 1e3, 3  # std of an output to that of the input, in the first records and in all
SMALLEST_INPUT = 0.01  # std that an input counts with at least: a norm may blow up a small one, and should
NEAR_OVERFLOW = 0.1  # of the largest number of the dtype
GRADUAL = 1e-3  # a layer that takes away less of the spread is one of many that do
COLLAPSED = 1e-6  # variance across the batch to the second moment; float32 resolves 1e-14 of a square


def _in_order(evidence: Evidence) -> list[Layer]:
    return sorted(evidence.layers.values(), key=lambda layer: layer.place)


def _head(evidence: Evidence) -> float:
    """Place of the last layer with weights, that of the last layer where it is not known."""
    places = [p.place_of_layer for p in weights(evidence) if p.place_of_layer is not None]
    places = places or [layer.place for layer in evidence.layers.values()]
    return max(places, default=math.inf)


@check(
    "unit.saturated",
    site=Site.MODULES,
    needs=("activations",),
    leads_to=("grad.attenuated", "loss.flat", "act.collapse", "update.too_small"),
    subject="flat ends",
)
def saturated_units(evidence: Evidence) -> Iterator[Result]:
    """Units at the flat ends of tanh and sigmoid, where hardly any gradient passes.

    Formula: median over five records, up to the last one before convergence, of the share of outputs with
    |tanh| above 0.97 or a sigmoid outside (0.03, 0.97). Limit: half of the units, an error above 0.9; layers
    after the last weights are left out, where a sure classifier saturates and should. Nothing is said where
    the loss comes to a fifth of that of the best constant, an R² of 0.8: then the model does well with them.

    Source: Glorot & Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    2010.
    """
    until, head = evidence.converged_at(), _head(evidence)
    layers = [x for x in _in_order(evidence) if x.place < head and len(x.series("saturated"))]
    found = [(layer, before(layer.series("saturated"), until)) for layer in layers]
    found = [(layer, series) for layer, series in found if len(series) >= LATEST]
    if not found:
        yield Skipped("no tanh or sigmoid inside the model was looked at five times")
        return
    if does_well(evidence):
        worst = max(median(series.values) for _, series in found)
        yield Passed(f"saturated units ({worst:.0%}, which the model does well with)")
        return
    for layer, series in found:
        if span := trailing(series, lambda x: x > SATURATED):
            yield _saturated(evidence, layer, median(series.values[-span.n :]), span)
            return
    worst = max(median(series.values) for _, series in found)
    yield Passed(f"saturated units ({worst:.0%})", worst, SATURATED)


def _saturated(evidence: Evidence, layer: Layer, share: float, span: Span) -> Finding:
    feeds = [p for p in weights(evidence) if p.place_of_layer is not None and p.place_of_layer < layer.place]
    is_large = begins_large(feeds[-1:])
    return finding(
        "unit.saturated",
        "error" if share > SATURATED_ERROR else "warning",
        at=layer,
        when=span,
        value=share,
        limit=SATURATED,
        message=f"{share:.0%} of the outputs of {layer.name} are at the flat ends of {layer.kind}, "
        f"where hardly any gradient passes; more than {SATURATED:.0%} is too much.",
        causes=("the layer before it puts out values that are too large", "a step that was too large"),
        next_steps=(
            *(("Initialize the layer before it with smaller weights",) if is_large else ()),
            *lower_rate(evidence),
            "Put a normalization before it",
        ),
    )


@check(
    "act.scale",
    site=Site.MODULES,
    needs=("activations",),
    leads_to=("grad.*", "loss.*", "update.*", "unit.*", "nonfinite.*", "attn.collapse", "act.collapse"),
)
def activation_scale(evidence: Evidence) -> Iterator[Result]:
    """Activations that grow from layer to layer, or come near the largest number there is.

    Formula: std(output) / std(input), the median of the first three records and that of all: a regression may
    grow its output as it learns, but does not begin with it. Limit: 1,000, for a warning; a layer that keeps
    the scale has 1. Or max |output| above a tenth of the largest number of its dtype in two records, for an
    error: a sum of ten of these is infinite.

    Source: He et al., "Delving Deep into Rectifiers", 2015, for layers that keep the scale.
    """
    until = evidence.converged_at()
    layers = [x for x in _in_order(evidence) if len(x.series("std")) and not _is_masked(x)]
    stds = {x.name: _scale(before(x.series("std"), until)) for x in layers}
    stds = {name: std for name, std in stds.items() if std > 0}
    layers = [layer for layer in layers if layer.name in stds]
    if not layers:
        yield Skipped(f"no layer was looked at {AT_FIRST} times before the training converged")
        return
    for layer in layers:
        sizes = layer.series("abs_max")
        shares = Series(sizes.steps, [ratio(x, layer.largest) for x in sizes.values])
        if span := persistent(shares, lambda x: NEAR_OVERFLOW < x < math.inf, 2, 10):
            yield _near_overflow(layer, max(finite(sizes.values)), span)
            return
    base = median(before(evidence.input_std, until).values)
    base = max(base, SMALLEST_INPUT) if base > 0 else stds[layers[0].name]
    worst = max(layers, key=lambda layer: stds[layer.name])
    grown = stds[worst.name] / base
    if grown > GROWN:
        yield _grown(evidence, layers, worst, stds, base)
    else:
        yield Passed(f"scale of activations (×{format_factor(grown)})", grown, GROWN)


def _scale(series: Series) -> float:
    """The smaller of the medians of the first records and of all: what it has from the beginning on."""
    if len(series) < AT_FIRST:
        return math.nan
    return min(median(series.values[:AT_FIRST]), median(series.values))


def _is_masked(layer: Layer) -> bool:
    """Whether its largest number is the same each time, as of scores that are masked by -1e9."""
    values = layer.series("abs_max").values
    return len(values) >= AT_FIRST and min(values) == max(values) > 1e3


def _grown(
    evidence: Evidence, layers: list[Layer], worst: Layer, stds: dict[str, float], base: float
) -> Finding:
    upto = layers[: layers.index(worst) + 1]
    previous = [base, *(stds[layer.name] for layer in upto)]
    growth = [stds[layer.name] / was for layer, was in zip(upto, previous, strict=False)]
    # where all layers grow alike, the first of them
    at = next(i for i, x in enumerate(growth) if x >= max(growth) / 2)
    layer, most = upto[at], stds[worst.name] / base
    steps = worst.series("std").steps
    first = next((step for step, x in worst.series("std") if x > GROWN * base), steps[0])
    chain = [p for p in weights(evidence) if p.layer in {x.name for x in upto} and begins_large([p])]
    return finding(
        "act.scale",
        "warning",
        at=layer,
        when=(first, steps[-1]),
        value=most,
        limit=GROWN,
        message=f"The output of {worst.name} varies {format_factor(most)} times as much as the input (standard "
        f"deviation; limit {GROWN:,.0f}). It grows most at {layer.name}, ×{format_factor(growth[at])}.",
        causes=(
            *(("weights that are too large at initialization",) if chain else ()),
            "no normalization between the layers",
        ),
        next_steps=(
            *((told_init(chain),) if chain else ()),
            *lower_rate(evidence),
            "Put a normalization between the layers",
        ),
    )


def _near_overflow(layer: Layer, most: float, span: Span) -> Finding:
    return finding(
        "act.scale",
        "error",
        at=layer,
        when=span,
        value=most / layer.largest,
        limit=NEAR_OVERFLOW,
        message=f"The output of {layer.name} comes to {most:.2g}, and its dtype ends at {layer.largest:.2g}: "
        "soon it is infinite.",
        causes=("activations that grow from layer to layer", "half precision, which ends at 65,504"),
        next_steps=("Use bfloat16 in place of float16, or put a normalization before this layer",),
    )


@check(
    "act.collapse",
    site=Site.MODULES,
    needs=("activations",),
    leads_to=("loss.flat", "grad.attenuated", "unit.dead"),
)
def collapsed_activations(evidence: Evidence) -> Iterator[Result]:
    """Outputs that are the same for every sample of a batch, so that nothing can be told apart any more.

    Formula: variance across the batch / second moment, the median over five records up to the last before
    convergence. Limit: 1e-6, a difference of a thousandth between samples. Told of the first layer from which
    on everything to the end of the model has collapsed: what sees a constant by design (positions, a learned
    query), or is pulled apart again by batch norm, has something alive behind it. Not told of the head alone:
    a regression on targets of 2,000 ± 2 has such outputs. A note only where the spread gets lost little by
    little, by less than a thousandfold in any one layer, which gradients tell more of.

    Source: Schoenholz et al., "Deep Information Propagation", 2017, for how inputs become alike with depth.
    """
    until = evidence.converged_at()
    layers = [x for x in _in_order(evidence) if x.kind not in SPARSE_KINDS]
    spans, lowest, n_looked = {}, math.inf, 0
    for layer in layers:
        series = before(_spread(layer), until)
        if len(series) >= LATEST:
            n_looked += 1
            spans[layer.name] = trailing(series, lambda x: x < COLLAPSED)
            lowest = min(lowest, median(series.values))
    if not n_looked:
        yield Skipped("no layer's outputs were compared across the batch five times")
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
        spread = median(before(_spread(first[0]), until).values)
        is_gradual = spread > GRADUAL * previous
        yield _collapsed(first[0], spread, first[1], is_gradual, lower_rate(evidence))
    else:
        alive = _most_alive_at_end(known, _head(evidence), until)
        yield Passed(f"outputs that are all the same (spread {lowest:.1g} or more)", alive, COLLAPSED)


def _most_alive_at_end(known: list[Layer], head: float, until: float) -> float:
    """The largest spread from the last layer before the head on: all of these would have to collapse."""
    last = max((layer.place for layer in known if layer.place < head), default=math.inf)
    spreads = [median(before(_spread(layer), until).values) for layer in known if layer.place >= last]
    return max(finite(spreads), default=math.nan)


def _spread(layer: Layer) -> Series:
    """The spread, 0 where all of the output is zero, which has none."""
    found = dict(layer.series("spread"))
    zeros = {step: 0.0 for step, x in layer.series("abs_max") if x == 0}
    pairs = sorted((found | zeros).items()) if "spread" in layer.stats else []
    return Series([step for step, _ in pairs], [x for _, x in pairs])


def _collapsed(layer: Layer, spread: float, span: Span, is_gradual: bool, slower: tuple[str, ...]) -> Finding:
    return finding(
        "act.collapse",
        "info" if is_gradual else "error",
        at=layer,
        when=span,
        value=spread,
        limit=COLLAPSED,
        message=f"From {layer.name} on the outputs are the same for every sample: they vary across the "
        "batch by "
        f"{spread:.1g} of their size (squared; limit {COLLAPSED:.0e}).",
        causes=(
            "units that are saturated or dead",
            "an input that does not reach this layer, or is constant",
        ),
        next_steps=(
            f"Look at what goes into {layer.name}, and at its bias and initialization",
            *slower,
        ),
    )
