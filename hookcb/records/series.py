"""Series: a number over the training batches, and Smoothed: its exponential moving average."""

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

BETA = 0.98  # weight of the past in the smoothed loss, as in fastai


@dataclass(slots=True)
class Series:
    """A number over the training: `values[i]` belongs to training batch `steps[i]`; NaN is left out."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, steps: Iterable[int], values: Iterable[float]) -> "Series":
        """Series of these values without NaN."""
        pairs = [(step, x) for step, x in zip(steps, values, strict=True) if not math.isnan(x)]
        return cls([step for step, _ in pairs], [x for _, x in pairs])

    def __repr__(self) -> str:
        shown = f", steps {self.steps[0]}–{self.steps[-1]}, last {self.values[-1]:.6g}" if self.values else ""
        return f"Series({len(self)} values{shown})"

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)

    def add(self, step: int, value: float) -> None:
        """Appends a value."""
        self.steps.append(step)
        self.values.append(value)

    def between(self, first: int, last: int) -> "Series":
        """Part from step `first` to step `last`, both included."""
        pairs = [(step, x) for step, x in self if first <= step <= last]
        return Series([step for step, _ in pairs], [x for _, x in pairs])

    def median(self, n: int | None = None) -> float:
        """Median of the last `n` values, by default of all; NaN if empty."""
        values = self.values if n is None else self.values[-n:]
        return statistics.median(values) if values else math.nan


class Smoothed:
    """Exponential moving average, corrected for its start at zero.

    Source: D. Kingma, J. Ba, "Adam", arxiv.org/abs/1412.6980, section 3.

    >>> smoothed = Smoothed(beta=0.5)
    >>> smoothed.add(3.0), smoothed.add(6.0)
    (3.0, 5.0)
    """

    def __init__(self, beta: float = BETA) -> None:
        self.beta, self._sum, self._weight = beta, 0.0, 0.0

    def add(self, value: float) -> float:
        """Adds a number; returns the average including it."""
        self._sum = self.beta * self._sum + (1 - self.beta) * value
        self._weight = self.beta * self._weight + (1 - self.beta)
        return self._sum / self._weight
