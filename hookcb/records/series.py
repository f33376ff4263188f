"""Series: a number over the training batches."""

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


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
