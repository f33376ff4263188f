"""Sizes of updates and of the weights before the first one, and the advice that follows from them."""

import math
from collections.abc import Sequence

from hookcb.diagnosis.evidence import Evidence, Param, Series
from hookcb.diagnosis.trends import before, finite, format_factor, median, weights

USUAL = 3**-0.5  # of 1/sqrt(fan in): the standard deviation with which torch.nn.Linear and Conv begin
SMALL_INIT, LARGE_INIT = (
    0.2,
    3.0,
)  # of 1/sqrt(fan in); kaiming_normal_ has 1.4, kaiming_uniform_(a=5**0.5) 0.6
AIM, USUAL_UPDATE = 0.01, 1e-3  # an update ratio that hardly any weight should exceed; that of a usual weight
N_FIRST, RISEN = 10, 0.5  # records; of the first loss
LEAST, MOST = 2, 10_000  # factors that are worth a number, and beyond which nothing is sure


def updates(param: Param, until: float = math.inf) -> Series:
    """Its update ratios before a step, ‖ΔW‖ / ‖W‖, where ‖W‖ counts at least as usual of its shape.

    A weight that begins near zero grows by many times its own size at first, which is no large step.
    """
    norms = dict(param.series("weight_norm"))
    usual = USUAL * math.sqrt(max(1, param.shape[0]))
    found = Series()
    for step, x in before(param.series("update_ratio"), until):
        was = norms.get(step, math.nan) / math.hypot(1, x)  # before the step, which is at right angles mostly
        found.add(step, x * was / usual if was < usual else x)
    return found


def init_scale(param: Param) -> float:
    """RMS of a weight before the first step, in units of 1/sqrt(fan in); NaN where that was not seen."""
    ratios, norms = param.series("update_ratio"), param.series("weight_norm")
    if not len(ratios) or not len(norms) or ratios.steps[0] != 0 or norms.steps[0] != 0:
        return math.nan
    return norms.values[0] / math.hypot(1, ratios.values[0]) / math.sqrt(max(1, param.shape[0]))


def begins_small(params: Sequence[Param]) -> bool:
    """Whether any of these weights was seen to begin smaller than the usual initializations."""
    return any(0 < init_scale(p) < SMALL_INIT for p in params)


def begins_large(params: Sequence[Param]) -> bool:
    """Whether any of these weights was seen to begin larger than the usual initializations."""
    return any(init_scale(p) > LARGE_INIT for p in params)


def first_update(evidence: Evidence) -> float:
    """The largest update of a weight in the first steps, up to the first after which the loss is higher."""
    losses = evidence.loss
    start = losses.values[0] if len(losses) else math.nan
    high = start + RISEN * abs(start)
    risen = (
        next((step for step, x in losses if not x <= high), math.inf) if math.isfinite(start) else math.inf
    )
    largest = []
    for p in weights(evidence):
        found = updates(p)
        largest += [x for i, (step, x) in enumerate(found) if i == 0 or (i < N_FIRST and step < risen)]
    return max(finite(largest), default=math.nan)


def divisor(evidence: Evidence) -> int:
    """By what to divide the learning rate so that the first steps come to AIM; 1 if they are smaller.

    Divided by what later steps show, the learning rate comes out too low: weights that have run away get
    gradients of another size.
    """
    return _round_down(first_update(evidence) / AIM)


def lower_rate(evidence: Evidence) -> tuple[str, ...]:
    """The advice to lower the learning rate, by as much as the first steps say; nothing where they do not."""
    n = divisor(evidence)
    return (f"Divide the learning rate by {n:,}",) if n >= LEAST else ()


def multiplier(evidence: Evidence, usual: float) -> int:
    """By what to multiply the learning rate so that the usual update comes to 1e-3, and none above AIM."""
    largest = max((median(updates(p).values) for p in weights(evidence) if len(updates(p))), default=math.nan)
    return _round_down(min(USUAL_UPDATE / usual, AIM / largest if largest > 0 else math.inf))


def _round_down(x: float) -> int:
    """To 1, 2 or 5 times a power of ten, between 1 and 10,000."""
    if not x > 1:
        return 1
    x = min(x, MOST)
    power = 10 ** math.floor(math.log10(x))
    return int(power * max(n for n in (1, 2, 5) if n * power <= x))


def told_init(params: Sequence[Param]) -> str:
    """The advice on weights that were seen to begin unusually; "" where they have not."""
    if begins_small(params) or begins_large(params):
        odd = next(p for p in params if begins_small([p]) or begins_large([p]))
        size = format_factor(init_scale(odd))
        return (
            f"Initialize {odd.layer or odd.name} with torch.nn.init.kaiming_normal_, which has 1.4 / "
            f"sqrt(fan in); it begins with {size} / sqrt(fan in)"
        )
    return ""
