"""Trend of a loss: whether it falls, how surely, and how it compares with guessing."""

import math
from statistics import fmean

from hookcb.core.text import join_names
from hookcb.diagnosis.run import WINDOW, Run, Series
from hookcb.diagnosis.trends import LEARNED, before, finite, loss_left, median, rates, slope

MAX_OF_CONSTANT = 0.98  # of the loss of the best constant prediction, for a model that learns
MIN_RANGE = 0.01  # between the losses of a constant and of a perfect prediction, as a share of the first
MAX_NOISE = 0.2  # standard error of the difference between two mean losses of a constant, as a share of it
MIN_BATCHES = 50  # to tell a flat or rising loss
MIN_BATCHES_OF_TOKENS = 200  # for a language model, which learns the shares of tokens first, and waits there
FLAT, NEAR_GUESS = 0.95, 0.8  # shares of the first loss and of the loss of guessing
CONFIDENCE = 3.0  # standard deviations


def falls_slowly(evidence: Run) -> bool:
    """Whether the loss falls, but by less than 5 %, and is still above 0.8 of the loss of guessing.

    That is typical of a slow training, and of one that memorizes labels that do not follow from the inputs.
    """
    is_long = len(finite(evidence.loss.values)) >= MIN_BATCHES and math.isfinite(first := evidence.first_loss)
    is_near = is_long and guesses(evidence) and lowest_loss(evidence) > limit_of_flat(first)
    return is_near and falls_by(evidence.loss)[0] > 0


def lowest_loss(evidence: Run) -> float:
    """Minimum of the smoothed loss after the first ten batches."""
    return min(evidence.smooth_loss().values[WINDOW:])


def limit_of_flat(first: float) -> float:
    """Value below which a loss that began at `first` counts as having fallen."""
    return first - (1 - FLAT) * abs(first)


def falls_by(loss: Series) -> tuple[float, float]:
    """Least and greatest plausible fall over the whole series, within three standard deviations."""
    low, high = slope(before(loss, math.inf), CONFIDENCE)
    n_steps = loss.steps[-1] - loss.steps[0]
    return -high * n_steps, -low * n_steps


def guesses(evidence: Run) -> bool:
    """Whether the final loss is at least 0.8 of the loss of guessing; False if that is unknown."""
    return median(evidence.loss.values[-WINDOW:]) >= NEAR_GUESS * evidence.guess > 0


def loss_of_constant(evidence: Run, n_batches: int = 0) -> tuple[float, float]:
    """Mean loss of the last tenth of the batches, and its ratio to the loss of the best constant prediction.

    A penalty on parameters is left out of the loss. For the ratio, the loss of a perfect prediction is
    subtracted from both. NaN for fewer than `n_batches`, by default 50, or 200 of tokens, since the learning
    rate has reached its largest value; the ratio also if the loss of a constant is unknown, or that of a
    perfect prediction is as large.
    """
    values = finite(_without_penalty(evidence).values)
    full = max(finite(rates(evidence).values), default=0.0)
    warm = next((step for step, rate in rates(evidence) if rate >= full), 0)
    n_warm = sum(step >= warm for step in evidence.loss.steps)
    if min(len(values), n_warm) < (n_batches or batches_to_learn(evidence)):
        return math.nan, math.nan
    last = fmean(values[-n_last(len(values)) :])
    return last, ratio_to_constant(evidence, last)


def ratio_to_constant(evidence: Run, loss: float) -> float:
    """Ratio of a loss to that of the best constant prediction, less that of a perfect prediction each."""
    above = evidence.constant - evidence.perfect
    return (loss - evidence.perfect) / above if above > MIN_RANGE * evidence.constant else math.nan


def batches_to_learn(evidence: Run) -> int:
    """Number of batches after which a model is compared with a constant."""
    return MIN_BATCHES_OF_TOKENS if "tokens beside targets" in evidence.observed else MIN_BATCHES


def is_trivial(evidence: Run, n_batches: int = 0) -> bool:
    """Whether the model is no better than a constant, and its loss does not fall fast enough to become it.

    Known after so many batches, by default `batches_to_learn`.
    """
    last, ratio = loss_of_constant(evidence, n_batches)
    return ratio > MAX_OF_CONSTANT and not is_noisy(evidence) and not may_become_better(evidence, last)


def has_learned(evidence: Run, first: float, share: float = LEARNED) -> bool:
    """Whether the final loss is below this share of `first`, and the model is better than a constant.

    The loss of a language model falls by a third, from ln C to the entropy of the shares of the tokens,
    before the model has learned anything from its input.
    """
    return loss_left(evidence, first) < share and not is_trivial(evidence, MIN_BATCHES)


def need_not_fall(evidence: Run) -> bool:
    """Whether the loss is of no known kind: an objective, as of a policy, need not fall."""
    return not evidence.loss_kind and math.isnan(evidence.guess)


def why_unknown(evidence: Run, otherwise: str) -> str:
    """Why a loss cannot be compared with that of guessing."""
    kinds = evidence.loss_kinds
    return f"the loss is a sum of {len(kinds)}: {join_names(kinds, 4)}" if len(kinds) > 1 else otherwise


def is_noisy(evidence: Run) -> bool:
    """Whether the targets vary so much between batches that means over few of them cannot be compared.

    So do a few outliers that make up most of a squared error, or one positive in a hundred samples.
    """
    noise = evidence.noise * math.sqrt(1 / n_last(len(evidence.loss)) + 1 / evidence.n_targets)
    return noise > MAX_NOISE * (evidence.constant - evidence.perfect)


def n_last(n: int) -> int:
    """Number of batches whose mean is the final loss."""
    return max(WINDOW, n // 10)


def may_become_better(evidence: Run, last: float) -> bool:
    """Whether as many batches again would bring a loss of `last` below that of a constant."""
    limit = evidence.perfect + MAX_OF_CONSTANT * (evidence.constant - evidence.perfect)
    return last - further_fall(_without_penalty(evidence)) <= limit


def _without_penalty(evidence: Run) -> Series:
    """The loss without its penalty on parameters, which is interpolated between the batches that show it."""
    known, loss = evidence.penalty, evidence.loss
    if not len(known):
        return loss
    ends = [(loss.steps[0], known.values[0]), *known, (loss.steps[-1], known.values[-1])]
    rest, i = Series(), 0
    for step, x in loss:
        while i < len(ends) - 2 and ends[i + 1][0] < step:
            i += 1
        (first, low), (last, high) = ends[i], ends[i + 1]
        share = (step - first) / (last - first) if last > first else 0.0
        rest.add(step, x - low - share * (high - low))
    return rest


def further_fall(loss: Series) -> float:
    """By how much a loss will at least fall in as many batches again, by its slope over the last half."""
    _, high = slope(_last_half(loss), CONFIDENCE)
    return max(0.0, -high * (loss.steps[-1] - loss.steps[0])) if math.isfinite(high) else 0.0


def expected_fall(evidence: Run) -> float:
    """By how much the loss will fall in as many batches again, at the median slope of its last half.

    At most by what is left above a perfect prediction; 0 unless the slope is sure to be negative.
    """
    loss = evidence.loss
    if not further_fall(loss):
        return 0.0
    fall = -fmean(slope(_last_half(loss), 0.0)) * (loss.steps[-1] - loss.steps[0])
    above = final_loss(evidence) - evidence.perfect
    return min(fall, above) if above > 0 else fall


def final_loss(evidence: Run) -> float:
    """Mean of the finite ones of the last ten losses; NaN if there are none."""
    return fmean(finite(evidence.loss.values[-WINDOW:]) or [math.nan])


def _last_half(loss: Series) -> Series:
    return before(Series(loss.steps[len(loss) // 2 :], loss.values[len(loss) // 2 :]), math.inf)
