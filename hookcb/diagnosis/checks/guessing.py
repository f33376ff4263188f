"""Checks of what was learned: whether the model is better than a constant, and still improves."""

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean

from hookcb.diagnosis.advice import MIN_FACTOR, divisor, multiplier
from hookcb.diagnosis.fault import Result, Site, findings_of
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import (
    MAX_OF_CONSTANT,
    MIN_BATCHES,
    USUAL_UPDATE,
    batches_to_learn,
    before,
    expected_fall,
    final_loss,
    finding,
    is_noisy,
    is_trivial,
    loss_of_constant,
    may_become_better,
    n_last,
    ratio_to_constant,
    recent_updates,
    usual_update,
    why_unknown,
)
from hookcb.diagnosis.run import Absent, Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding

MAX_STUCK, ALL_STUCK, N_STUCK = 0.4, 0.999, 3  # shares of the error; batches
MAX_PENALTY = 0.9  # of the loss
# expected fall in as many batches again / fall so far; a tenth of the healthy trainings have more
MAX_TO_COME = 0.25
MAX_MOTION = 0.3  # of the size of a weight, by all steps together: too little to have learned much
MIN_FALLS = 4  # batches; three falls in a row happen by chance once in 24
MAX_OF_CONSTANT_EARLY = 0.9  # of a training of a few batches that has learned something
SMALL_UPDATE = USUAL_UPDATE / 10
PREDICTIONS = {
    "cross-entropy": "always predicting the shares of the classes",
    "binary cross-entropy": "always predicting the share of ones",
    "mse": "always predicting the mean of the targets",
}


@check("loss.trivial", site=Site.RUN, shown_by="run.loss", needs=("loss",), leads_to=("loss.flat",))
def trivial_loss(evidence: Run) -> Iterator[Result]:
    """A model that is no better than the best constant prediction, which ignores the input.

    Formula: mean loss of the last tenth of 50 batches or more / loss of the best constant for the targets
    seen: their variance for squares, their mean absolute deviation for absolute values, the entropy of the
    class shares for cross-entropy; from both the loss of a perfect prediction is subtracted, which is above 0
    for soft or smoothed targets. Limit: 0.98. Nothing is said before 50 batches at the full learning rate,
    after a warmup (200 if each token has a target, as language models learn the shares of tokens first); if
    the targets vary so much between batches that the standard error of the ratio is above 0.2; or if the loss
    falls so fast that as many batches again would bring it below the limit, by its slope over the last half,
    less three standard deviations. A note if only the loss of the last validation is above the limit.

    Source: A. Karpathy, "A Recipe for Training Neural Networks", 2019, "input-independent baseline".
    """
    last, ratio = loss_of_constant(evidence)
    if math.isnan(last):
        yield Skipped(f"fewer than {batches_to_learn(evidence)} batches at the full learning rate")
        return
    if math.isnan(ratio):
        yield Skipped(why_unknown(evidence, "the loss of the best constant prediction is unknown"))
        return
    new = math.nan if len(evidence.penalty) else ratio_to_constant(evidence, evidence.validation)
    if ratio <= MAX_OF_CONSTANT < new:
        yield _trivial_validation(evidence, last, new)
        return
    if ratio <= MAX_OF_CONSTANT:
        yield Passed(f"no better than a constant (loss {ratio:.2g} of that)", ratio, MAX_OF_CONSTANT)
        return
    if is_noisy(evidence):
        yield Skipped("the targets vary too much from batch to batch to compare with a constant")
        return
    if may_become_better(evidence, last):
        yield Skipped("the loss still falls, and may soon be below that of a constant")
        return
    better = "better" if ratio < 1 else "worse"
    far = f"{abs(ratio - 1):.0%} {better} than" if abs(ratio - 1) > 0.005 else "as good as"
    without = "without its penalty " if len(evidence.penalty) else ""
    yield finding(
        "loss.trivial",
        "warning",
        when=(evidence.loss.steps[-n_last(len(evidence.loss))], evidence.loss.steps[-1]),
        value=ratio,
        limit=MAX_OF_CONSTANT,
        message=f"After {len(evidence.loss):,} batches the loss {without}is {last:.3g}; "
        f"{_of_constant(evidence)}. The model is {far} a constant that ignores its input.",
        causes=(
            "a head or loss that does not suit the targets",
            "inputs on a bad scale, or that do not belong to the targets",
            "a learning rate that is far too high or too low",
        ),
        next_steps=(
            "Try to overfit a single batch; if that fails, the model, its head or the loss is at fault",
            "Print one batch as the model gets it: inputs scaled to a std of 1, targets beside them",
        ),
    )


@check(
    "loss.penalty",
    site=Site.LOSS,
    shown_by="run.loss",
    needs=("loss", "batch", "graph"),
    leads_to=("loss.trivial", "loss.flat"),
)
def dominant_penalty(evidence: Run) -> Iterator[Result]:
    """A penalty on parameters that is nearly all of the loss.

    Formula: (loss - mean error of the batch) / loss, the largest share in a batch. Limit: 0.9. A
    warning if the model is no better than a constant at the end, as `loss.trivial` finds; a note if that is
    unknown, as before 50 batches; nothing is said if it is better.

    Source: Goodfellow, Bengio & Courville, Deep Learning, 2016, section 7.1.
    """
    totals = dict(evidence.loss)
    seen = [(step, x, totals[step]) for step, x in evidence.penalty if totals.get(step, 0.0) > x > 0]
    if not seen:
        is_unknown = "penalty" in evidence.observed
        yield (
            Skipped("the size of the penalty is unknown") if is_unknown else Absent("the loss has no penalty")
        )
        return
    step, penalty, total = max(seen, key=lambda row: row[1] / row[2])
    share, is_harmful = penalty / total, is_trivial(evidence)
    if share <= MAX_PENALTY or not (is_harmful or math.isnan(loss_of_constant(evidence)[1])):
        yield Passed(f"a penalty that is nearly all of the loss ({share:.0%})", share, MAX_PENALTY)
        return
    end = "; in the end, the rest of the loss is no better than that of a constant" if is_harmful else ""
    yield finding(
        "loss.penalty",
        "warning" if is_harmful else "info",
        when=(seen[0][0], step),
        value=share,
        limit=MAX_PENALTY,
        message=f"The penalty on the weights is {penalty:.3g} of a loss of {total:.3g}, {share:.1%} (limit "
        f"{MAX_PENALTY:.0%}){end}.",
        causes=("a penalty with too large a weight", "a sum over all weights where a mean is meant"),
        next_steps=(f"Divide the weight of the penalty by {10 * penalty / (total - penalty):,.0f}",),
    )


def _trivial_validation(evidence: Run, last: float, ratio: float) -> Finding:
    return finding(
        "loss.trivial",
        "info",
        value=ratio,
        limit=MAX_OF_CONSTANT,
        message=f"The loss is {last:.3g} in training but {evidence.validation:.3g} in validation; "
        f"{_of_constant(evidence)}. By its loss, the model is no better than a constant on new data; "
        "by a metric such as accuracy it may be.",
        causes=("overfitting", "inputs or targets that are prepared differently for the validation"),
        next_steps=(
            "Compare a batch of the validation with one of the training",
            "Train for fewer epochs, or use more data, augmentation or weight decay",
        ),
    )


def _of_constant(evidence: Run) -> str:
    """The best constant prediction and its loss, in words."""
    predicting = PREDICTIONS.get(evidence.loss_kind, "always predicting the median of the targets")
    return f"{predicting} would give {evidence.constant:.3g}"


@check(
    "head.stuck",
    site=Site.LOSS,
    shown_by="run.loss",
    needs=("loss", "batch", "graph"),
    leads_to=("loss.*", "update.*", "grad.*", "unit.dead", "act.collapse"),
)
def stuck_head(evidence: Run) -> Iterator[Result]:
    """A ReLU as the head of a regression that holds outputs at 0 although their targets are larger.

    Formula: squared errors of these outputs, which get no gradient / all squared errors, the least of the
    last three inspected batches after 50 batches. Limit: 0.4; counts of rare events with such a head had up
    to 0.36. Before 50 batches, all of the error in each inspected batch, as healthy models begin with up to
    0.7.

    Source: Lu et al., "Dying ReLU and Initialization: Theory and Numerical Examples", 2020.
    """
    shares = before(evidence.stuck, math.inf)
    if not len(shares):
        yield Absent("no ReLU is the head of a regression")
        return
    is_short = len(evidence.loss) < MIN_BATCHES
    share = min(shares.values if is_short else shares.values[-N_STUCK:])
    limit = ALL_STUCK if is_short else MAX_STUCK
    if share <= limit:
        yield Passed(f"outputs that a ReLU holds at 0 ({share:.0%} of the error)", share, limit)
        return
    yield finding(
        "head.stuck",
        "warning",
        when=shares,
        value=share,
        limit=limit,
        message=f"The model ends in a ReLU, and {share:.0%} of the error comes from outputs that are 0 "
        f"although their targets are larger (limit {limit:.0%}). They get no gradient, so they cannot learn.",
        causes=("a ReLU as the last operation",),
        next_steps=(
            "Remove the ReLU, so that a linear layer is last; use a Softplus if no output may be below 0",
        ),
    )


@check("train.unfinished", site=Site.RUN, shown_by="run.loss", needs=("loss",), subject="end")
def unfinished_training(evidence: Run) -> Iterator[Result]:
    """A loss that is far from its end: a note, never an alarm.

    Formula: fall to be expected in as many batches again, at the median slope of the last half of 50 batches
    or more (Theil and Sen, below zero by three standard deviations) / fall so far. Limit: a quarter. Or a
    flat loss that is near guessing, while all steps together change the median weight by less than 0.3 of its
    size. Of fewer batches, at least four, each loss must be below the one before, or the mean of the last
    quarter above 0.9 of the loss of the best constant. The advice is to raise the learning rate if the median
    update ratio is below 1e-4, a tenth of the usual one, and none was above 0.02 at the beginning; else to
    train longer.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968.
    """
    loss, n = evidence.loss, len(evidence.loss)
    if n < MIN_BATCHES:
        yield _few(evidence)
        return
    first, last, fall = evidence.first_loss, final_loss(evidence), expected_fall(evidence)
    share, limit = fall / (first - last) if first > last else 0.0, MAX_TO_COME
    moved = n * usual_update(recent_updates(evidence))
    if share > limit:
        message = (
            f"The loss fell from {first:.3g} to {last:.3g} in {n:,} batches, and still falls: by its slope, "
            f"{fall:.2g} more in as many again."
        )
    elif moved < MAX_MOTION and any(f.severity == "warning" for f in findings_of("loss.flat", evidence)):
        share, limit = moved, MAX_MOTION
        message = (
            f"The loss has not fallen, but all {n:,} steps together change the median weight by at most "
            f"{moved:.1%} of its size."
        )
    else:
        passed = f"training that was stopped too early (to come: {share:.0%} of its fall)"
        yield Passed(passed, share, limit)
        return
    yield finding(
        "train.unfinished",
        "info",
        when=loss,
        value=share,
        limit=limit,
        message=message,
        causes=("a training that is too short", "a learning rate that is too low"),
        next_steps=_advice(evidence),
    )


def _few(evidence: Run) -> Result:
    """Note about a training of a few batches that has learned little yet, or learns with each of them."""
    values, n = evidence.loss.values, len(evidence.loss)
    falls = n >= MIN_FALLS and all(x > y for x, y in pairwise(values))
    last = fmean(values[-max(1, n // 4) :]) if n >= MIN_FALLS else math.nan
    if not (falls or last > MAX_OF_CONSTANT_EARLY * evidence.constant > 0):
        return Skipped(f"fewer than {MIN_BATCHES} batches")
    how = f"fell with each of them, from {values[0]:.3g} to {values[-1]:.3g}" if falls else f"is {last:.3g}"
    constant = f"; {_of_constant(evidence)}" if evidence.constant > 0 else ""
    return finding(
        "train.unfinished",
        "info",
        when=evidence.loss,
        value=float(n),
        limit=MIN_BATCHES,
        message=f"Only {n} batches were trained, and the loss {how}{constant}.",
        causes=("a training that is too short",),
        next_steps=_advice(evidence),
    )


def _advice(evidence: Run) -> tuple[str, ...]:
    """Advice to raise the learning rate, if steps are small by the records, or else to train longer."""
    usual = usual_update(recent_updates(evidence))
    n = multiplier(evidence, usual) if 0 < usual < SMALL_UPDATE else 1
    if n < MIN_FACTOR or divisor(evidence) >= MIN_FACTOR:
        return ("Train longer",)
    return (
        f"Multiply the learning rate by {n:,}: a step changes the median weight by {usual:.1g} of its size, "
        f"and {USUAL_UPDATE:g} is usual",
        "Train longer",
    )
