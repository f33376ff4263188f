"""Which batches are looked at closely: a function of their number alone, which no clock changes."""

DENSE = 6  # batches at the beginning that are all looked at
GROWTH = 1.35  # from there on the distance between two grows with the batches that have passed
FREE = 20  # batches up to which it does so whatever the budget
AT_LEAST = 2.0  # the same, whatever the budget


class Schedule:
    """Says which batches are looked at: many at first, then ever fewer.

    The first 6 batches are; then one when the number of batches has grown by 35 %. From batch 20 on that
    holds as long as looks after it are at most a share `budget` of all batches; else it is one when their
    number has doubled.

    No clock decides: how long a look takes depends on what else the machine does, and a verdict must not.
    There is little that a clock could spare, as looks become rare by themselves: up to batch 1,000 there are
    9 after batch 20 with a budget of 0.02, 12 with one of 1 and 5 with none.

    Args:
        budget: share of the batches, 0..1.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.n_batches = 0
        self._last = 0
        self._n_later = 0  # looks from batch 20 on

    def is_due(self) -> bool:
        """Whether the batch that begins is looked at; counts it."""
        n, self.n_batches = self.n_batches, self.n_batches + 1
        growth = GROWTH if n < FREE or self._n_later + 1 <= self.budget * n else AT_LEAST
        due = n < DENSE or n >= self._last * growth
        if due:
            self._last = n
            self._n_later += n >= FREE
        return due

    @property
    def rule(self) -> str:
        """How the budget has thinned looks so far; "" before it does."""
        return f"from batch {FREE} on as budget={self.budget:g} allows" if self.n_batches > FREE else ""
