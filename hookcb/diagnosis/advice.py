"""Advice on learning rates and initialization that follows from the sizes of updates and weights."""

import math
from collections.abc import Sequence

from hookcb.core.text import as_layer
from hookcb.diagnosis.rules import USUAL_UPDATE, first_update, format_factor, median, updates, weights
from hookcb.diagnosis.run import Layer, Param, Run

TARGET_UPDATE = 0.01  # the largest update of a good learning rate
MIN_INIT, MAX_INIT = 0.2, 3.0  # times 1/sqrt(fan in); kaiming_normal_ has 1.4, kaiming_uniform_(a=5**0.5) 0.6
MIN_FACTOR, MAX_FACTOR = 2, 10_000  # a smaller factor is not worth advice, a larger one is not reliable


def divisor(run: Run) -> int:
    """Divisor of the learning rate that brings the first updates to 0.01; 1 if they are smaller.

    Later updates would make the learning rate too low: weights that have run away get gradients of another
    size.
    """
    return _round_down(first_update(run) / TARGET_UPDATE)


def is_trained(run: Run, upto: Layer) -> bool:
    """Whether a step changes any layer from the input up to this one; not if all of them are frozen."""
    trained = [p for p in run.params.values() if p.is_optimized and p.stats]
    return any(p.place_of_layer is None or p.place_of_layer <= upto.place for p in trained)


def lower_rate(run: Run, at: Layer | None = None) -> tuple[str, ...]:
    """Advice to lower the learning rate, by a factor from the first steps; empty if they are fine.

    Empty also if no step changes the output of the layer `at`, if one is given.
    """
    n = 1 if at is not None and not is_trained(run, at) else divisor(run)
    return (f"Divide the learning rate by {n:,}",) if n >= MIN_FACTOR else ()


def multiplier(run: Run, usual: float) -> int:
    """Factor of the learning rate that brings the median update, `usual`, to 1e-3 and none above 0.01."""
    largest = max((median(updates(p).values) for p in weights(run) if len(updates(p))), default=math.nan)
    return _round_down(min(USUAL_UPDATE / usual, TARGET_UPDATE / largest if largest > 0 else math.inf))


def _round_down(x: float) -> int:
    """Round down to 1, 2 or 5 times a power of ten, between 1 and 10,000."""
    if not x > 1:
        return 1
    x = min(x, MAX_FACTOR)
    power = 10 ** math.floor(math.log10(x))
    return int(power * max(n for n in (1, 2, 5) if n * power <= x))


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


def init_advice(params: Sequence[Param]) -> str:
    """Advice on the first weight that began unusually small or large; "" if none did."""
    unusual = next((p for p in params if begins_small([p]) or begins_large([p])), None)
    if unusual is None:
        return ""
    return (
        f"Initialize {as_layer(unusual.layer) or unusual.name} with torch.nn.init.kaiming_normal_, which has "
        f"a std of 1.4 / sqrt(fan in); it began with {format_factor(init_scale(unusual))} / sqrt(fan in)"
    )
