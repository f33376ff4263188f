"""Whether a loss falls, how surely, and how far beside guessing."""

import math

from hookcb.diagnosis.evidence import WINDOW, Evidence, Series
from hookcb.diagnosis.trends import before, finite, median, slope

ENOUGH = 50  # batches to tell a flat or rising loss from
FLAT, NEAR_GUESS, SURE = 0.95, 0.8, 3.0  # of the first loss, of the guess; standard deviations


def falls_slowly(evidence: Evidence) -> bool:
    """Whether the loss falls, and yet by less than 5 % and is no better than 0.8 of guessing.

    So does a slow training, and one that learns labels by heart that do not follow from inputs.
    """
    is_long = len(finite(evidence.loss.values)) >= ENOUGH and math.isfinite(first := evidence.first_loss)
    is_near = is_long and guesses(evidence) and lowest_loss(evidence) > limit_of_flat(first)
    return is_near and falls_by(evidence.loss)[0] > 0


def lowest_loss(evidence: Evidence) -> float:
    """The smallest moving average, after the first ten batches."""
    return min(evidence.smooth_loss().values[WINDOW:])


def limit_of_flat(first: float) -> float:
    """Below which a loss has fallen that was `first` at first."""
    return first - (1 - FLAT) * abs(first)


def falls_by(loss: Series) -> tuple[float, float]:
    """By how much it falls over its length, at least and at most, as surely as three standard deviations."""
    low, high = slope(before(loss, math.inf), SURE)
    n_steps = loss.steps[-1] - loss.steps[0]
    return -high * n_steps, -low * n_steps


def guesses(evidence: Evidence) -> bool:
    """Whether the loss ends no better than 0.8 of guessing, if that is known."""
    return median(evidence.loss.values[-WINDOW:]) >= NEAR_GUESS * evidence.guess > 0
