"""Choice of the batches to inspect closely, by their number alone and not by the clock."""

import random

N_DENSE = 6  # batches at the beginning, all inspected
GROWTH = 1.35  # ratio of the numbers of two inspected batches after these
N_FREE = 20  # batches up to which `GROWTH` holds whatever the budget
MAX_GROWTH = 2.0  # ratio if the budget is exhausted
N_NOTED, EACH = 64, 8  # batches at the beginning that are noted, and of so many later ones in a row one


class Schedule:
    """Chooses the batches to inspect: many at first, then fewer and fewer.

    The first 6 batches are inspected, then one each time the number of batches has grown by 35 %. From batch
    20 on, that growth applies only while later inspections are at most a share `budget` of all batches; if
    they are more, one is due when the number of batches has doubled.

    The clock plays no role: the time that an inspection takes depends on what else the machine does, and the
    verdict must not. A clock could save little, because inspections become rare anyway: from batch 20 to
    1,000 there are 9 with a budget of 0.02, 12 with 1 and 5 with 0.

    Args:
        budget: share of the batches, 0..1.
    """

    def __init__(self, budget: float = 1.0) -> None:
        self.budget = budget
        self.n_batches = 0
        self._last = 0
        self._n_later = 0  # inspected batches from batch 20 on
        self._noted, self._choice = 0, random.Random(0)  # not the generator of the user's program

    def is_due(self) -> bool:
        """Whether to inspect the batch that begins; counts it."""
        n, self.n_batches = self.n_batches, self.n_batches + 1
        due = self.is_wanted(n)
        if due:
            self._last = n
            self._n_later += n >= N_FREE
        return due

    def is_wanted(self, n: int) -> bool:
        """Whether to inspect batch `n`, if no other one is inspected before it."""
        growth = GROWTH if n < N_FREE or self._n_later + 1 <= self.budget * n else MAX_GROWTH
        return n < N_DENSE or n >= self._last * growth

    def is_noted(self) -> bool:
        """Whether slow facts are noted in that batch: one of the first 64, or of each 8 one at random."""
        n = self.n_batches - 1
        if n % EACH == 0:
            self._noted = n + self._choice.randrange(EACH)
        return n < N_NOTED or n == self._noted

    @property
    def rule(self) -> str:
        """Rule by which the budget has reduced the choice so far; "" if it has not."""
        if self.n_batches <= N_FREE:
            return ""
        return f"from batch {N_FREE} on about {100 * self.budget:g}% of them"
