"""First change: the first layer in the order of the forward whose output changed when the loss did."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from hookcb.core.text import as_layer
from hookcb.diagnosis.measurements.spike_looks import N_BEFORE, SpikeLooks
from hookcb.diagnosis.measurements.spikes import Spike
from hookcb.diagnosis.rules import format_factor, in_order, median
from hookcb.diagnosis.run import Layer, Run

TIMES, SHIFT = 2.0, 0.2  # of a change to the largest between looks before, and to the size of the output
OF_LAST = 1.5  # times these, of the last layer, which learns first from other targets
SCALED = 1.25  # ratio of a size that is told as such


class FirstChange(NamedTuple):
    """The layer, None if it is the last one, and a sentence on it."""

    layer: Layer | None
    text: str


def first_change(spike: Spike, run: Run) -> FirstChange | None:
    """Finds where a spike shows first in the forward; None if no change was seen, which rules out none.

    An output has changed if, in each look while the spike lasts, its profile is twice as far from those of
    the last two looks before as four looks in a row before were from each other, and by a fifth of its
    standard deviation; of the last layer, half as much again. Distances are roots of mean squares.
    """
    looked = run.measured(SpikeLooks)
    before, after = looked.before.get(spike.step, {}), looked.after.get(spike.step, {})
    steps = " and ".join(f"{step:,}" for step in after)
    when = f" At step{'s' * (len(after) > 1)} {steps}"
    n_known = n_unknown = 0
    layers = in_order(run) if after else []
    for layer in layers:
        old, new = (_known([x.get(layer.name, []) for x in looks.values()]) for looks in (before, after))
        if len(old) < N_BEFORE or len(new) < len(after) or len({*map(len, old), *map(len, new)}) > 1:
            n_unknown += 1
        elif what := _changed(old, new, OF_LAST if layer is layers[-1] else 1.0):
            text = f"{when} {what.format(as_layer(layer.name))}{_rest(n_known, n_unknown)}"
            if layer is layers[-1]:
                return FirstChange(
                    None, f"{text}; it is the last layer, so that its targets may have changed."
                )
            return FirstChange(layer, f"{text}.")
        else:
            n_known += 1
    return None


def _known(profiles: Sequence[list[float]]) -> list[list[float]]:
    return [x for x in profiles if x and all(map(math.isfinite, x))]


def _changed(before: Sequence[list[float]], after: Sequence[list[float]], times: float) -> str:
    """A clause on an output whose profile has changed; "" if it has not."""
    n = len(before[0])
    size, now = (median(math.hypot(*x[n // 2 :]) for x in looks) for looks in (before, after))
    change = max(math.dist(a, b) for a, b in pairwise(before))
    jump = min(math.dist(a, b) for a in before[-2:] for b in after)
    if not jump > times * max(TIMES * change, SHIFT * math.sqrt(2) * size):
        return ""
    if now > SCALED * size > 0 or 0 < SCALED * now < size:
        return (
            f"the standard deviation of the output of {{}} was {format_factor(now / size)} times that before"
        )
    many = f"{format_factor(jump / change)} times as much as" if change else "and not at all"
    return f"the channels of the output of {{}} had moved, {many} between the looks before"


def _rest(n_before: int, n_unknown: int) -> str:
    if not n_before:
        return "; it is the first layer, so that its inputs may have changed"
    which = f"{'' if n_unknown else 'the '}{n_before} layers" if n_before > 1 else "the layer"
    return f", while {which} before it in the forward had not changed"
