"""First change: the first layer in the order of the forward whose output changed when the loss did."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hookcb.core.text import as_layer
from hookcb.diagnosis.causes import N_BAND, N_RECENT
from hookcb.diagnosis.measurements.spike_looks import SpikeLooks
from hookcb.diagnosis.measurements.spikes import Spike
from hookcb.diagnosis.rules import format_factor, in_order, median
from hookcb.diagnosis.run import Layer, Run

OF_OUTPUTS = {"std": "standard deviation", "abs_max": "largest magnitude", "mean": "mean"}
LIMITS = {"std": math.log(1.25), "abs_max": math.log(1.25), "mean": 0.5}  # a mean in standard deviations
OF_LAST = math.log(1.5) / math.log(1.25)  # times these, of the last layer, which learns first from other targets
SHIFT = 0.2  # root of the mean square by which channels differ, in standard deviations of the output
TIMES = 2.0  # of a jump to the largest change between the looks it is compared with
N_LATER, SOON = 2, 32  # inspected batches that stand in for looks at a spike, and steps after it

Looks = Mapping[int, Mapping[str, Mapping[str, float]]]  # statistics of layers' outputs by step, layer and name


class FirstChange(NamedTuple):
    """The layer, None if the output of none has changed, and a sentence on it."""

    layer: Layer | None
    text: str

    @property
    def causes(self) -> tuple[str, ...]:
        """What may have changed there."""
        return ("a mode, a scale, a mask, a dtype or a buffer that changed there",) if self.layer else ()

    def next_steps(self, step: int) -> tuple[str, ...]:
        """Where to look first."""
        name = as_layer(self.layer.name) if self.layer else ""
        return (f"Look at what {name} gets and computes from step {step} on",) if name else ()


def first_change(spike: Spike, run: Run) -> FirstChange | None:
    """Finds where a spike shows first in the forward; None if that is not known.

    A standard deviation or largest magnitude has left its band if it is above or below those of the last five
    looks before by a factor of 1.5, a mean by half a standard deviation, and both by twice the largest change
    between these; in each look while the spike lasts, in the same direction.
    """
    looks = run.measured(SpikeLooks).found.get(spike.step) or _inspected(spike, run)
    n_known = n_unknown = 0
    layers = in_order(run) if looks else []
    for layer in layers:
        after = [seen.get(layer.name, {}) for seen in looks.values()]
        times = OF_LAST if layer is layers[-1] else 1.0
        jumps = {stat: _jump(layer, stat, spike.step, after, times * LIMITS[stat]) for stat in OF_OUTPUTS}
        known = {stat: jump for stat, jump in jumps.items() if not math.isnan(jump)}
        stat = max(known, key=lambda stat: abs(known[stat]) / LIMITS[stat], default="")
        what = _of_stat(layer, stat, known[stat]) if stat and known[stat] else ""
        if what or (what := _of_profile(layer, times, spike.step, run)):
            return FirstChange(layer, _told(looks, what, n_known, n_unknown))
        n_known, n_unknown = n_known + bool(stat), n_unknown + (not stat)
    if not n_known or n_unknown:
        return None
    return FirstChange(None, f"{_when(looks)} the outputs of all {n_known} layers were of their usual size.")


def _inspected(spike: Spike, run: Run) -> Looks:
    """Statistics of inspected batches soon after the beginning of a spike, while it lasted."""
    until = spike.step + min(SOON, len(spike.after) if spike.lasted is None else spike.lasted)
    found: dict[int, dict[str, dict[str, float]]] = {}
    for layer in run.layers.values():
        for stat in OF_OUTPUTS:
            for step, x in layer.series(stat):
                if spike.step < step <= until:
                    found.setdefault(step, {}).setdefault(layer.name, {})[stat] = x
    return {step: found[step] for step in sorted(found)[:N_LATER]}


def _jump(
    layer: Layer, stat: str, until: int, after: Sequence[Mapping[str, float]], limit: float
) -> float:
    """By how much a statistic has left its band, of a size in logarithms; 0 if it has not, NaN if unknown."""
    std = median([x for step, x in layer.series("std") if step < until][-N_RECENT:])

    def scaled(x: float) -> float:
        if stat == "mean":
            return x / std if std > 0 else math.nan
        return math.log(x) if 0 < x < math.inf else math.nan

    usual = [y for step, x in layer.series(stat) if step < until and math.isfinite(y := scaled(x))]
    later = [scaled(stats.get(stat, math.nan)) for stats in after]
    if len(usual) < N_BAND or not all(map(math.isfinite, later)):
        return math.nan
    recent = usual[-N_RECENT:]
    least = max(limit, TIMES * max(abs(y - x) for x, y in pairwise(recent)))
    above, below = min(later) - max(recent), min(recent) - max(later)
    return above if above > least else -below if below > least else 0.0


def _of_stat(layer: Layer, stat: str, jump: float) -> str:
    what = f"the {OF_OUTPUTS[stat]} of the output of {as_layer(layer.name)} was"
    if stat == "mean":
        return f"{what} {abs(jump):.2g} standard deviations {'above' if jump > 0 else 'below'} its usual values"
    return f"{what} {format_factor(math.exp(jump))} times its usual value"


def _of_profile(layer: Layer, times: float, step: int, run: Run) -> str:
    """A clause on the channels of an output, if they have left their band; else ""."""
    found = run.measured(SpikeLooks).profiles.get(step, {})
    before = [x[layer.name] for at, x in found.items() if at < step and layer.name in x]
    after = [x[layer.name] for at, x in found.items() if at > step and layer.name in x]
    n = len(before[-1]) if before else 0
    if len(before) < N_RECENT or not after or any(len(x) != n for x in (*before, *after)):
        return ""
    size = median(math.hypot(*x[n // 2 :]) for x in before) / math.sqrt(n // 2)
    change = max(math.dist(a, b) for a, b in pairwise(before)) / math.sqrt(n)
    jump = min(math.dist(a, b) for a in before for b in after) / math.sqrt(n)
    if not jump > times * max(SHIFT * size, TIMES * change):
        return ""
    many = f"{format_factor(jump / change)} times as far" if change else "far"
    return (
        f"the means and standard deviations of the channels of the output of {as_layer(layer.name)} were "
        f"{many} from those of the looks before as these are from each other"
    )


def _told(looks: Looks, what: str, n_before: int, n_unknown: int) -> str:
    first = f"{_when(looks)} {what}"
    if not n_before:
        return f"{first}; it is the first layer, so that its inputs may have changed."
    which = f"{'' if n_unknown else 'the '}{n_before} layers" if n_before > 1 else "the layer"
    return f"{first}, while {which} before it in the forward {'were' if n_before > 1 else 'was'} as before."


def _when(looks: Looks) -> str:
    steps = " and ".join(f"{step:,}" for step in looks)
    return f" At step{'s' * (len(looks) > 1)} {steps}"
