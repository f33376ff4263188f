"""Patience: how long this process may wait for others at its end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 3.0
REGAINED = 0.1  # seconds for each second


class Patience:
    """Seconds that a process may yet wait for others: a few, and what was waited comes back slowly.

    A script that ends several trainings at once so waits no longer than at the end of a single one.

    Args:
        seconds: the most that it may wait.

    >>> patience = Patience(2.0)
    >>> patience.left()
    2.0
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._most = self._left = seconds
        self._at = time.monotonic()

    def left(self) -> float:
        """Seconds that it may wait now."""
        now = time.monotonic()
        self._left = min(self._most, self._left + REGAINED * (now - self._at))
        self._at = now
        return max(0.0, self._left)

    @contextmanager
    def waiting(self, share: float = 1.0) -> Iterator[float]:
        """A wait, for at most the yielded number of seconds, a share of what is left."""
        left = self.left()
        try:
            yield share * left
        finally:
            now = time.monotonic()
            self._left, self._at = left - (now - self._at), now


PATIENCE = Patience()  # of this process
