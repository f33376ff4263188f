"""Which batches are looked at closely: densely at first, then ever more rarely, within a budget."""

import statistics
from collections import deque

DENSE = 8  # batches at the beginning that are all looked at
ALTERNATE = 20  # up to here every second one
GROWTH = 1.3  # from there on the distance between two grows with the batches that have passed
AT_LEAST = 2.0  # the same, whatever it costs
KEPT = 64  # durations that are remembered


class Schedule:
    """Says which batches are looked at, so that looking costs no more than `budget` of the training.

    The first 8 batches are, up to batch 20 every second one; after that one when the number of batches has
    grown by 30 %, if what looking has cost is within the budget, else when it has doubled. What it costs is
    the median duration of batches looked at less that of the others, as a clock in the hooks would cost
    itself.

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
        due = n < DENSE or (n < ALTERNATE and n % 2 == 1)
        if n >= ALTERNATE and n >= self._last * (GROWTH if self._is_affordable() else AT_LEAST):
            due = True
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
