"""StepRecords: times of the steps of a fit, in bounded memory, and statistics of them."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from hookcb.core.arguments import check_number
from hookcb.processes.stragglers import OWN, RankTimes, Straggler
from hookcb.profiling.steps.clock import StepClock
from hookcb.profiling.steps.store import StepStore
from hookcb.profiling.steps.times import (
    DEVICE_PHASES,
    DEVICE_TOTAL,
    SHOWN_PHASES,
    Outlier,
    Percentiles,
    StepReport,
    StepTime,
    outliers,
    percentiles,
    samples_per_second,
)
from hookcb.records.content import Content, RanksCompared, SlowStep, TimeSpent
from hookcb.records.frames import frame_of
from hookcb.records.recording import Reading, Recording
from hookcb.records.series import Series

PARTS = {"train": "training", "valid": "validation"}  # parts of a fit


class StepRecords(Recording):
    """Times of the steps of a fit, in training or, with `part="valid"`, in validation.

    Args:
        keep: number of steps to keep, see `StepStore`.

    Attributes:
        stores: the store of each part of a fit.
        clock: adds to these stores during a fit.
        ranks: own work of all ranks in training; None if this process trains alone.
    """

    def __init__(self, keep: int) -> None:
        self.stores = {part: StepStore(keep) for part in PARTS}
        self.clock: StepClock | None = None
        self.ranks: RankTimes | None = None

    @property
    def times(self) -> list[StepTime]:
        """Times of training steps, `keep` of them evenly spaced over the fit."""
        return self._store("train").times()

    @property
    def valid_times(self) -> list[StepTime]:
        """Times of validation steps, likewise; empty without `on_valid`."""
        return self._store("valid").times()

    @property
    def samples_per_second(self) -> float | None:
        """Median over training steps; None if no batch has a known number of samples.

        Raises:
            RuntimeError: If no step was timed.
        """
        return samples_per_second(self._times("train"))

    @property
    def straggler(self) -> Straggler | None:
        """The rank that the others wait for in training; None if there is none, or only one process.

        That is the rank with most work of its own, if that exceeds the others' by more than a tenth of a
        step, and in more than half of the blocks of 100 steps. The same on all ranks.
        """
        return None if self.ranks is None else self.ranks.straggler

    def percentiles(self, part: str = "train") -> dict[str, Percentiles]:
        """Percentiles by phase, with "total": `percentiles()["data"].p90`; on CUDA also "device_data" ….

        Args:
            part: "train" or "valid".

        Raises:
            RuntimeError: If no step was timed.
        """
        return percentiles(self._times(part), self.stores[part].times_and_slowest())

    def outliers(self, factor: float = 3.0, part: str = "train") -> list[Outlier]:
        """Steps that took more than `factor` times the median, in order, with their incidents.

        The search covers the steps that are kept, and the slowest 100 of all.

        Args:
            factor: multiple of the median, above 1.
            part: "train" or "valid".

        Raises:
            RuntimeError: If no step was timed.
            TypeError, ValueError: If `factor` is invalid.
        """
        check_number("factor", factor, 1.0)
        usual = self._times(part)
        return outliers(self.stores[part].times_and_slowest(), factor, usual)

    def table(self, part: str = "train") -> list[dict[str, Any]]:
        """The kept steps as rows with the fields of `StepTime`; times on the device only if there are any."""
        rows = [asdict(time) for time in self._store(part).times()]
        empty = {name for name in (*DEVICE_PHASES, DEVICE_TOTAL) if all(row[name] is None for row in rows)}
        return [{name: value for name, value in row.items() if name not in empty} for row in rows]

    def to_frame(self, part: str = "train") -> Any:
        """`table()` as a DataFrame of pandas or polars.

        Raises:
            ModuleNotFoundError: If neither is installed.
        """
        return frame_of(self.table(part))

    def report(self, part: str = "train", factor: float = 3.0) -> StepReport:
        """A table of the phases, with sentences about outliers, and about the ranks if there are several.

        Args:
            part: "train" or "valid".
            factor: multiple of the median from which a step is an outlier.

        Raises:
            RuntimeError: If no step was timed.
        """
        slow, rate = self.outliers(factor, part), samples_per_second(self._times(part))
        steps, ranks = f"{self.stores[part].n:,} steps of {PARTS[part]}", self.ranks
        if ranks is not None:
            steps += f" on rank {ranks.rank} of {len(ranks.hosts)}"
        return StepReport(
            self.percentiles(part), rate, slow, factor, steps, ranks if part == "train" else None
        )

    def show_on(self, page: Content) -> None:
        """Shows seconds by phase, slow steps, and the ranks."""
        if times := self.times:
            steps, time = [t.step for t in times], page.time or TimeSpent()
            phases = {phase: Series(steps, [getattr(t, phase) for t in times]) for phase in SHOWN_PHASES}
            time.phases = {phase: series for phase, series in phases.items() if any(series.values)}
            time.slow = [
                SlowStep(x.step, x.seconds, x.seconds / x.ratio, x.phase, "; ".join(x.notes))
                for x in self.outliers()
            ]
            time.sentences = [line for line in self.report().lines if not line.startswith("- ")]
            page.time = time
        if (ranks := self.ranks) is not None:
            page.ranks = RanksCompared(len(ranks.hosts), ranks.rank, list(ranks.hosts))
            steps = [n - 1 for n, _ in ranks.latest]
            by_rank = zip(*(own for _, own in ranks.latest), strict=True)
            page.ranks.phases = {OWN: [Series(steps, list(seconds)) for seconds in by_rank]}
            page.ranks.sentences = ranks.lines()

    def newest(self, seen: Mapping[str, int]) -> Iterator[Reading]:
        """Last step of training, unless it is in `seen`."""
        if (times := self.times) and seen.get("") != times[-1].step:
            seconds = {name: x for name, x in asdict(times[-1]).items() if isinstance(x, float)}
            yield Reading("", times[-1].step, times[-1].step, seconds, {})

    def read_device(self) -> None:
        """Collects the device times that are available by now."""
        if self.clock is not None:
            self.clock.read()

    def _store(self, part: str) -> StepStore:
        if part not in PARTS:
            raise ValueError(f"part is {part!r}; give {' or '.join(map(repr, PARTS))}")
        self.read_device()
        return self.stores[part]

    def _times(self, part: str) -> list[StepTime]:
        if times := self._store(part).times():
            return times
        hint = "train for a step first" if part == "train" else "on_valid=True times them"
        raise RuntimeError(f"no step of {PARTS[part]} has ended while this was attached; {hint}")

    def __getstate__(self) -> dict[str, Any]:
        self.read_device()
        return self.__dict__ | {"clock": None}
