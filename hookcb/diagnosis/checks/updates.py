"""Sizes of gradients and updates, the scale of initial weights, and the advice that follows from them."""

import math
from collections.abc import Sequence

from hookcb.core.text import as_layer
from hookcb.diagnosis.run import WINDOW, Layer, Param, Run, Series
from hookcb.diagnosis.trends import (
    LATEST,
    before,
    finite,
    format_factor,
    median,
    persistent,
    rates,
    ratio,
    weights,
)

MAX_FIRST_UPDATE, N_FIRST = 0.2, 10  # in the first records; Adam with lr 1e-2 begins with 0.1 to 0.2
MAX_UPDATE, N_LARGE, N_WINDOW = 0.05, 5, 8  # later, in 5 of 8 records
VISIBLE_UPDATE = 1e-6  # update ratio that shows in a weight
TARGET_UPDATE, USUAL_UPDATE = 0.01, 1e-3  # the largest update of a good learning rate, and the usual one
USUAL_INIT = 3**-0.5  # times 1/sqrt(fan in): the std with which torch.nn.Linear and Conv begin
# times 1/sqrt(fan in); kaiming_normal_ has 1.4, kaiming_uniform_(a=5**0.5) 0.6
MIN_INIT, MAX_INIT = 0.2, 3.0
MAX_RISE = 0.5  # of the loss, as a share of the loss at the beginning
# RMS of a layer's gradient / the larger of those of the median and of the last layer; healthy trainings came
# up to 600, in the first steps of branches that begin with zeros
MAX_EXCESS = 1e3
RECURRENT = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")
MIN_FACTOR, MAX_FACTOR = 2, 10_000  # a smaller factor is not worth advice, a larger one is not reliable


def gradient_sizes(param: Param, until: float) -> Series:
    """RMS of its gradient before a step, without records of zeros: an expert is not used in each batch."""
    pairs = [(step, x) for step, x in before(param.series("rms"), until) if x > 0]
    return Series([step for step, _ in pairs], [x for _, x in pairs])


def updates(param: Param, until: float = math.inf) -> Series:
    """Update ratios before a step, ‖ΔW‖ / ‖W‖, with ‖W‖ at least the usual norm of that shape.

    A weight that begins near zero first grows by many times its own size, which is not a large step.
    """
    norms = dict(param.series("weight_norm"))
    usual = USUAL_INIT * math.sqrt(max(1, param.shape[0]))
    sizes = Series()
    for step, x in before(param.series("update_ratio"), until):
        # the norm before the step, which is mostly at a right angle to the weight
        previous = norms.get(step, math.nan) / math.hypot(1, x)
        sizes.add(step, x * previous / usual if previous < usual else x)
    return sizes


def has_large_updates(param: Param) -> bool:
    """Whether 5 of 8 records in a row have an update above 0.05."""
    return persistent(updates(param), lambda x: x > MAX_UPDATE, N_LARGE, N_WINDOW) is not None


def init_scale(param: Param) -> float:
    """RMS of a weight before the first step, in units of 1/sqrt(fan in); NaN if that was not recorded."""
    ratios, norms = param.series("update_ratio"), param.series("weight_norm")
    if not len(ratios) or not len(norms) or ratios.steps[0] != 0 or norms.steps[0] != 0:
        return math.nan
    return norms.values[0] / math.hypot(1, ratios.values[0]) / math.sqrt(max(1, param.shape[0]))


def begins_small(params: Sequence[Param]) -> bool:
    """Whether any of these weights began smaller than the usual initializations."""
    return any(0 < init_scale(p) < MIN_INIT for p in params)


def begins_large(params: Sequence[Param]) -> bool:
    """Whether any of these weights began larger than the usual initializations."""
    return any(init_scale(p) > MAX_INIT for p in params)


def first_update(evidence: Run) -> float:
    """Largest update of a weight in the first steps, up to the first one after which the loss is higher."""
    losses = evidence.loss
    start = losses.values[0] if len(losses) else math.nan
    high = start + MAX_RISE * abs(start)
    risen = (
        next((step for step, x in losses if not x <= high), math.inf) if math.isfinite(start) else math.inf
    )
    sizes = []
    for p in weights(evidence):
        records = enumerate(updates(p))
        sizes += [x for i, (step, x) in records if i == 0 or (i < N_FIRST and step < risen)]
    return max(finite(sizes), default=math.nan)


def recent_updates(evidence: Run) -> list[Series]:
    """Update ratios of each trained weight before convergence, scaled to the largest learning rate.

    Scaled so, neither warmup nor the end of a decay makes them small. Weights with fewer than five records
    are left out.
    """
    until, lr = evidence.converged_at(), dict(rates(evidence))
    top = max(finite(lr.values()), default=math.nan)
    found = []
    for p in weights(evidence):
        ratios = before(p.series("update_ratio"), until)
        pairs = [(step, x * ratio(top, lr.get(step, top))) for step, x in ratios]
        scaled = Series.of([step for step, x in pairs if x < math.inf], [x for _, x in pairs if x < math.inf])
        if p.is_optimized and len(scaled) >= LATEST:
            found.append(scaled)
    return found


def usual_update(recent: Sequence[Series]) -> float:
    """Median over weights of the median of their last ten update ratios; NaN if there is none."""
    return median(median(series.values[-WINDOW:]) for series in recent)


def divisor(evidence: Run) -> int:
    """Divisor of the learning rate that brings the first updates to 0.01; 1 if they are smaller.

    Later updates would make the learning rate too low: weights that have run away get gradients of another
    size.
    """
    return _round_down(first_update(evidence) / TARGET_UPDATE)


def is_trained(evidence: Run, upto: Layer) -> bool:
    """Whether a step changes any layer from the input up to this one; not if all of them are frozen."""
    trained = [p for p in evidence.params.values() if p.is_optimized and p.stats]
    return any(p.place_of_layer is None or p.place_of_layer <= upto.place for p in trained)


def lower_rate(evidence: Run, at: Layer | None = None) -> tuple[str, ...]:
    """Advice to lower the learning rate, by a factor from the first steps; empty if they are fine.

    Empty also if no step changes the output of the layer `at`, if one is given.
    """
    n = 1 if at is not None and not is_trained(evidence, at) else divisor(evidence)
    return (f"Divide the learning rate by {n:,}",) if n >= MIN_FACTOR else ()


def multiplier(evidence: Run, usual: float) -> int:
    """Factor of the learning rate that brings the median update, `usual`, to 1e-3 and none above 0.01."""
    largest = max((median(updates(p).values) for p in weights(evidence) if len(updates(p))), default=math.nan)
    return _round_down(min(USUAL_UPDATE / usual, TARGET_UPDATE / largest if largest > 0 else math.inf))


def _round_down(x: float) -> int:
    """Round down to 1, 2 or 5 times a power of ten, between 1 and 10,000."""
    if not x > 1:
        return 1
    x = min(x, MAX_FACTOR)
    power = 10 ** math.floor(math.log10(x))
    return int(power * max(n for n in (1, 2, 5) if n * power <= x))


def init_advice(params: Sequence[Param]) -> str:
    """Advice on the first weight that began unusually small or large; "" if none did."""
    unusual = next((p for p in params if begins_small([p]) or begins_large([p])), None)
    if unusual is None:
        return ""
    return (
        f"Initialize {as_layer(unusual.layer) or unusual.name} with torch.nn.init.kaiming_normal_, which has "
        f"a std of 1.4 / sqrt(fan in); it began with {format_factor(init_scale(unusual))} / sqrt(fan in)"
    )
