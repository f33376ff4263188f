"""Checks of the loss: its first value, whether it falls, rises or jumps, and whether it is negative."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hookcb.diagnosis.advice import begins_large, init_advice, lower_rate
from hookcb.diagnosis.fault import Result, Site
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import (
    LATEST,
    MAX_FIRST_UPDATE,
    MAX_RISE,
    MIN_BATCHES,
    does_well,
    falls_by,
    finding,
    finite,
    first_update,
    guesses,
    has_large_updates,
    is_warming_up,
    limit_of_flat,
    lowest_loss,
    median,
    need_not_fall,
    spread,
    trailing,
    weights,
    why_unknown,
)
from hookcb.diagnosis.run import WINDOW, Passed, Run, Series, Skipped

ENTROPIES = ("cross-entropy", "binary cross-entropy", "nll")
NEVER_NEGATIVE = (*ENTROPIES, "mse", "mae", "huber", "smooth l1")
MAX_INIT, MAX_INIT_ABOVE = 2.0, 2.0  # cross-entropy: times the loss of guessing, and by how much above it
MAX_INIT_MSE, MAX_INIT_NOTE = 3.0, 5.0  # times the loss of guessing
MAX_RISE_UNKNOWN = 4.0  # like MAX_RISE, for a loss that may be one side of a game
SOLVED = 0.01  # share of the loss of guessing below which a loss does not diverge
NOISE = 3.0  # standard deviations of the losses of single batches
MAX_OF_MINIMUM, MIN_SMOOTHED = 2.0, 20  # times the smallest moving average; number of averages
INFLATED = 5.0  # times the first batch: the first ten already diverge
BELOW_ZERO = -1e-6  # leaves room for rounding
SPIKE, SPIKE_WINDOW, SPIKE_BEFORE, N_SPIKES = 6.0, 128, 32, 2  # standard deviations, batches before
N_LATEST = 4_096  # batches that are searched for spikes, so that a long run takes less than a second


@check("loss.init", site=Site.LOSS, shown_by="run.loss", draws_limit=True, needs=("loss",))
def first_loss(evidence: Run) -> Iterator[Result]:
    """A first loss far above that of guessing: the model begins confident and wrong.

    Formula: loss of the first batch, before any update / loss of guessing, which is ln C for cross-entropy
    over C classes and the mean square of the targets for MSE. Limit: twice, and 2 above, for cross-entropy;
    three times for MSE. A warning above five times if the loss is still above guessing after ten batches,
    else a note. Also a note if the loss ends below a fifth of that of the best constant, an R² of 0.8.

    Source: A. Karpathy, "A Recipe for Training Neural Networks", 2019, "verify loss @ init".
    """
    first = evidence.loss.values[0] if len(evidence.loss) else math.nan
    guess, kind = evidence.guess, evidence.loss_kind
    if not (math.isfinite(first) and 0 < guess < math.inf and kind in NEVER_NEGATIVE):
        yield Skipped(why_unknown(evidence, "the loss of guessing is not known"))
        return
    is_entropy = kind in ENTROPIES
    limit = max(MAX_INIT * guess, guess + MAX_INIT_ABOVE) if is_entropy else MAX_INIT_MSE * guess
    if first <= limit:
        yield Passed(f"loss at the beginning ({first:.3g}, guessing gives {guess:.3g})", first, limit)
        return
    # a scale that is learned in the first batches does no harm
    is_lasting = median(evidence.loss.values[WINDOW : 2 * WINDOW]) > guess
    is_harmful = first > MAX_INIT_NOTE * guess and is_lasting and not does_well(evidence)
    head = [p for p in weights(evidence)[-1:] if begins_large([p])]
    scale = "inputs" if is_entropy else "inputs and targets"
    yield finding(
        "loss.init",
        "warning" if is_harmful else "info",
        when=evidence.loss.steps[0],
        value=first,
        limit=limit,
        message=f"The first batch has a loss of {first:.3g} (limit {limit:.3g}); guessing gives {guess:.3g}.",
        causes=(
            *(("weights of the last layer that are too large",) if head else ()),
            f"{scale} on a large scale",
        ),
        next_steps=(
            *((init_advice(head),) if head else ()),
            f"Normalize {scale} to a standard deviation of 1",
        ),
    )


@check("loss.flat", site=Site.RUN, shown_by="run.loss", draws_limit=True, needs=("loss",))
def flat_loss(evidence: Run) -> Iterator[Result]:
    """A loss that has not fallen since the beginning.

    Formula: over 50 batches or more, the moving average is never below 0.95 of the first ten, and the
    confidence interval of the slope (Theil-Sen, three standard deviations) contains zero but no fall of 5 %.
    A loss that certainly falls is not flat, however slowly it falls and however close to guessing it is; a
    loss too noisy to tell is not judged, nor is one of an unknown kind, as an objective of reinforcement
    learning need not fall. A warning if the loss is no better than 0.8 of guessing; else a note, as a
    pretrained model may have nothing left to learn.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968.
    """
    loss, values, first = evidence.loss, finite(evidence.loss.values), evidence.first_loss
    if len(values) < MIN_BATCHES or not math.isfinite(first) or is_warming_up(evidence):
        yield Skipped(f"fewer than {MIN_BATCHES} batches, or the learning rate is still rising")
        return
    if need_not_fall(evidence):
        why = why_unknown(evidence, "the kind of the loss is not known")
        yield Skipped(f"{why}, and an objective need not fall")
        return
    lowest, limit = lowest_loss(evidence), limit_of_flat(first)
    smallest_fall, largest_fall = falls_by(loss)
    if lowest <= limit or smallest_fall > 0:
        yield Passed(f"flat loss (from {first:.3g} down to {lowest:.3g})", lowest, limit)
        return
    if largest_fall > first - limit:
        yield Skipped("the loss is too noisy to tell from so few batches whether it falls")
        return
    is_guessing = guesses(evidence)
    guess = f"; guessing gives {evidence.guess:.3g}" if is_guessing else ""
    yield finding(
        "loss.flat",
        "warning" if is_guessing else "info",
        when=(loss.steps[WINDOW], loss.steps[-1]),
        value=lowest,
        limit=limit,
        message=f"The loss has not fallen in {len(values):,} batches: it began at {first:.3g}, and its "
        f"moving average was never below {lowest:.3g}{guess}.",
        causes=("a learning rate that is too low or too high", "targets that do not belong to the inputs"),
        next_steps=(
            "Overfit a single batch: if that fails, the model or the loss is at fault, else the data",
            evidence.advise("rate"),
        ),
    )


@check(
    "loss.diverging",
    site=Site.RUN,
    shown_by="run.loss",
    draws_limit=True,
    needs=("loss",),
    leads_to=("nonfinite.*",),
)
def diverging_loss(evidence: Run) -> Iterator[Result]:
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

    Source: Ben Braiek & Khomh, "Testing Feedforward Neural Networks Training Programs", 2023, who look for a
    loss that rises repeatedly; the limits are ours.
    """
    smooth, first = evidence.smooth_loss(), _beginning(evidence)
    if len(smooth) < MIN_SMOOTHED or not math.isfinite(first):
        yield Skipped(f"fewer than {MIN_SMOOTHED} batches with a finite loss")
        return
    if first == 0 and math.isnan(evidence.guess):
        yield Skipped("the loss began at 0, so that its rise cannot be compared with anything")
        return
    lowest = min(smooth.values)
    is_sure = evidence.loss_kind and len(smooth) >= MIN_BATCHES
    limit = first + (MAX_RISE if is_sure else MAX_RISE_UNKNOWN) * abs(first)
    limit = max(limit, MAX_OF_MINIMUM * lowest) if lowest > 0 else limit
    limit = limit if math.isnan(evidence.guess) else max(limit, SOLVED * evidence.guess)
    span = trailing(smooth, lambda x: x > limit, 1)
    last = smooth.values[-1]
    if span is not None and len(smooth) < MIN_BATCHES and _may_be_chance(evidence.loss, first):
        yield Skipped(f"fewer than {MIN_BATCHES} batches, with losses that vary too much between them")
        return
    # LBFGS tries points that it leaves at once
    least = MIN_BATCHES if evidence.is_by_closure else min(MIN_BATCHES, len(smooth) // 3)
    if span is None or span.n < least:
        yield Passed(f"diverging loss (at {last:.3g}, from {first:.3g})", last, limit)
        return
    if _has_growing_targets(evidence, span.first):
        yield Passed(f"diverging loss (at {last:.3g}, from {first:.3g}, as its targets have grown)")
        return
    yield finding(
        "loss.diverging",
        "error" if evidence.loss_kind or evidence.is_by_closure or _has_large_steps(evidence) else "info",
        when=span,
        value=last,
        limit=limit,
        message=f"The loss has risen from {first:.3g} to {last:.3g} and has stayed above the limit of "
        f"{limit:.3g} for {span.n:,} batches.",
        causes=("the learning rate is too high", "a loss with the wrong sign", "growing targets"),
        next_steps=(
            *(lower_rate(evidence) or (evidence.advise("rate"),)),
            "Look for a minus sign in the loss, and check whether its targets grow",
        ),
    )


def _may_be_chance(loss: Series, first: float) -> bool:
    """Whether `first` may be below the median of later losses because losses of batches vary.

    The noise of a loss above 0 is that of its logarithm; it is read from differences, which a trend shifts.
    """
    later = finite(loss.values[1:])
    is_positive = first > 0 and min(later) > 0
    values = [math.log(x) for x in later] if is_positive else later
    noise = spread(b - a for a, b in pairwise(values))[1] / math.sqrt(2)
    return median(values) - (math.log(first) if is_positive else first) < NOISE * noise


def _has_large_steps(evidence: Run) -> bool:
    """Whether steps change a weight so much that they may be why the loss rises."""
    # a large first step may leave nothing that moves any more
    return any(map(has_large_updates, weights(evidence))) or first_update(evidence) > MAX_FIRST_UPDATE


def _has_growing_targets(evidence: Run, since: int) -> bool:
    """Whether outputs from step `since` on are larger than the errors and the first targets explain.

    If no output was inspected since then, the last one before counts.
    """
    outputs = max(evidence.layers.values(), key=lambda layer: layer.place, default=None)
    if evidence.loss_kind not in ("mse", "mae", "huber") or outputs is None:
        return False
    losses, means = dict(evidence.loss), dict(outputs.series("mean"))
    records = [
        (step, math.sqrt(_squared(losses[step], evidence.loss_kind)), math.hypot(std, means[step]))
        for step, std in outputs.series("std")
        if step in losses and step in means
    ]
    first_targets = median([error + size for _, error, size in records[:LATEST]])
    later = [record for record in records[LATEST:] if record[0] >= since] or records[
        -1:
    ]  # none was seen since
    return median([size - error for _, error, size in later]) > first_targets


def _squared(loss: float, kind: str) -> float:
    """Squared error behind a loss; a Huber loss is half of it, and linear for errors above 1."""
    return loss if kind == "mse" else max(2 * loss, (loss + 0.5) ** 2 if loss > 0.5 else 0.0)


def _beginning(evidence: Run) -> float:
    """Mean of the first ten losses; the first one if the ten already diverge or are not finite."""
    first, start = evidence.first_loss, evidence.loss.values[0] if len(evidence.loss) else math.nan
    is_inflated = not math.isfinite(first) or first > start + (INFLATED - 1) * abs(start)
    return start if is_inflated else first


@check(
    "loss.unbounded",
    site=Site.LOSS,
    shown_by="run.loss",
    draws_limit=True,
    needs=("loss",),
    leads_to=("loss.diverging", "update.*", "act.*", "grad.*", "nonfinite.*", "unit.*"),
)
def unbounded_loss(evidence: Run) -> Iterator[Result]:
    """A negative loss of a kind that is never negative, such as cross-entropy or MSE, or of a sum of such.

    Formula: the smallest loss. Limit: -1e-6, which leaves room for rounding. A negated loss has no minimum,
    and training makes the model as wrong as it can; `nll_loss` is negative, too, if it gets probabilities
    rather than log-probabilities. Not checked if the last layer before the loss is not the model's, as in a
    GAN's generator, whose loss may be negated on purpose.

    Source: Goodfellow, Bengio & Courville, Deep Learning, 2016, section 6.2: these are negative logarithms of
    probabilities, or squares and distances.
    """
    kinds = evidence.loss_kinds or (evidence.loss_kind,)
    kind = " + ".join(kinds)
    values = finite(evidence.loss.values)
    if not set(kinds).issubset(NEVER_NEGATIVE) or not values:
        yield Skipped("the kind of the loss is not known")
        return
    if evidence.is_loss_of_others:
        yield Skipped("the loss is that of another model's output")
        return
    below = [(step, x) for step, x in evidence.loss if x < BELOW_ZERO]
    if not below:
        smallest = min(values)
        yield Passed(f"loss below zero (smallest {smallest:.3g})", smallest, 0.0)
        return
    step, value = below[0]
    negated = ("an extra minus sign: the loss is maximized",)
    targets = ("targets outside 0 to 1",) if "binary cross-entropy" in kinds else ()
    is_nll = kind == "nll"
    yield finding(
        "loss.unbounded",
        "error",
        when=(step, below[-1][0]),
        value=value,
        limit=0.0,
        message=f"The loss is {value:.3g} at step {step}, but {kind} is never below 0.",
        causes=("probabilities are passed where log-probabilities are expected", *negated)
        if is_nll
        else negated + targets,
        next_steps=(
            "Put log_softmax before nll_loss, or use cross_entropy on the raw outputs"
            if is_nll
            else "Look for a minus sign in the loss function, and for targets that are out of range",
        ),
    )


@check("loss.spike", site=Site.RUN, shown_by="run.loss", draws_limit=True, needs=("loss",))
def loss_spikes(evidence: Run) -> Iterator[Result]:
    """Single losses far above those before them: a note, never an alarm.

    Formula: at least two of the last 4,096 losses are above the median of the up to 128 batches before them
    (at least 32) by six robust standard deviations.

    Source: P. J. Huber, "Robust Statistics", 1981, for the median absolute deviation.
    """
    if len(evidence.loss) <= SPIKE_BEFORE:
        yield Skipped(f"fewer than {SPIKE_BEFORE} batches")
        return
    spikes = _spikes(evidence.loss)
    if len(spikes) < N_SPIKES:
        yield Passed(f"spikes of the loss ({len(spikes)})")
        return
    step, value, limit = max(spikes, key=lambda spike: spike[1] - spike[2])
    yield finding(
        "loss.spike",
        "info",
        when=(spikes[0][0], spikes[-1][0]),
        value=value,
        limit=limit,
        message=f"The loss jumps in {len(spikes):,} batches, most at step {step}: to {value:.3g}, while up "
        f"to {limit:.3g} is noise.",
        causes=("unusual samples", "a learning rate that is slightly too high"),
        next_steps=(f"Look at the batch of step {step}", evidence.advise("clip")),
    )


def _spikes(loss: Series) -> list[tuple[int, float, float]]:
    """Step and loss of each spike, and the loss up to which it would have been noise."""
    spikes = []
    steps, values = loss.steps[-N_LATEST:], loss.values[-N_LATEST:]
    in_order: list[float] = []  # the finite ones of the window
    for i, value in enumerate(values):
        if i >= SPIKE_BEFORE and values[i - 1] < value < math.inf and value > _least(in_order):
            middle, sigma = spread(in_order)
            if value > (limit := middle + SPIKE * max(sigma, 1e-3 * abs(middle))):
                spikes.append((steps[i], value, limit))
        if math.isfinite(value):
            insort(in_order, value)
        if i >= SPIKE_WINDOW and math.isfinite(old := values[i - SPIKE_WINDOW]):
            del in_order[bisect_left(in_order, old)]
    return spikes


def _least(in_order: Sequence[float]) -> float:
    """A number that is quickly found, and not above the limit of a spike.

    The median absolute deviation is at least the smaller distance from the median to a quartile.
    """
    n = len(in_order)
    if not n:
        return math.inf
    lower, upper = in_order[(n - 1) // 2], in_order[n // 2]
    return lower + SPIKE * min(in_order[-1 - n // 4] - upper, lower - in_order[n // 4])
