"""loss.diverging: a loss that has risen and stays high."""

import math
from collections.abc import Iterator
from itertools import pairwise

from hookcb.diagnosis import rules
from hookcb.diagnosis.advice import lower_rate
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.shifts import OTHER_DATA, Growth, Shifts, compare_from
from hookcb.diagnosis.run import Passed, Run, Series, Skipped

MAX_RISE_UNKNOWN = 4.0  # like MAX_RISE, for a loss that may be one side of a game
SOLVED = 0.01  # share of the loss of guessing below which a loss does not diverge
NOISE = 3.0  # standard deviations of the losses of single batches
MAX_OF_MINIMUM, MIN_SMOOTHED = 2.0, 20  # times the smallest moving average; number of averages
INFLATED = 5.0  # times the first batch: the first ten already diverge
USUAL = 100.0  # times by which values of a reinforcement learning may grow, as to 1 / (1 - discount)
NEAR = 32  # steps between a rise of the loss and a growth of the targets that is told with it
OTHERS = ("the learning rate is too high", "a loss with the wrong sign", "growing targets")
LOOK = "Look for a minus sign in the loss, and check whether its targets grow"
MADE = ("targets that the model makes, and that feed on themselves", "targets on another scale")
LOOK_AT_MADE = "Look at the code that makes the targets: masks, flags, a discount, detach, a target network"


@fault(
    "loss.diverging", Site.RUN, needs="loss", leads_to="nonfinite.*", shown_by="run.loss", draws_limit=True
)
class DivergingLoss(Fault):
    """A loss that is higher than at the beginning and stays there.

    Formula: the moving average is above the beginning by 50 % of its size, above twice its minimum if that
    is positive, and above a hundredth of the loss of guessing, as what is solved has only rounding to rise
    by; for the last 50 batches, or the last third of a shorter run of 20 or more, unless by LBFGS. If the
    kind of the loss is not known, or over fewer than 50 batches, by 400 %: one side of a game (a GAN's
    generator) rises as the other learns. Over fewer than 50 also by three standard deviations of the noise
    between batches, as one batch may have a small loss by chance. A loss of unknown kind is an error only if
    five of eight steps change a weight by more than 0.05 of its size, or one before the rise by 0.2, or if
    LBFGS trains the model, whose steps are not seen; else it is a note, as a part of it may have growing
    targets. Squared and Huber errors are not reported if, since the rise, or in the last inspected batch
    before it, the RMS of the outputs exceeds that of the errors by more than the RMS of the first outputs
    plus that of the first errors. By the triangle inequality the targets have then grown, as values in
    reinforcement learning do.

    Float targets are named first if they have grown with the loss: the root mean square of up to 1,024
    elements, in the last eight batches, is four times the largest in the first 32, and has stayed above
    twice that since 32 batches after the loss left its limit, or before. If they have grown by the rule
    above, too, that is a note, and told only if they are a hundred times as large, as values with a discount
    of 0.99 are.

    Source: Ben Braiek & Khomh, "Testing Feedforward Neural Networks Training Programs", 2023, who look for a
    loss that rises repeatedly; the limits are ours.
    """

    headline = "The loss rises and stays high"
    uses = (Curves, Loss, Shifts)

    def findings(self, run: Run) -> Iterator[Result]:
        smooth, first, known = run.smooth_loss(), run.first_loss, run.measured(Loss)
        start = run.loss.values[0] if len(run.loss) else math.nan
        if not math.isfinite(first) or first > start + (INFLATED - 1) * abs(start):
            first = start
        if len(smooth) < MIN_SMOOTHED or not math.isfinite(first):
            yield Skipped(f"fewer than {MIN_SMOOTHED} batches with a finite loss")
            return
        if first == 0 and math.isnan(known.guess):
            yield Skipped("the loss began at 0, so that its rise cannot be compared with anything")
            return
        lowest, is_sure = min(smooth.values), known.kind and len(smooth) >= rules.MIN_BATCHES
        limit = first + (rules.MAX_RISE if is_sure else MAX_RISE_UNKNOWN) * abs(first)
        limit = max(limit, MAX_OF_MINIMUM * lowest) if lowest > 0 else limit
        limit = limit if math.isnan(known.guess) else max(limit, SOLVED * known.guess)
        span = rules.trailing(smooth, lambda x: x > limit, 1)
        last = smooth.values[-1]
        if span is not None and len(smooth) < rules.MIN_BATCHES and _may_be_chance(run.loss, first):
            yield Skipped(
                f"fewer than {rules.MIN_BATCHES} batches, with losses that vary too much between them"
            )
            return
        # LBFGS tries points that it leaves at once
        least = rules.MIN_BATCHES if run.is_by_closure else min(rules.MIN_BATCHES, len(smooth) // 3)
        if span is None or span.n < least:
            yield Passed(f"diverging loss (at {last:.3g}, from {first:.3g})", last, limit)
            return
        growth, may_be_meant = _growth_by(run, span.first + NEAR), _has_growing_targets(run, span.first)
        if may_be_meant and (growth is None or growth.after < USUAL * growth.before):
            yield Passed(f"diverging loss (at {last:.3g}, from {first:.3g}, as its targets have grown)")
            return
        # a large first step may leave nothing that moves any more
        is_large = rules.first_update(run) > rules.MAX_FIRST_UPDATE
        is_large = is_large or any(map(rules.has_large_updates, rules.weights(run)))
        is_error = (known.kind or run.is_by_closure or is_large) and not may_be_meant
        # the model is that of all ranks, so it does not make the targets of some
        made = "" if growth is None or growth.ranks else ": they may be made by the model itself"
        named = f"T{growth.text[1:]}{made}. " if growth else ""
        causes = OTHERS if growth is None else MADE if made else (OTHER_DATA,)
        look = () if growth is None else (LOOK_AT_MADE if made else compare_from(growth.step),)
        yield self.finding(
            f"{named}The loss has risen from {first:.3g} to {last:.3g} and has stayed above the limit of "
            f"{limit:.3g} for {span.n:,} batches.",
            "error" if is_error else "info",
            when=span,
            value=last,
            limit=limit,
            causes=causes,
            next_steps=look or (*(lower_rate(run) or (run.advise("rate"),)), LOOK),
        )


def _growth_by(run: Run, step: int) -> Growth | None:
    """Growth of the targets that has begun up to a step."""
    growth = run.measured(Shifts).growth
    return growth if growth is not None and growth.step <= step else None


def _may_be_chance(loss: Series, first: float) -> bool:
    """Whether `first` may be below the median of later losses because losses of batches vary.

    The noise of a loss above 0 is that of its logarithm; it is read from differences, which a trend shifts.
    """
    later = rules.finite(loss.values[1:])
    is_positive = first > 0 and min(later) > 0
    values = [math.log(x) for x in later] if is_positive else later
    noise = rules.spread(b - a for a, b in pairwise(values))[1] / math.sqrt(2)
    return rules.median(values) - (math.log(first) if is_positive else first) < NOISE * noise


def _has_growing_targets(run: Run, since: int) -> bool:
    """Whether outputs from step `since` on are larger than the errors and the first targets explain.

    If no output was inspected since then, the last one before counts.
    """
    kind = run.measured(Loss).kind
    outputs = max(run.layers.values(), key=lambda layer: layer.place, default=None)
    if kind not in ("mse", "mae", "huber") or outputs is None:
        return False
    losses, means = dict(run.loss), dict(outputs.series("mean"))
    records = [
        (step, math.sqrt(_squared(losses[step], kind)), math.hypot(std, means[step]))
        for step, std in outputs.series("std")
        if step in losses and step in means
    ]
    first_targets = rules.median([error + size for _, error, size in records[: rules.LATEST]])
    later = [record for record in records[rules.LATEST :] if record[0] >= since] or records[-1:]
    return rules.median([size - error for _, error, size in later]) > first_targets


def _squared(loss: float, kind: str) -> float:
    """Squared error behind a loss; a Huber loss is half of it, and linear for errors above 1."""
    return loss if kind == "mse" else max(2 * loss, (loss + 0.5) ** 2 if loss > 0.5 else 0.0)
