"""Checks of what was learned: whether the model is better than a constant, and still improves."""

import math
from collections.abc import Iterator
from statistics import fmean

from hookcb.diagnosis.checks.finding import finding
from hookcb.diagnosis.evidence import Evidence, Series
from hookcb.diagnosis.falling import MAX_OF_CONSTANT, MIN_BATCHES, loss_of_constant
from hookcb.diagnosis.registry import Passed, Result, Site, Skipped, check
from hookcb.diagnosis.trends import slope

SURE = 3.0  # standard deviations
STILL_FALLS = 0.02  # of the loss, in a hundred batches
PREDICTIONS = {
    "cross-entropy": "always predicting the shares of the classes",
    "binary cross-entropy": "always predicting the share of ones",
    "mse": "always predicting the mean of the targets",
}


@check("loss.trivial", site=Site.RUN, needs=("loss",), leads_to=("loss.flat",))
def trivial_loss(evidence: Evidence) -> Iterator[Result]:
    """A model that is no better than the best constant prediction, which ignores the input.

    Formula: mean loss of the last tenth of 50 batches or more / loss of the best constant for the targets
    seen: their variance for squares, their mean absolute deviation for absolute values, the entropy of the
    class shares for cross-entropy. Limit: 0.98. Nothing is said before 50 batches at the full learning rate,
    after a warmup, or if the loss falls so fast that as many batches again would bring it below the limit, by
    its slope over the last half, less three standard deviations.

    Source: A. Karpathy, "A Recipe for Training Neural Networks", 2019, "input-independent baseline".
    """
    last, ratio = loss_of_constant(evidence)
    if math.isnan(last):
        yield Skipped(f"fewer than {MIN_BATCHES} batches at the full learning rate")
        return
    if math.isnan(ratio):
        yield Skipped("the loss of the best constant prediction is unknown")
        return
    if ratio <= MAX_OF_CONSTANT:
        yield Passed(f"no better than a constant (loss {ratio:.2g} of that)", ratio, MAX_OF_CONSTANT)
        return
    limit = evidence.perfect + MAX_OF_CONSTANT * (evidence.constant - evidence.perfect)
    if last - _fall(evidence.loss) <= limit:
        yield Skipped("the loss still falls, and may soon be below that of a constant")
        return
    better = "better" if ratio < 1 else "worse"
    far = f"{abs(ratio - 1):.0%} {better} than" if abs(ratio - 1) > 0.005 else "as good as"
    predicting = PREDICTIONS.get(evidence.loss_kind, "always predicting the median of the targets")
    yield finding(
        "loss.trivial",
        "warning",
        when=evidence.loss,
        value=ratio,
        limit=MAX_OF_CONSTANT,
        message=f"After {len(evidence.loss):,} batches the loss is {last:.3g}; {predicting} would give "
        f"{evidence.constant:.3g}. The model is {far} a constant that ignores its input.",
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


def _fall(loss: Series) -> float:
    """By how much the loss will at least fall in as many batches again, by its slope over the last half."""
    pairs = [(step, x) for step, x in list(loss)[len(loss) // 2 :] if math.isfinite(x)]
    half = Series.of([step for step, _ in pairs], [x for _, x in pairs])
    _, high = slope(half, SURE)
    return max(0.0, -high * (loss.steps[-1] - loss.steps[0])) if math.isfinite(high) else 0.0


@check("train.unfinished", site=Site.RUN, needs=("loss",))
def unfinished_training(evidence: Evidence) -> Iterator[Result]:
    """A loss that still falls at the end: a note, never an alarm.

    Formula: fall over the last half of 50 batches or more, by the slope of Theil and Sen less three standard
    deviations. Limit: 2 % of the loss in 100 batches.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968.
    """
    loss = evidence.loss
    if len(loss) < MIN_BATCHES:
        yield Skipped(f"fewer than {MIN_BATCHES} batches")
        return
    last = fmean([x for x in loss.values[-10:] if math.isfinite(x)] or [math.nan])
    per_batch = _fall(loss) / (loss.steps[-1] - loss.steps[0])
    share = 100 * per_batch / abs(last) if last else 0.0
    if not share > STILL_FALLS:
        yield Passed(
            f"training that was stopped too early (falls {share:.1%} in 100 batches)", share, STILL_FALLS
        )
        return
    yield finding(
        "train.unfinished",
        "info",
        when=loss,
        value=share,
        limit=STILL_FALLS,
        message=f"The loss still falls by {min(share, 1):.0%} in 100 batches at the end of {len(loss):,}.",
        causes=("a training that is too short", "a learning rate that is too low"),
        next_steps=("Train longer", "Find a learning rate: learn.lr_find()"),
    )
