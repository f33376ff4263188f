"""loss.spike: losses far above those before them, and what came first."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hookcb.core.text import as_layer
from hookcb.diagnosis.causes import (
    MAX_NORM,
    N_NEAR,
    UNFITTING,
    Cause,
    Kind,
    cause_of,
    is_wrong,
    own_cause,
    samples_of,
    text_of_limit,
    undo_from,
)
from hookcb.diagnosis.fault import Fault, Result, Site, fault, findings_of
from hookcb.diagnosis.first_change import FirstChange, first_change
from hookcb.diagnosis.measurements.group_settings import GroupSettings
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.moments import Moments
from hookcb.diagnosis.measurements.settings import Settings
from hookcb.diagnosis.measurements.shifts import OTHER_DATA, Shifts, compare_from
from hookcb.diagnosis.measurements.spike_looks import SpikeLooks
from hookcb.diagnosis.measurements.spikes import CALM, MIN_BEFORE, N_AFTER, Spike, Spikes
from hookcb.diagnosis.measurements.step_scales import LimitChange, OfSteps
from hookcb.diagnosis.moves import moves_since, text_of
from hookcb.diagnosis.rules import median
from hookcb.diagnosis.run import Layer, Param, Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding

MINOR = 1 / 4  # of the largest rise, below which a spike of a single batch gets no finding of its own
N_SPIKES, ALONE, ALONE_RATIO = 2, 8.0, 1.25  # how many, or how far above in noise and in relation


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
    √2. A note; a warning if the state of the optimizer or the scale of a GradScaler was wrong, or if what
    came first is known with its step and the loss is soon NaN or infinite, or if the rate had risen or
    clipping had ended, or the model is no better than a constant in the end, as `loss.trivial` warns and
    without `loss.diverging`, and the loss had not come back after 128 batches and is still above that limit
    at the end. Other losses may stay higher as intended, as of tasks in a row.

    What came first, in this order. The state of torch's Adam, if |m| > C √v before the step of that batch, in
    any of up to 1,024 sampled elements of each parameter, C = (1 - β₁) / √((1 - β₂)(1 - β₁²/β₂)): no
    gradients can make that, by the inequality of Cauchy and Schwarz; on a CPU, in float32. A state of Adam
    that was replaced within the eight steps before, as `adam.state` tells it; one that is a note there comes
    first only if the loss is high for more than one batch. The batch, if the next three losses are usual, as
    its step has then left the weights as good as they were, or if most of its samples have usual losses and
    the next losses keep less than a third of the excess and are usual within 16 batches, or if its inputs are
    four times as large as those of all inspected batches, or have a quarter of the different integers of any
    that is no larger, or if a twentieth, and two or more, of its samples that come again have another target,
    or if the mean, size or pattern of its inputs or targets has left the range of all batches before, as
    below, and that of half of the others until the loss has healed, 16 at most. A GradScaler, if its scale
    had fallen by a third or more between the backward and the step of one of the 64 batches before. The
    learning rate, if it has risen by half or more from one step to the next within the 64 steps before, or to
    twice as much over these, in one parameter group or all. Clipping by torch, if within these it has ended,
    or its limit has risen by half or more, after 32 steps or more with one limit, which had cut half of the
    last 8 to 32 gradients. Something else that a program has changed within eight steps, see `loss.worse`, if
    the loss is high for more than one batch. A layer or parameter whose standard deviation, largest magnitude
    or norm has jumped in the last two looks before the spike, at most 128 batches before: above the five
    looks before by a factor of two, and by twice their largest change in logarithms, after eight looks or
    more from step 16 on. Several batches in a row, or a model that was changed by something else, if the loss
    jumps at once and stays, while most samples of its first batch have usual losses, or the updates of the
    eight steps before are at most the largest of the 24 before these: their root mean square, of up to 64
    elements of the three largest parameters, on a CPU; where it is not known, the norms of the gradients. It
    is the data of one of several ranks, or what else is its own, if all train one model, and the mean loss of
    the others is above the usual one by no more than half of the noise: what acts on weights is no cause
    then. Otherwise, if later losses are higher or keep half of the excess, the weights, if the loss climbs to
    twice the first excess, or an update in the eight steps before was four times the largest of the 24
    before, or a norm four times the median norm before; else the weights or several batches. What is not
    known is said. For these, and for a layer that had jumped, it is told where the loss shows first in the
    forward, which need not be the cause: the first layer whose output, in each of the two batches after the
    first one of the spike, has means and standard deviations of channels whose distance to those of the last
    two looks before is twice the largest one between four looks before, and a fifth of its standard
    deviation; of the last layer, half as much again. These batches are no inspected ones; beside compiled
    code only layers in it are seen, on a GPU none. For what came first besides a batch, it is told if in the
    eight steps before the scale of a GradScaler has changed, or a norm was four times the median norm before.
    Other data come before a layer, and before a batch that is unusual, if the loss is high for more than one
    batch: inputs or targets that are others for good, from one of the eight steps before on or from the batch
    itself. Their mean, their standard deviation or, of float targets, their root mean square has left the
    range of all batches before, 32 or more, and does so on that side in seven of the eight batches after the
    first. Or samples that come again have another target, see `Relabels`. The range is without the smallest
    and the largest number, and is widened on both sides by its width, and at least by a tenth of the largest
    standard deviation or root mean square. Or the pattern of 16 batches, and of the next 16, is farther from
    the mean pattern of all before than any of six or more such blocks, by three times the range of their
    distances and by 0.1. The pattern of numbers is their mean at each place, and the distance the mean
    squared difference, divided by the variance; that of indices, such as tokens, is how often two neighbors
    come, in 256 bins, and the distance that of Hellinger, squared; it begins where the distances of single
    batches rise most. Of each batch these are numbers of up to 1,024 elements of the largest input, and of
    the targets that the loop tells or a loss of torch has saved.

    Source: J. von Neumann et al., "The mean square successive difference", 1941, and P. J. Huber, "Robust
    Statistics", 1981, for the noise. The batch or the state of the weights: A. Chowdhery et al., "PaLM",
    2022, section 5.1, whose spikes needed both.
    """

    headline = "The loss spikes"
    uses = (Spikes, SpikeLooks, GroupSettings, Loss, Moments, Settings, Shifts)
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        measured = run.measured(Spikes)
        if len(run.loss) <= MIN_BEFORE:
            yield Skipped(f"fewer than {MIN_BEFORE} batches")
        elif not (spikes := measured.found) or (measured.n < N_SPIKES and not _stands_out(spikes[0])):
            yield Passed(f"spikes of the loss ({measured.n})")
        else:
            groups = _by_cause(spikes, run)
            largest = max(groups, key=lambda group: _largest_rise(group[1]))
            least = MINOR * _largest_rise(largest[1])
            # smaller spikes of single batches, or without a known cause, are told beside the largest one
            rest: list[Spike] = []
            told: list[tuple[Cause, list[Spike]]] = []
            for cause, same in groups:
                is_small = cause.kind == "unknown" or (cause.kind == "batch" and _largest_rise(same) < least)
                if is_small and same is not largest[1]:
                    rest += same
                else:
                    told.append((cause, same))
            rest.sort(key=lambda spike: spike.step)
            for cause, same in told:
                yield self._finding(run, cause, same, rest if same is largest[1] else ())

    def _finding(self, run: Run, cause: Cause, spikes: Sequence[Spike], smaller: Sequence[Spike]) -> Finding:
        """A finding on the spikes of one cause, that of the largest."""
        spike = max(spikes, key=_rise)
        first = spikes[0].step if cause.since is None else min(cause.since, spikes[0].step)
        others = [x for x in spikes if x is not spike]
        has_stayed = any(_has_stayed(x, run) for x in spikes)
        is_alarm = cause.kind in WRONG or (has_stayed and cause.kind in HARSHER)
        is_alarm |= _has_stayed(spike, run) and _is_ruined(run)
        is_alarm |= cause.since is not None and not all(map(math.isfinite, spike.after))
        if cause.kind == "batch" and _has_stayed(spike, run):
            cause = cause._replace(kind="batches")
        shown = _where(_origin(spike, spikes), cause, run)
        name = as_layer(shown.layer.name) if shown.layer else ""
        is_open = cause.kind in ("batches", "unsure", "weights", "unknown") and _has_stayed(spike, run)
        moved = text_of(moves_since(run, spike.step, spike.step + N_AFTER // 4)) if is_open else ""
        look = (f"Look at what {name} gets and computes from step {spike.step} on",) if name else ()
        return self.finding(
            f"The loss jumps to {spike.value:.3g} at step {spike.step:,}{_place(spike)}, while up to "
            f"{spike.limit:.3g} is noise: {cause.text}.{shown.text}{_before(spike, cause)} "
            f"{_healing(spike, run)}{_repeated(spike, others)}{_smaller(smaller)}{moved}",
            "warning" if is_alarm else "info",
            at=shown.layer or cause.at,
            when=(first, spikes[-1].step),
            value=spike.value,
            limit=spike.limit,
            causes=CAUSES[cause.kind],
            next_steps=(*look, *_next_steps(spike, cause, run)),
            ranks=spike.ranks,
        )


def _origin(spike: Spike, spikes: Sequence[Spike]) -> Spike:
    """The first one of those in a row before a spike that have not healed."""
    i = spikes.index(spike)
    while i and spikes[i - 1].lasted is None:
        i -= 1
    return spikes[i]


def _where(spike: Spike, cause: Cause, run: Run) -> FirstChange:
    """The layer in which it shows first, if nothing better is known."""
    found = first_change(spike, run) if cause.kind in LOCALIZED else None
    return found or FirstChange(None, "")


def _rise(spike: Spike) -> float:
    return spike.value - spike.middle


def _largest_rise(spikes: Sequence[Spike]) -> float:
    return max(map(_rise, spikes))


def _by_cause(spikes: Sequence[Spike], run: Run) -> list[tuple[Cause, list[Spike]]]:
    """Spikes of each kind of cause, with that of the largest.

    One that comes soon after another and is no larger is an aftershock, and has the cause of that.
    """
    first, cause, last = spikes[0], cause_of(spikes[0], run), spikes[0].step
    found: dict[Kind, list[tuple[Spike, Cause]]] = {cause.kind: [(first, cause)]}
    for spike in spikes[1:]:
        own = own_cause(spike, run)
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
LOCALIZED: tuple[Kind, ...] = ("layer", "batches", "unsure", "weights", "unknown")
HARSHER: tuple[Kind, ...] = ("rate", "clip")  # larger steps, as the program has it
CAUSES: dict[Kind, tuple[str, ...]] = {
    "batch": ("unusual or damaged samples",),
    "scaler": ("scaler.update() or a new scale between the backward and the step",),
    "rate": ("a learning rate that rises too fast or too far",),
    "clip": ("steps that are larger than before, as gradients are no longer cut",),
    "state": ("a state that was loaded, scaled or reset in part, or of another training",),
    "reset": ("a state of the optimizer that was reset or loaded, so that its next steps have another size",),
    "layer": ("activations, gradients or weights of that layer that grow",),
    "batches": (
        "several damaged or mislabeled batches, or data of another kind",
        "a program that writes to weights, or changes a mode or a setting of the model",
    ),
    "data": (OTHER_DATA,),
    "setting": (UNFITTING,),
    "unsure": (
        "an update that was too large, as the optimizer's state lags, or a rate that is too high",
        "several damaged or mislabeled batches in a row, or data of another kind",
    ),
    "weights": (
        "an update that was too large, as the optimizer's state lags",
        "a learning rate that is too high",
    ),
    "unknown": ("unusual samples", "a learning rate that is slightly too high"),
}


def _before(spike: Spike, cause: Cause) -> str:
    """Further sentences on the steps before a spike that may have led to it."""
    if cause.kind in ("batch", "batches", "data", *WRONG):
        return ""
    said = []
    if spike.limit_change and cause.kind != "clip":
        said.append(f" F{text_of_limit(LimitChange(*spike.limit_change))[1:]}.")
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


def _is_ruined(run: Run) -> bool:
    """Whether the model is no better than a constant in the end, and the loss does not rise by itself."""
    is_trivial = any(f.severity != "info" for f in findings_of("loss.trivial", run))
    return is_trivial and not findings_of("loss.diverging", run)


def _place(spike: Spike) -> str:
    """The batch within its epoch, as far as the loop tells of epochs."""
    return f", batch {spike.batch:,} of epoch {spike.epoch} (from 0)" if spike.epoch else ""


def _near(numbers: OfSteps, step: int) -> OfSteps:
    """Numbers of the eight steps before a step."""
    return tuple(x for x in numbers if x[0] >= step - N_NEAR)


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
    return f" Smaller ones are at step {shown}."


def _stands_out(spike: Spike) -> bool:
    """Whether a single spike is worth a note."""
    is_high = spike.excess >= ALONE and spike.value > spike.middle + (ALONE_RATIO - 1) * abs(spike.middle)
    return is_wrong(spike) or is_high or len(spike.after) > 2 * CALM


def _next_steps(spike: Spike, cause: Cause, run: Run) -> tuple[str, ...]:
    folder = run.measured(Spikes).folder
    again = f"hookcb replay {folder} --step {spike.step} runs it again, layer by layer" if folder else ""
    if cause.kind == "batch":
        samples = "the samples that are named" if samples_of(spike) else "the samples"
        look = f"Look at {samples}, in the batch of step {spike.step}"
        return f"{look}: {again}" if again else look, run.advise("clip")
    if cause.kind == "setting" and cause.since is not None:
        return (undo_from(cause.since),)
    if cause.kind == "data" and cause.since is not None:
        return (compare_from(cause.since),)
    if cause.kind in ("batches", "unsure"):
        look = f"Look at the batches and the model at step {spike.step}"
        clip = (run.advise("clip"),) if cause.kind == "unsure" else ()
        return (f"{look}: {again}" if again else look, *clip)
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
        place = as_layer(cause.at.name) if isinstance(cause.at, Layer | Param) else "that layer"
        return f"Look at {place} from that step on", run.advise("clip")
    adam = "with Adam, lower beta2 to 0.95, so that it follows gradients that grow"
    steps = run.advise("clip"), f"Lower the learning rate, or {adam}"
    return (f"Look at step {spike.step} and the one before: {again}", *steps) if folder else steps
