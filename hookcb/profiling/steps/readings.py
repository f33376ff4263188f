"""StepReadings: what was taken down of steps, in bounded memory, and what can be read of it."""

from abc import ABC, abstractmethod

from hookcb.core.arguments import check_number
from hookcb.profiling.steps.store import StepStore
from hookcb.profiling.steps.times import (
    Outlier,
    Percentiles,
    StepReport,
    StepTime,
    outliers,
    percentiles,
    samples_per_second,
)

PARTS = {"train": "training", "valid": "validation"}  # of a fit


class StepReadings(ABC):
    """Reads what was taken down of the steps of a fit, in training or, by `part="valid"`, in validation."""

    def _set_up(self, keep: int) -> None:
        """Begins with nothing; see `StepStore` for `keep`."""
        self.keep = keep
        self.clear()

    def clear(self) -> None:
        """Forgets all."""
        self._stores = {part: StepStore(self.keep) for part in PARTS}

    @abstractmethod
    def _read_device(self) -> None:
        """Has the stores take in what the device has come to."""

    @property
    def times(self) -> list[StepTime]:
        """What training steps took, `keep` of them evenly over the fit."""
        return self._store("train").times()

    @property
    def valid_times(self) -> list[StepTime]:
        """What the steps of validation took, likewise; none without `on_valid`."""
        return self._store("valid").times()

    @property
    def samples_per_second(self) -> float | None:
        """Of training, the median over its steps; None where no batch tells how many samples it has.

        Raises:
            RuntimeError: where no step was timed.
        """
        return samples_per_second(self._times("train"))

    def percentiles(self, part: str = "train") -> dict[str, Percentiles]:
        """How long each phase takes, and "total": `percentiles()["data"].p90`; on CUDA "device_data" … too.

        Args:
            part: of the fit, "train" or "valid".

        Raises:
            RuntimeError: where no step was timed.
        """
        return percentiles(self._times(part), self._stores[part].times_and_slowest())

    def outliers(self, factor: float = 3.0, part: str = "train") -> list[Outlier]:
        """The steps that took more than `factor` times the median, with what happened then; in their order.

        They are looked for among the steps that stay, and the slowest 100 of all.

        Args:
            factor: above 1.
            part: of the fit, "train" or "valid".

        Raises:
            RuntimeError: where no step was timed.
            TypeError, ValueError: for a factor that cannot be.
        """
        check_number("factor", factor, 1.0)
        usual = self._times(part)
        return outliers(self._stores[part].times_and_slowest(), factor, usual)

    def report(self, part: str = "train", factor: float = 3.0) -> StepReport:
        """A table of the phases, with outliers in words, to print.

        Args:
            part: of the fit, "train" or "valid".
            factor: from which multiple of the median a step is an outlier.

        Raises:
            RuntimeError: where no step was timed.
        """
        found, rate = self.outliers(factor, part), samples_per_second(self._times(part))
        what = f"{self._stores[part].n:,} steps of {PARTS[part]}"
        return StepReport(self.percentiles(part), rate, found, factor, what)

    def _store(self, part: str) -> StepStore:
        if part not in PARTS:
            raise ValueError(f"part is {part!r}; give {' or '.join(map(repr, PARTS))}")
        self._read_device()
        return self._stores[part]

    def _times(self, part: str) -> list[StepTime]:
        if times := self._store(part).times():
            return times
        hint = "train for a step first" if part == "train" else "on_valid=True times them"
        raise RuntimeError(f"no step of {PARTS[part]} has ended while this was attached; {hint}")
