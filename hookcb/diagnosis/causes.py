"""Causes of a spike of the loss: what came first, from what was kept around it."""

import math
from itertools import pairwise
from typing import Literal, NamedTuple

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import findings_of
from hookcb.diagnosis.measurements.group_rates import JUMP, RISE, Jump
from hookcb.diagnosis.measurements.group_settings import GroupSettings
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.moments import Moments
from hookcb.diagnosis.measurements.relabels import SHARE
from hookcb.diagnosis.measurements.settings import Settings
from hookcb.diagnosis.measurements.shifts import Shifts
from hookcb.diagnosis.measurements.spikes import N_AFTER, Spike
from hookcb.diagnosis.measurements.step_scales import LimitChange, Rescaled
from hookcb.diagnosis.rules import format_factor, median
from hookcb.diagnosis.run import Layer, Param, Run, Series
from hookcb.processes.groups import name_ranks

N_NEAR = 8  # steps before a spike in which a change counts
MAX_SPAN = 48  # steps between two looks at a setting, as one layer is looked at in each batch
FALLS = 1 / 3  # part of the excess that the next batches keep at most, if it was the batch's
SOON = 16  # batches within which it heals then
N_BAND, N_RECENT, N_BEFORE = 8, 5, 2  # looks before a jump, those it is compared with, and those after it
YOUNG = 16  # steps of a training in which all numbers move, so that they show no band
RATIO = 2.0  # of a jump to the number before, and to the largest change between the looks it is compared with
MAX_INPUT = 4.0  # ratio of the largest input to that of all inspected batches
FEWER = 4  # different values in it, relative to any inspected batch that is no larger
MAX_NORM = 4.0  # ratio of a norm in the steps before a spike to the median before these
MIN_NORMS, CUT = 8, 1 / 2  # known norms before a limit of clipping ended, and the share that it cut
OF_LAYERS = {"std": "standard deviation of the output", "abs_max": "largest output"}
OF_PARAMS = {"rms": "RMS of the gradient", "weight_norm": "norm"}

UNFITTING = "a change of the training that does not fit it at this point"

Kind = Literal[
    "batch",
    "scaler",
    "rate",
    "clip",
    "state",
    "reset",
    "setting",
    "layer",
    "batches",
    "data",
    "weights",
    "unsure",
    "unknown",
]


class Cause(NamedTuple):
    """Cause of a spike: its kind, the end of a sentence on it, and the layer, or its name, or parameter."""

    kind: Kind
    text: str
    at: Layer | Param | str | None = None
    since: int | None = None  # step of what is a fact


def cause_of(spike: Spike, run: Run) -> Cause:
    """Finds what came first at a spike, as far as it was seen."""
    found = own_cause(spike, run) or _of_layers(spike, run) or _of_weights(spike)
    return found or Cause("unknown", "the batch came first, or the step before it, which was not seen")


def own_cause(spike: Spike, run: Run) -> Cause | None:
    """The cause that is seen without the layers."""
    if (of_rank := _of_rank(spike, run)) is not None:  # so weights, and what has led to them, are not
        found = _of_batch(spike) or _of_setting(spike, run)
    else:
        of_steps = _of_scaler(spike) or _of_rate(spike) or _of_clipping(spike)
        found = _of_state(spike, run) or _of_batch(spike) or of_steps or _of_setting(spike, run)
    found = (_of_data(spike, run) or found) if found is None or found.kind == "batch" else found
    return found or of_rank


def is_wrong(spike: Spike) -> bool:
    """Whether the state of Adam, or the scale of a GradScaler, was wrong before it."""
    return spike.ratio > 1 or _of_scaler(spike) is not None


def _of_rank(spike: Spike, run: Run) -> Cause | None:
    """The data of one rank, if the others, whose weights are the same, have usual losses in that step."""
    n = run.measured(Loss).n_ranks
    mean = next((x for step, x in run.loss if step == spike.step), math.nan)
    if n < 2 or len(spike.ranks) != 1 or run.measured(GroupSettings).n_sharing != n:
        return None
    others = (n * mean - spike.value) / (n - 1)
    if not others <= (spike.middle + spike.limit) / 2 or findings_of("replica.diverged", run):
        return None
    rank = name_ranks(spike.ranks)
    return Cause(
        "batches",
        f"it is in the data of {rank}, or in what else is its own, as the other ranks have the same weights "
        f"and usual losses in this step, {others:.3g} on average",
    )


def _of_batch(spike: Spike) -> Cause | None:
    """The batch, if the weights are seen to be good before it, or after its step."""
    samples = samples_of(spike)
    if spike.inputs > MAX_INPUT:
        scale = f"its inputs are {spike.inputs:.3g} times as large as those of all inspected batches"
        why = f"this batch came first, as {scale}"
    elif spike.n_values and spike.n_values[0] * FEWER <= spike.n_values[1]:
        n, least = spike.n_values
        many = f"{n} different value{'s' * (n > 1)}"
        why = f"this batch came first, as its inputs have {many}, and all inspected ones {least} or more"
    elif spike.relabeled[1] > max(1, SHARE * spike.relabeled[0]):
        n, n_other = spike.relabeled
        why = f"this batch came first, as {n_other} of its {n} samples that come again have another target"
    elif spike.lasted == 1:
        why = f"it is this batch alone, as the next ones are usual{', and ' * bool(spike.odd)}{spike.odd}"
    elif spike.odd and spike.lasted is not None:  # else the data are others for good
        why = spike.odd
    elif samples and spike.typical <= spike.limit and _rest(spike) < FALLS and _has_healed_soon(spike):
        why = "this batch came first, as most of its samples are usual"
    else:
        return None
    return Cause("batch", f"{why}; {samples}" if samples else why)


def _of_rate(spike: Spike) -> Cause | None:
    if spike.jump:  # of one group
        jump = Jump(*spike.jump)
        return Cause("rate", jump.text, since=jump.step if jump.since is None else None)
    for (_, before), (step, rate) in pairwise(spike.rates):
        if 0 < JUMP * before <= rate:
            rise = f"the learning rate had risen from {before:.3g} to {rate:.3g} at step {step:,}"
            return Cause("rate", rise, since=step)
    if spike.rates and 0 < RISE * spike.rates[0][1] <= spike.rates[-1][1]:
        (first, before), (_, rate) = spike.rates[0], spike.rates[-1]
        return Cause("rate", f"the learning rate has risen from {before:.3g} at step {first:,} to {rate:.3g}")
    return None


def _of_scaler(spike: Spike) -> Cause | None:
    """The GradScaler, if gradients were divided by another scale than they were multiplied by."""
    if not spike.rescaled:
        return None
    step, before, after = Rescaled(*spike.rescaled)
    if not 0 < JUMP * after <= before:
        return None
    return Cause(
        "scaler",
        f"the scale of the GradScaler had changed from {before:,.6g} to {after:,.6g} between the backward "
        f"and the step of batch {step:,}, so that its gradients were {before / after:,.3g} times too large",
        since=step,
    )


def _of_clipping(spike: Spike) -> Cause | None:
    """Clipping that has ended, or whose limit has risen, if it did cut most gradients."""
    if not spike.limit_change:
        return None
    change = LimitChange(*spike.limit_change)
    norms = [x for step, x in spike.norms if step < change.step and math.isfinite(x)]
    n_cut = sum(x > change.before for x in norms)
    if len(norms) < MIN_NORMS or n_cut < CUT * len(norms):
        return None
    had_cut = f"it had cut {n_cut} of the last {len(norms)} gradients"
    return Cause("clip", f"{text_of_limit(change)}; {had_cut}", since=change.step)


def _of_setting(spike: Spike, run: Run) -> Cause | None:
    """Something else that a program has changed in the steps before, if the loss then stays high."""
    changes = (x for x in run.measured(Settings).changes if x.step - x.last <= MAX_SPAN)
    near = [x for x in changes if x.last < spike.step and x.step >= spike.step - N_NEAR]
    if not near or spike.lasted == 1:
        return None
    first = min(near, key=lambda x: x.last)
    at = run.layers.get(first.layer) or first.layer if first.layer else None  # may have layers inside
    said = "; ".join(dict.fromkeys(x.text for x in near))
    return Cause("setting", f"the program had changed {said}", at, since=first.last + 1)


def _of_data(spike: Spike, run: Run) -> Cause | None:
    """Inputs or targets that are others for good, from a step near the spike on."""
    measured = run.measured(Shifts)
    shift, growth = measured.near(spike.step, N_NEAR), measured.growth
    if shift is None or spike.lasted == 1:
        return None
    if growth is not None and shift.of == "targets" and growth.step <= spike.step:
        return Cause("data", growth.text, since=growth.step)
    return Cause("data", shift.text, since=min(shift.step, spike.step))


def undo_from(step: int) -> str:
    """Advice to leave a change out."""
    return f"Go on from a checkpoint before step {step:,} without this change"


def text_of_limit(change: LimitChange) -> str:
    """Change in the calls of torch's clipping; other ways to clip are not seen."""
    new = f"the limit of clip_grad_norm_ was {change.after:g}"
    if change.after == math.inf:
        new = "clip_grad_norm_ was not called"
    before = f"after {change.n_before:,} steps with a limit of {change.before:g}"
    return f"from step {change.step:,} on {new}, {before}"


def _of_state(spike: Spike, run: Run) -> Cause | None:
    """The state of Adam, if no gradients can have made it, or a program has replaced it in the steps before.

    A state that may be meant comes first only for a loss that stays high.
    """
    changes = (x for x in run.measured(Moments).changes if not x.has_moved)
    change = next((x for x in changes if 0 < spike.step - x.step <= N_NEAR), None)
    said = f"before step {change.step:,}, {change.text}" if change else ""
    if spike.ratio > 1:
        said += ", and " * bool(said) + impossible(spike)
        since = spike.step if change is None else change.step
        return Cause("state", f"the state of the optimizer is wrong, as {said}", since=since)
    if change is None or (spike.lasted == 1 and not change.is_foreign):
        return None
    return Cause("state" if change.is_foreign else "reset", said, since=change.step)


def impossible(spike: Spike) -> str:
    """A clause on moments of Adam that contradict each other."""
    many = f"{format_factor(spike.ratio)} times as large as any gradients with their exp_avg_sq can make them"
    return f"some elements of exp_avg are {many}"


def _of_layers(spike: Spike, run: Run) -> Cause | None:
    """The layer or parameter that left its band first, before the loss did."""
    places: list[tuple[Layer | Param, dict[str, str]]] = [(x, OF_LAYERS) for x in run.layers.values()]
    places += [(p, OF_PARAMS) for p in run.params.values()]
    found = [
        (*left, words, place)
        for place, stats in places
        for stat, words in stats.items()
        if (left := _left_band(place.series(stat), spike.step)) is not None
    ]
    if not found:
        return None
    step, ratio, what, at = min(found, key=lambda x: (x[0], -x[1]))
    words = f"the {what} of {as_layer(at.name)} was {ratio:.3g} times its usual value from step {step:,} on"
    return Cause("layer", f"{words}, before the loss", at)


def _left_band(series: Series, until: int) -> tuple[int, float] | None:
    """Step and ratio at which a number has jumped, and not come back before a step."""
    pairs = [(step, math.log(x)) for step, x in series if YOUNG <= step < until and 0 < x < math.inf]
    usual, last = [x for _, x in pairs[:-N_BEFORE]], pairs[-N_BEFORE:]
    if len(usual) < N_BAND or last[0][0] < until - N_AFTER:
        return None
    change = max(abs(y - x) for x, y in pairwise(usual[-N_RECENT:]))  # of a training that goes on
    jump = min(x for _, x in last) - max(usual[-N_RECENT:])
    return (last[0][0], math.exp(jump)) if jump > max(RATIO * change, math.log(RATIO)) else None


def _of_weights(spike: Spike) -> Cause | None:
    """The weights, if the loss stays high and climbs; batches in a row, if the steps before were usual.

    With neither sign, it may be both.
    """
    near = spike.after[:SOON]
    highest = max(near, default=-math.inf)
    if not near or (highest <= spike.value and _rest(spike) < 1 / 2):
        return None
    is_sudden = 2 * (spike.value - spike.middle) >= highest - spike.middle
    samples = samples_of(spike)
    if is_sudden and samples and spike.typical <= spike.limit:
        return Cause(
            "batches",
            "it came at once and stayed, while most samples of its first batch are usual, so that a part of "
            f"the samples of several batches is unusual, or the model fails on a part of them; {samples}",
        )
    if is_sudden and (usual := _usual_steps(spike)):
        return Cause(
            "batches",
            f"it came at once and stayed, while {usual}, so several batches in a row are unusual, or "
            "something besides the optimizer has changed the model",
        )
    climb = "the next batches have such losses too"
    if highest > spike.value:
        n = near.index(highest) + 1
        climb = f"it is {highest:.3g} {n} batch{'es' * (n > 1)} later"
    if spike.updates > MAX_NORM:
        far = f"a step before had moved weights {spike.updates:.2g} times as far as the largest of 24 before"
        return Cause("weights", f"{climb}, and {far}")
    norms, before = _norms(spike)
    is_large = bool(norms and before) and max(norms) > MAX_NORM * median(before)
    if is_sudden and not is_large:
        return Cause("unsure", f"{climb}, so the weights have moved, or these batches are unusual, too")
    return Cause("weights", f"{climb}, so the weights have moved, by this step or one before it")


def _usual_steps(spike: Spike) -> str:
    """A clause on the eight steps before, if they moved the weights as usual; "" if not, or unknown."""
    if not math.isnan(spike.updates):
        usual = f"at most {spike.updates:.2g} times the largest of the 24 before"
        return f"the updates of the 8 steps before were usual ({usual})" if spike.updates <= 1 else ""
    norms, before = _norms(spike)
    if min(len(norms), len(before)) < N_NEAR or max(norms) > max(before):
        return ""
    usual = f"norms up to {max(norms):.3g}, before that up to {max(before):.3g}"
    return f"the gradients of the {len(norms)} steps before were usual ({usual})"


def _norms(spike: Spike) -> tuple[list[float], list[float]]:
    """Norms of the gradients of the eight steps before, and of those before these."""
    first = spike.step - N_NEAR
    return [x for step, x in spike.norms if step >= first], [x for step, x in spike.norms if step < first]


def _has_healed_soon(spike: Spike) -> bool:
    """Whether it was over within 16 batches, or the training was."""
    return (spike.lasted or len(spike.after)) <= SOON


def _rest(spike: Spike) -> float:
    """Part of the excess that the median of the next three losses keeps; NaN if there are fewer."""
    near = sorted(spike.after[:3])
    return (near[1] - spike.middle) / (spike.value - spike.middle) if len(near) == 3 else math.nan


def samples_of(spike: Spike) -> str:
    """The samples of the batch that stand out; "" if none is known to."""
    worst = [f"{i} ({x:.3g})" for i, x in spike.worst if x > spike.limit]
    if not worst:
        return ""
    of = f"of its {spike.n_samples:,} samples, counted from 0, the worst are"
    return f"{of} {', '.join(worst)}, where the median is {spike.typical:.3g}"
