"""Checks of the loss: where it begins, whether it falls, rises, jumps, or is below what it can be."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.checks.finding import finding
from hookcb.diagnosis.checks.updates import begins_large, first_update, lower_rate, told_init, updates
from hookcb.diagnosis.evidence import WINDOW, Evidence, Series
from hookcb.diagnosis.falling import MIN_BATCHES, falls_by, guesses, limit_of_flat, lowest_loss
from hookcb.diagnosis.registry import Passed, Result, Site, Skipped, check
from hookcb.diagnosis.trends import (
    LATEST,
    does_well,
    finite,
    is_warming_up,
    median,
    persistent,
    spread,
    trailing,
    weights,
)

ENTROPIES = ("cross-entropy", "binary cross-entropy", "nll")
NEVER_NEGATIVE = (*ENTROPIES, "mse", "huber", "smooth l1")
INIT, INIT_ABOVE, INIT_MSE, INIT_WARNING = 2.0, 2.0, 3.0, 5.0  # times the guess; and by so much above it
RISEN, OF_MINIMUM, FEWEST = 0.5, 2.0, 20
LARGE_STEP, MANY, OF = 0.05, 5, 8  # update ratio, in so many of so many records
LARGE_AT_FIRST = 0.2  # of a step before the loss rises, after which nothing may move any more
RISEN_UNKNOWN = 4.0  # of a loss that may be one side of a game
INFLATED = 5.0  # times the first batch: the first ten already diverge
BELOW_ZERO = -1e-6  # rounding
SPIKE, SPIKE_WINDOW, SPIKE_BEFORE, N_SPIKES = 6.0, 128, 32, 2  # standard deviations, batches before
LATEST_LOSSES = 4_096  # of a long run, so that a look at it takes no second


@check("loss.init", site=Site.LOSS, needs=("loss",))
def first_loss(evidence: Evidence) -> Iterator[Result]:
    """A loss that begins far above that of guessing: the model is very sure of something wrong.

    Formula: loss of the first batch, before any update / loss of guessing: ln C of cross-entropy over C
    classes, the mean square of the targets of MSE. Limit: above twice and by more than 2 for cross-entropy,
    three times for MSE; a warning from five times on where it is still above guessing after ten batches, else
    a note. A note, too, where it comes to a fifth of that of the best constant by the end, an R² of 0.8.

    Source: A. Karpathy, "A Recipe for Training Neural Networks", 2019, "verify loss @ init".
    """
    first = evidence.loss.values[0] if len(evidence.loss) else math.nan
    guess, kind = evidence.guess, evidence.loss_kind
    if not (math.isfinite(first) and 0 < guess < math.inf and kind in NEVER_NEGATIVE):
        yield Skipped("the loss of guessing is not known")
        return
    limit = max(INIT * guess, guess + INIT_ABOVE) if kind in ENTROPIES else INIT_MSE * guess
    if first <= limit:
        yield Passed(f"loss at the beginning ({first:.3g}, guessing has {guess:.3g})", first, limit)
        return
    is_lasting = (
        median(evidence.loss.values[WINDOW : 2 * WINDOW]) > guess
    )  # a scale that is learned at once is none
    is_harmful = first > INIT_WARNING * guess and is_lasting and not does_well(evidence)
    head = [p for p in weights(evidence)[-1:] if begins_large([p])]
    scale = "inputs" if kind in ENTROPIES else "inputs and targets"
    yield finding(
        "loss.init",
        "warning" if is_harmful else "info",
        when=evidence.loss.steps[0],
        value=first,
        limit=limit,
        message=f"The loss of the first batch is {first:.3g}; guessing has {guess:.3g}, and up to "
        f"{limit:.3g} is usual.",
        causes=(
            *(("weights of the last layer that are too large",) if head else ()),
            f"{scale} on a large scale",
        ),
        next_steps=(
            *((told_init(head),) if head else ()),
            f"Bring {scale} to a std of 1",
        ),
    )


@check("loss.flat", site=Site.RUN, needs=("loss",))
def flat_loss(evidence: Evidence) -> Iterator[Result]:
    """A loss that has not fallen since the beginning.

    Formula: over 50 batches or more, the moving average is never below 0.95 of the first ten, and the
    interval of its slope (Theil-Sen, three standard deviations) has zero in it and no fall of 5 %. A loss
    that surely falls is not flat, however slow it is and however near to guessing; of a noisy one nothing can
    be said so early. A warning if the loss is no better than 0.8 of guessing; else a note, as a model that
    was trained before may begin at its end.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968.
    """
    loss, values, first = evidence.loss, finite(evidence.loss.values), evidence.first_loss
    if len(values) < MIN_BATCHES or not math.isfinite(first) or is_warming_up(evidence):
        yield Skipped(f"fewer than {MIN_BATCHES} batches, or the learning rate still rises")
        return
    lowest, limit = lowest_loss(evidence), limit_of_flat(first)
    least, most = falls_by(loss)
    if lowest <= limit or least > 0:
        yield Passed(f"flat loss (from {first:.3g} down to {lowest:.3g})", lowest, limit)
        return
    if most > first - limit:
        yield Skipped("the noise of the loss is too large, in so few batches, to tell whether it falls")
        return
    is_guessing = guesses(evidence)
    guess = f"; guessing has {evidence.guess:.3g}" if is_guessing else ""
    yield finding(
        "loss.flat",
        "warning" if is_guessing else "info",
        when=loss,
        value=lowest,
        limit=limit,
        message=f"The loss has not fallen in {len(values):,} batches: it began at {first:.3g} and was "
        "never below "
        f"{lowest:.3g} on average{guess}.",
        causes=("a learning rate that is too low or too high", "targets that do not belong to the inputs"),
        next_steps=(
            "Try to learn one batch by heart; if that fails the model or the loss is at fault, else the data",
            "Find a learning rate: learn.lr_find()",
        ),
    )


@check("loss.diverging", site=Site.RUN, needs=("loss",), leads_to=("nonfinite.*",))
def diverging_loss(evidence: Evidence) -> Iterator[Result]:
    """A loss that is higher than at the beginning, and stays there.

    Formula: moving average above the beginning by 50 % of its size, and above twice its minimum where it is
    positive, for the last 50 batches, or the last third of a shorter run of 20 or more. Of a loss of unknown
    kind, or over fewer than 50 batches, by 400 %: one side of a game (a GAN's generator) rises as the other
    learns. Of an unknown kind it is an error only if five of eight steps change a weight by 0.05, or one
    before the rise by 0.2, else a note: it may have a part whose targets grow. Nothing is said of squared and
    Huber errors if, since the rise, the RMS of the outputs is above that of the errors by more than the RMS
    of the first outputs and that of the first errors together. By the triangle inequality the targets have
    grown then, as do values in reinforcement learning, with what is learned.

    Source: Ben Braiek & Khomh, "Testing Feedforward Neural Networks Training Programs", 2023, who look for a
    loss that rises again and again; the limits are ours.
    """
    smooth, first = evidence.smooth_loss(), _beginning(evidence)
    if len(smooth) < FEWEST or not math.isfinite(first):
        yield Skipped(f"fewer than {FEWEST} batches with a finite loss")
        return
    lowest = min(smooth.values)
    is_sure = evidence.loss_kind and len(smooth) >= MIN_BATCHES
    limit = first + (RISEN if is_sure else RISEN_UNKNOWN) * abs(first)
    limit = max(limit, OF_MINIMUM * lowest) if lowest > 0 else limit
    span = trailing(smooth, lambda x: x > limit, 1)
    last = smooth.values[-1]
    if span is None or span.n < min(MIN_BATCHES, len(smooth) // 3):
        yield Passed(f"diverging loss (at {last:.3g}, from {first:.3g})", last, limit)
        return
    if _has_growing_targets(evidence, span.first):
        yield Passed(f"diverging loss (at {last:.3g}, from {first:.3g}, as its targets have grown)")
        return
    yield finding(
        "loss.diverging",
        "error" if evidence.loss_kind or _has_large_steps(evidence) else "info",
        when=span,
        value=last,
        limit=limit,
        message=f"The loss has risen from {first:.3g} to {last:.3g}, and stays above {limit:.3g} for "
        f"{span.n:,} batches.",
        causes=("the learning rate is too high", "a loss with the wrong sign", "targets that grow"),
        next_steps=(
            *(lower_rate(evidence) or ("Find a learning rate: learn.lr_find()",)),
            "Look for a minus sign in the loss, and at whether its targets grow",
        ),
    )


def _has_large_steps(evidence: Evidence) -> bool:
    """Whether steps change a weight by so much that they may be why the loss rises."""
    sizes = (updates(p) for p in weights(evidence))
    lasting = any(persistent(of, lambda x: x > LARGE_STEP, MANY, OF) for of in sizes)
    return lasting or first_update(evidence) > LARGE_AT_FIRST


def _has_growing_targets(evidence: Evidence, since: int) -> bool:
    """Whether outputs, from step `since` on, are larger than errors and the first targets can make them."""
    outputs = max(evidence.layers.values(), key=lambda layer: layer.place, default=None)
    if evidence.loss_kind not in ("mse", "huber") or outputs is None:
        return False
    losses, means = dict(evidence.loss), dict(outputs.series("mean"))
    looks = [
        (step, math.sqrt(_squared(losses[step], evidence.loss_kind)), math.hypot(std, means[step]))
        for step, std in outputs.series("std")
        if step in losses and step in means
    ]
    first_targets = median([error + size for _, error, size in looks[:LATEST]])
    return median([size - error for step, error, size in looks[LATEST:] if step >= since]) > first_targets


def _squared(loss: float, kind: str) -> float:
    """The squared error of a loss; a Huber loss is half of it, or linear from an error of 1 on."""
    return loss if kind == "mse" else max(2 * loss, (loss + 0.5) ** 2 if loss > 0.5 else 0.0)


def _beginning(evidence: Evidence) -> float:
    """Mean of the first ten losses; the first one where the ten already diverge or are not finite."""
    first, start = evidence.first_loss, evidence.loss.values[0] if len(evidence.loss) else math.nan
    is_inflated = not math.isfinite(first) or first > start + (INFLATED - 1) * abs(start)
    return start if is_inflated else first


@check(
    "loss.unbounded",
    site=Site.LOSS,
    needs=("loss",),
    leads_to=("loss.diverging", "update.*", "act.*", "grad.*", "nonfinite.*", "unit.*"),
)
def unbounded_loss(evidence: Evidence) -> Iterator[Result]:
    """A loss below what it can be: cross-entropy, MSE and their like are never below zero.

    Formula: the smallest loss. Limit: -1e-6, which leaves room for rounding. A loss that is negated has no
    minimum, and training makes the model as wrong as it can; `nll_loss` fed probabilities rather than
    log-probabilities is below zero, too.

    Source: Goodfellow, Bengio & Courville, Deep Learning, 2016, section 6.2: these are negative logarithms of
    probabilities, or squares and distances.
    """
    kind = evidence.loss_kind
    if kind not in NEVER_NEGATIVE or not len(evidence.loss):
        yield Skipped("the kind of the loss is not known")
        return
    below = [(step, x) for step, x in evidence.loss if x < BELOW_ZERO]
    if not below:
        smallest = min(evidence.loss.values)
        yield Passed(f"loss below zero (smallest {smallest:.3g})", smallest, 0.0)
        return
    step, value = below[0]
    negated = ("a minus sign too many: the loss is maximized",)
    targets = ("targets outside 0 to 1",) if kind == "binary cross-entropy" else ()
    is_nll = kind == "nll"
    yield finding(
        "loss.unbounded",
        "error",
        when=(step, below[-1][0]),
        value=value,
        limit=0.0,
        message=f"The loss is {value:.3g} at step {step}; {kind} is never below 0.",
        causes=("probabilities go in where log-probabilities are due", *negated)
        if is_nll
        else negated + targets,
        next_steps=(
            "Put log_softmax before nll_loss, or use cross_entropy on the raw outputs"
            if is_nll
            else "Look for a minus sign in the loss function, and for targets out of range",
        ),
    )


@check("loss.spike", site=Site.RUN, needs=("loss",))
def loss_spikes(evidence: Evidence) -> Iterator[Result]:
    """Single losses far above those before them: a note, never an alarm.

    Formula: above the median of up to 128 batches before (32 at least) by six robust standard deviations,
    twice or more, in the last 4,096 batches.

    Source: P. J. Huber, "Robust Statistics", 1981, for the median absolute deviation.
    """
    if len(evidence.loss) <= SPIKE_BEFORE:
        yield Skipped(f"fewer than {SPIKE_BEFORE} batches")
        return
    spikes = _spikes(evidence.loss)
    if len(spikes) < N_SPIKES:
        yield Passed(f"spikes of the loss ({len(spikes)})")
        return
    step, value, limit = max(spikes, key=lambda found: found[1] - found[2])
    yield finding(
        "loss.spike",
        "info",
        when=(spikes[0][0], spikes[-1][0]),
        value=value,
        limit=limit,
        message=f"The loss jumps in {len(spikes):,} batches, most at step {step}: to {value:.3g}, where "
        "up to "
        f"{limit:.3g} is noise.",
        causes=("odd samples", "a learning rate that is a little high"),
        next_steps=(f"Look at the batch of step {step}", "Clip the norm of the gradients: GradientClip(1.0)"),
    )


def _spikes(loss: Series) -> list[tuple[int, float, float]]:
    """Step, loss, and up to where it would have been noise."""
    found = []
    steps, values = loss.steps[-LATEST_LOSSES:], loss.values[-LATEST_LOSSES:]
    for i in range(SPIKE_BEFORE, len(values)):
        if not values[i - 1] < values[i] < math.inf:
            continue
        middle, sigma = spread(values[max(0, i - SPIKE_WINDOW) : i])
        if values[i] > (limit := middle + SPIKE * max(sigma, 1e-3 * abs(middle))):
            found.append((steps[i], values[i], limit))
    return found
