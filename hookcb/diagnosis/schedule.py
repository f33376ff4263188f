"""Which batches are looked at closely: densely at first, then ever more rarely, within a budget."""

import statistics
from collections import deque

DENSE = 6  # batches at the beginning that are all looked at
GROWTH = 1.35  # from there on the distance between two grows with the batches that have passed
FREE = 20  # batches up to which it does so whatever it costs
AT_LEAST = 2.0  # the same, whatever it costs
KEPT = 64  # durations that are remembered


class Schedule:
    """Says which batches are looked at, so that looking costs no more than `budget` of the training.

    The first 6 batches are; then one when the number of batches has grown by 35 %, from batch 20 on only if
    what looking has cost is within the budget, else when it has doubled. What it costs is the median duration
    of batches looked at less that of the others, as a clock in the hooks would cost itself.

    Args:
        budget: share of the training's time, 0..1.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.n_batches = self.n_looked = 0
        self._last = 0
        self._looked: deque[float] = deque(maxlen=KEPT)
        self._others: deque[float] = deque(maxlen=KEPT)
        self._total = 0.0  # seconds of all batches

    def is_due(self) -> bool:
        """Whether the batch that begins is looked at; counts it."""
        n, self.n_batches = self.n_batches, self.n_batches + 1
        growth = GROWTH if n < FREE or self._is_affordable() else AT_LEAST
        due = n < DENSE or n >= self._last * growth
        if due:
            self._last = n
        self.n_looked += due
        return due

    def took(self, seconds: float, looked: bool) -> None:
        """What a batch has taken, with all that is done between it and the next."""
        self._total += seconds
        (self._looked if looked else self._others).append(seconds)

    def _is_affordable(self) -> bool:
        if not self._looked or not self._others:
            return True
        cost = max(0.0, statistics.median(self._looked) - statistics.median(self._others))
        return (self.n_looked + 1) * cost <= self.budget * self._total
