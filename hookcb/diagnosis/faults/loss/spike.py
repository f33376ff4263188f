"""loss.spike: losses far above those before them, and what came first."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.faults.steps.state_changed import is_foreign, what_changed
from hookcb.diagnosis.measurements.moments import Moments
from hookcb.diagnosis.measurements.spikes import CALM, MIN_BEFORE, N_AFTER, Spike, Spikes
from hookcb.diagnosis.measurements.step_scales import LimitChange, OfSteps, Rescaled
from hookcb.diagnosis.rules import median
from hookcb.diagnosis.run import Layer, Param, Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding

N_SPIKES, ALONE, ALONE_RATIO = 2, 8.0, 1.25  # how many, or how far above in noise and in relation
JUMP, RISE = 1.5, 2.0  # ratio of the rates of two steps in a row, and of the last of 64 steps to the first
FALLS = 1 / 3  # part of the excess that the next batches keep at most, if it was the batch's
N_BAND, N_RECENT, N_BEFORE = 8, 5, 2  # looks before a jump, those it is compared with, and those after it
RATIO = 2.0  # of a jump to the number before, and to the largest change between the looks it is compared with
MAX_INPUT = 4.0  # ratio of the largest input to that of all inspected batches
MIN_NORMS, CUT = 8, 1 / 2  # known norms before a limit of clipping ended, and the share that it cut
N_NEAR, MAX_NORM = 8, 4.0  # steps before a spike, and ratio of a norm there to the median before
OF_LAYERS = {"std": "standard deviation of the output", "abs_max": "largest output"}
OF_PARAMS = {"rms": "RMS of the gradient", "weight_norm": "norm"}

Kind = Literal["batch", "scaler", "rate", "clip", "state", "reset", "layer", "weights", "unknown"]


class Cause(NamedTuple):
    """Cause of a spike: its kind, the end of a sentence on it, and the layer or parameter it is about."""

    kind: Kind
    text: str
    at: Layer | Param | None = None
    since: int | None = None  # step of what is a fact


@fault(
    "loss.spike",
    Site.RUN,
    needs="loss",
    leads_to="loss.diverging loss.trivial nonfinite.*",  # of the warnings, whose cause is known
    shown_by="run.loss",
    draws_limit=True,
)
class LossSpikes(Fault):
    """Losses far above those before them: what came first, and whether they healed.

    Formula: at least two losses, each above the usual one by six times the noise, after 32 batches; or one by
    eight times and by a quarter, or one that lasts for more than three batches, or follows from a state or a
    scale that is wrong. The usual loss is the median of the last 32 or of the last 4, whichever is higher;
    the noise, 1.4826 times the median difference of two losses in a row over up to 128 batches, divided by
    √2. A note; a warning if the state of the optimizer or the scale of a GradScaler was wrong, or if the rate
    had risen or clipping had ended, the loss had not come back after 128 batches and is still above that
    limit at the end. Other losses may stay higher as intended, as of tasks in a row.

    What came first, in this order. The state of torch's Adam, if |m| > C √v before the step of that
    batch, in any of up to 1,024 sampled elements of each parameter, C = (1 - β₁) / √((1 - β₂)(1 -
    β₁²/β₂)): no gradients can make that, by the inequality of Cauchy and Schwarz; on a CPU, in float32.
    The batch, if the next three losses are usual, as its step has then left the weights as good as they
    were, or if most of its samples have usual losses and the next losses keep less than a third of the
    excess, or if its inputs are four times as large as those of all inspected batches. A GradScaler, if
    its scale had fallen by a third or more between the backward and the step of one of the 64 batches
    before. The learning rate, if it has risen by half or more from one step to the next within the 64
    steps before, or to twice as much over these. Clipping by torch, if within these it has ended, or its
    limit has risen by half or more, after 32 steps or more with one limit, which had cut half of the last
    8 to 32 gradients. A layer or parameter whose standard deviation, largest magnitude or norm has jumped
    in the last two looks before the spike, at most 128 batches before: above the five looks before by a
    factor of two, and by twice their largest change in logarithms, after eight looks or more. The
    weights, if later losses are higher or keep half of the excess. What is not known is said. For what
    came first besides a batch, it is told if in the eight steps before the scale of a GradScaler has
    changed, or a norm was four times the median norm before.

    Source: J. von Neumann et al., "The mean square successive difference", 1941, and P. J. Huber, "Robust
    Statistics", 1981, for the noise. The batch or the state of the weights: A. Chowdhery et al., "PaLM",
    2022, section 5.1, whose spikes needed both.
    """

    headline = "The loss spikes"
    uses = (Spikes, Moments)
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        measured = run.measured(Spikes)
        if len(run.loss) <= MIN_BEFORE:
            yield Skipped(f"fewer than {MIN_BEFORE} batches")
        elif not (spikes := measured.found) or (measured.n < N_SPIKES and not _stands_out(spikes[0])):
            yield Passed(f"spikes of the loss ({measured.n})")
        else:
            groups = _by_cause(spikes, run)
            largest = max(groups, key=lambda group: max(map(_rise, group[1])))
            # smaller spikes without a known cause are told beside the largest one
            rest = [
                x for group in groups if group is not largest and group[0].kind == "unknown" for x in group[1]
            ]
            for group in groups:
                if group is largest or group[0].kind != "unknown":
                    yield self._finding(run, *group, rest if group is largest else ())

    def _finding(self, run: Run, cause: Cause, spikes: Sequence[Spike], smaller: Sequence[Spike]) -> Finding:
        """A finding on the spikes of one cause, that of the largest."""
        spike = max(spikes, key=_rise)
        first = spikes[0].step if cause.since is None else min(cause.since, spikes[0].step)
        others = [x for x in spikes if x is not spike]
        has_stayed = any(_has_stayed(x, run) for x in spikes)
        return self.finding(
            f"The loss jumps to {spike.value:.3g} at step {spike.step:,}{_place(spike)}, while up to "
            f"{spike.limit:.3g} is noise: {cause.text}.{_before(spike, cause)} "
            f"{_healing(spike, run)}{_repeated(spike, others)}{_smaller(smaller)}",
            "warning" if cause.kind in WRONG or (cause.kind in HARSHER and has_stayed) else "info",
            at=cause.at,
            when=(first, spikes[-1].step),
            value=spike.value,
            limit=spike.limit,
            causes=CAUSES[cause.kind],
            next_steps=_next_steps(spike, cause, run),
            ranks=spike.ranks,
        )


def _rise(spike: Spike) -> float:
    return spike.value - spike.middle


def _by_cause(spikes: Sequence[Spike], run: Run) -> list[tuple[Cause, list[Spike]]]:
    """Spikes of each kind of cause, with that of the largest.

    One that comes soon after another and is no larger is an aftershock, and has the cause of that.
    """
    first, cause, last = spikes[0], cause_of(spikes[0], run), spikes[0].step
    found: dict[Kind, list[tuple[Spike, Cause]]] = {cause.kind: [(first, cause)]}
    for spike in spikes[1:]:
        own = _of_itself(spike, run)
        is_larger = spike.excess > first.excess or _rise(spike) > _rise(first)
        is_new = spike.step > last + N_AFTER or is_larger
        if is_new or (own is not None and own.since is not None and own.since > first.step):
            first, cause = spike, cause_of(spike, run)
        last = spike.step
        found.setdefault(cause.kind, []).append((spike, cause))
    return [
        (max(pairs, key=lambda pair: _rise(pair[0]))[1], [spike for spike, _ in pairs])
        for pairs in found.values()
    ]


WRONG: tuple[Kind, ...] = ("state", "scaler")
HARSHER: tuple[Kind, ...] = ("rate", "clip")  # larger steps, as the program has it
CAUSES: dict[Kind, tuple[str, ...]] = {
    "batch": ("unusual or damaged samples",),
    "scaler": ("scaler.update() or a new scale between the backward and the step",),
    "rate": ("a learning rate that rises too fast or too far",),
    "clip": ("steps that are larger than before, as gradients are no longer cut",),
    "state": ("a state that was loaded, scaled or reset in part, or of another training",),
    "reset": ("a state of the optimizer that was reset or loaded, so that its next steps have another size",),
    "layer": ("activations, gradients or weights of that layer that grow",),
    "weights": (
        "an update that was too large, as the optimizer's state lags",
        "a learning rate that is too high",
    ),
    "unknown": ("unusual samples", "a learning rate that is slightly too high"),
}


def cause_of(spike: Spike, run: Run) -> Cause:
    """Finds what came first at a spike, as far as it was seen."""
    found = _of_itself(spike, run) or _of_layers(spike, run) or _of_weights(spike)
    return found or Cause("unknown", "the batch came first, or the step before it, which was not seen")


def _of_itself(spike: Spike, run: Run) -> Cause | None:
    """The cause that is seen without the layers."""
    of_steps = _of_scaler(spike) or _of_rate(spike) or _of_clipping(spike)
    return _of_state(spike) or _of_new_state(spike, run) or _of_batch(spike) or of_steps


def _of_batch(spike: Spike) -> Cause | None:
    """The batch, if the weights are seen to be good before it, or after its step."""
    samples = _samples(spike)
    if spike.inputs > MAX_INPUT:
        scale = f"its inputs are {spike.inputs:.3g} times as large as those of all inspected batches"
        why = f"this batch came first, as {scale}"
    elif spike.lasted == 1:
        why = "it is this batch alone, as the next ones are usual"
    elif samples and spike.typical <= spike.limit and _rest(spike) < FALLS:
        why = "this batch came first, as most of its samples are usual"
    else:
        return None
    return Cause("batch", f"{why}; {samples}" if samples else why)


def _of_rate(spike: Spike) -> Cause | None:
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
    return Cause("clip", f"{_new_limit(change)}; {had_cut}", since=change.step)


def _new_limit(change: LimitChange) -> str:
    """Change in the calls of torch's clipping; other ways to clip are not seen."""
    new = f"the limit of clip_grad_norm_ was {change.after:g}"
    if change.after == math.inf:
        new = "clip_grad_norm_ was not called"
    before = f"after {change.n_before:,} steps with a limit of {change.before:g}"
    return f"from step {change.step:,} on {new}, {before}"


def _before(spike: Spike, cause: Cause) -> str:
    """Further sentences on the steps before a spike that may have led to it."""
    if cause.kind in ("batch", *WRONG):
        return ""
    said = []
    if spike.limit_change and cause.kind != "clip":
        said.append(f" F{_new_limit(LimitChange(*spike.limit_change))[1:]}.")
    for (_, before), (step, scale) in pairwise(_near(spike.scales, spike.step)):
        if scale != before:
            said.append(
                f" At step {step:,} the scale of the GradScaler was {scale:,.6g}, before {before:,.6g}."
            )
    usual = median(x for step, x in spike.norms if step < spike.step - N_NEAR)
    step, norm = max(_near(spike.norms, spike.step), key=lambda x: x[1], default=(0, math.nan))
    if norm > MAX_NORM * usual:
        said.append(
            f" The norm of the gradients was {norm:.3g} at step {step:,}; the median before is {usual:.3g}."
        )
    return "".join(said)


def _near(numbers: OfSteps, step: int) -> OfSteps:
    """Numbers of the eight steps before a step."""
    return tuple(x for x in numbers if x[0] >= step - N_NEAR)


def _of_state(spike: Spike) -> Cause | None:
    """The state of Adam, if no gradients can have made it."""
    if not spike.ratio > 1:
        return None
    return Cause(
        "state",
        f"the state of the optimizer is wrong, as some elements of exp_avg are {spike.ratio:.2g} times as "
        "large as any gradients with their exp_avg_sq can make them",
        since=spike.step,
    )


def _of_new_state(spike: Spike, run: Run) -> Cause | None:
    """A state of Adam that a program has replaced in the steps before; for a loss that stays high, if any."""
    for change in run.measured(Moments).changes:
        is_near = spike.step - N_NEAR <= change.step < spike.step
        if is_near and (is_foreign(change) or (spike.lasted != 1 and not change.has_moved)):
            text = f"before step {change.step:,}, {what_changed(change)}"
            return Cause("state" if is_foreign(change) else "reset", text, since=change.step)
    return None


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
    pairs = [(step, math.log(x)) for step, x in series if step < until and 0 < x < math.inf]
    usual, last = [x for _, x in pairs[:-N_BEFORE]], pairs[-N_BEFORE:]
    if len(usual) < N_BAND or last[0][0] < until - N_AFTER:
        return None
    change = max(abs(y - x) for x, y in pairwise(usual[-N_RECENT:]))  # of a training that goes on
    jump = min(x for _, x in last) - max(usual[-N_RECENT:])
    return (last[0][0], math.exp(jump)) if jump > max(RATIO * change, math.log(RATIO)) else None


def _of_weights(spike: Spike) -> Cause | None:
    near = spike.after[:16]
    if near and (highest := max(near)) > spike.value:
        n = near.index(highest) + 1
        climb = f"it is {highest:.3g} {n} batch{'es' * (n > 1)} later"
        return Cause("weights", f"{climb}, so the weights have moved, by this step or one before it")
    if near and _rest(spike) >= 1 / 2:
        return Cause(
            "weights",
            "the next batches have such losses too, so the weights have moved, by this step or before",
        )
    return None


def _rest(spike: Spike) -> float:
    """Part of the excess that the median of the next three losses keeps; NaN if there are fewer."""
    near = sorted(spike.after[:3])
    return (near[1] - spike.middle) / (spike.value - spike.middle) if len(near) == 3 else math.nan


def _samples(spike: Spike) -> str:
    """The samples of the batch that stand out; "" if none is known to."""
    worst = [f"{i} ({x:.3g})" for i, x in spike.worst if x > spike.limit]
    if not worst:
        return ""
    of = f"of its {spike.n_samples:,} samples, counted from 0, the worst are"
    return f"{of} {', '.join(worst)}, where the median is {spike.typical:.3g}"


def _healing(spike: Spike, run: Run) -> str:
    if spike.lasted is not None:
        return f"It healed within {spike.lasted:,} batch{'es' * (spike.lasted > 1)}"
    if (n := next((i for i, x in enumerate(spike.after, 1) if not math.isfinite(x)), 0)) > 0:
        return f"It is {spike.after[n - 1]:g} {n} batch{'es' * (n > 1)} later"
    if _has_stayed(spike, run):
        return f"It has not healed: the last losses are {run.loss.median(MIN_BEFORE):.3g}"
    if len(spike.after) == N_AFTER:
        return f"It took more than {N_AFTER} batches to heal"
    return "The training ended before it could heal"


def _has_stayed(spike: Spike, run: Run) -> bool:
    return len(spike.after) == N_AFTER and not run.loss.median(MIN_BEFORE) <= spike.limit  # it may be NaN


def _place(spike: Spike) -> str:
    """The batch within its epoch, as far as the loop tells of epochs."""
    return f", batch {spike.batch:,} of epoch {spike.epoch} (from 0)" if spike.epoch else ""


def _repeated(spike: Spike, others: Sequence[Spike]) -> str:
    """The other spikes of the same cause, as further sentences."""
    if not others:
        return "."
    steps = sorted(x.step for x in (spike, *others))
    gaps = {b - a for a, b in pairwise(steps)}
    if len(steps) > 2 and len(gaps) == 1:
        return f". So it does every {gaps.pop():,} batches, {len(steps)} times from step {steps[0]:,} on."
    n_alike = sum(x.batch == spike.batch and x.epoch != spike.epoch for x in others)
    is_by_place = n_alike > 1 and n_alike >= len(others) / 2
    same = f", {n_alike} of them at the same batch of other epochs" if is_by_place else ""
    shown = ", ".join(f"{x.step:,}" for x in others[:5]) + " …" * (len(others) > 5)
    return f". So it does {len(others)} more time{'s' * (len(others) > 1)}, at step {shown}{same}."


def _smaller(spikes: Sequence[Spike]) -> str:
    if not spikes:
        return ""
    shown = ", ".join(f"{x.step:,}" for x in spikes[:5]) + " …" * (len(spikes) > 5)
    return f" Smaller ones, whose cause was not seen, are at step {shown}."


def _stands_out(spike: Spike) -> bool:
    """Whether a single spike is worth a note."""
    if any(x is not None for x in (_of_state(spike), _of_scaler(spike))):
        return True
    is_high = spike.excess >= ALONE and spike.value > spike.middle + (ALONE_RATIO - 1) * abs(spike.middle)
    return is_high or len(spike.after) > 2 * CALM


def _next_steps(spike: Spike, cause: Cause, run: Run) -> tuple[str, ...]:
    folder = run.measured(Spikes).folder
    again = f"hookcb replay {folder} --step {spike.step} runs it again, layer by layer" if folder else ""
    if cause.kind == "batch":
        samples = "the samples that are named" if _samples(spike) else "the samples"
        look = f"Look at {samples}, in the batch of step {spike.step}"
        return f"{look}: {again}" if again else look, run.advise("clip")
    if cause.kind == "rate":
        return "Let the learning rate rise more slowly, or not as far", run.advise("clip")
    if cause.kind == "clip":
        return (f"Clip the gradients of each step, as before step {cause.since:,}",)
    if cause.kind == "scaler":
        return ("Change the scale of a GradScaler only after the step, by scaler.update()",)
    if cause.kind == "state":
        return "Look for code that writes to optimizer.state, or loads a part of it", run.advise("clip")
    if cause.kind == "reset":
        return "Warm the learning rate up again after the state of the optimizer is new", run.advise("clip")
    if cause.kind == "layer":
        place = as_layer(cause.at.name) if cause.at else "that layer"
        return f"Look at {place} from that step on", run.advise("clip")
    adam = "with Adam, lower beta2 to 0.95, so that it follows gradients that grow"
    steps = run.advise("clip"), f"Lower the learning rate, or {adam}"
    return (f"Look at step {spike.step} and the one before: {again}", *steps) if folder else steps
