"""Statistics of step times: percentiles by phase, samples per second, and outliers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from hookcb.core.clock import PHASES
from hookcb.core.console import printable
from hookcb.core.text import duration
from hookcb.records.printing import Printed
from hookcb.records.tables import Column, fitted

FIRST_BATCH = "first batch of an epoch"
STEP_PHASES = (*PHASES, "other")
START = "start"  # of the loader: what would be "data" in the first batch of an epoch
WORKERS = "workers"  # of a DataLoader: their part of its start
LABELS = {START: "start of the loader", WORKERS: "… its workers"}
SHOWN_PHASES = (START, *STEP_PHASES)
DEVICE_PHASES = tuple(f"device_{phase}" for phase in SHOWN_PHASES)
DEVICE_TOTAL = "device_total"
N_SHOWN = 5  # outliers in the report
MIN_SHARE = 0.005  # of the time, from which the start of the loader is told


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step, in seconds by the host's clock.

    CUDA runs asynchronously: there, the host's seconds are the time to launch the work, and to wait if the
    host waits. Device seconds are the time between events on the device's stream, including idle time.

    Attributes:
        epoch: epoch of this fit, from 0.
        step: number of training batches before this one; in validation, of validation batches.
        start: start of the loader and of its workers, and fetch of the first batch of an epoch; 0 for others.
        data: fetch of the batch, from the end of the previous step to `before_batch`; 0 for those first ones.
        forward: forward pass of the model.
        loss: loss function.
        backward: backward pass.
        optimizer: step of the optimizer, and `zero_grad`.
        callbacks: callbacks, at all events.
        other: time between the batches of a loop that is not a Learner's; in a Learner the time in which
            hookcb waits for other ranks, 0 if there are none. In a loop that is not a Learner's, `start` and
            `data` are the time in a DataLoader, and 0 if batches come from elsewhere.
        total: sum of the phases.
        n_samples: number of samples in the batch; None if it has no tensor.
        notes: incidents of the step: "first batch of an epoch", "cancelled", "validation", "compilation" …
        device_start, device_data, device_forward, device_loss, device_backward, device_optimizer,
            device_callbacks, device_other: seconds of the same phases on the device; None without CUDA, or
            until the device has finished the step.
        device_total: sum of these.
        workers: the part of `start` in which a DataLoader started its workers; what these need for their
            first batch is the rest of it. 0 without workers.
    """

    epoch: int
    step: int
    start: float
    data: float
    forward: float
    loss: float
    backward: float
    optimizer: float
    callbacks: float
    other: float
    total: float
    n_samples: int | None = None
    notes: tuple[str, ...] = ()
    device_start: float | None = None
    device_data: float | None = None
    device_forward: float | None = None
    device_loss: float | None = None
    device_backward: float | None = None
    device_optimizer: float | None = None
    device_callbacks: float | None = None
    device_other: float | None = None
    device_total: float | None = None
    workers: float = 0.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Distribution of the time of a phase over steps.

    Attributes:
        p50, p90, p99: percentiles in seconds, interpolated.
        max, mean: maximum and mean in seconds.
        share: share of the time of all steps, in 0..1.
    """

    p50: float
    p90: float
    p99: float
    max: float
    mean: float
    share: float


@dataclass(frozen=True, slots=True)
class Outlier:
    """A step that took much longer than the median; prints as a sentence.

    Attributes:
        epoch, step: position of the step.
        seconds: time of the step.
        ratio: time relative to the median step.
        phase: the phase that exceeded its own median by most.
        extra: by how many seconds.
        notes: incidents of the step.
    """

    epoch: int
    step: int
    seconds: float
    ratio: float
    phase: str
    extra: float
    notes: tuple[str, ...]

    def __str__(self) -> str:
        happened = f"; {', '.join(self.notes)}" if self.notes else ""
        ratio = f"{self.ratio:,.0f}" if self.ratio >= 100 else f"{self.ratio:.3g}"
        phase = LABELS.get(self.phase, self.phase)
        return printable(
            f"step {self.step}, epoch {self.epoch}: {duration(self.seconds)}, {ratio} times the "
            f"median; {phase} took {duration(self.extra)} more than usual{happened}"
        )


# a step as it is stored: its total and the seconds of each of STEP_PHASES; epoch, step, n_samples and notes;
# seconds in which workers were started; and seconds of each phase on the device, if known
Row = tuple[float, tuple[float, ...], int, int, int | None, tuple[str, ...], float, tuple[float, ...]]


def step_time(row: Row) -> StepTime:
    """StepTime of a stored step."""
    total, seconds, epoch, step, n_samples, notes, workers, on_device = row
    named: dict[str, Any] = dict(zip(SHOWN_PHASES, _with_start(seconds, notes), strict=True))
    named[WORKERS] = workers
    if on_device:
        shown = (*_with_start(on_device, notes), sum(on_device))
        named |= zip((*DEVICE_PHASES, DEVICE_TOTAL), shown, strict=True)
    return StepTime(epoch, step, **named, total=total, n_samples=n_samples, notes=notes)


def _with_start(seconds: Sequence[float], notes: Sequence[str]) -> tuple[float, ...]:
    """Seconds of each of SHOWN_PHASES, from those of STEP_PHASES, the first of which is "data"."""
    data, *others = seconds
    return (data, 0.0, *others) if FIRST_BATCH in notes else (0.0, data, *others)


def percentiles(steps: Sequence[StepTime], slowest: Sequence[StepTime] = ()) -> dict[str, Percentiles]:
    """Percentiles by phase, with "workers" and "total"; with device times also "device_forward" ….

    Those of "start", and of "workers", which is a part of it, are over the first steps of epochs.

    Args:
        steps: one or more steps.
        slowest: more steps, which only count for the maximum.
    """
    on_host = _percentiles(steps, slowest, (*SHOWN_PHASES, WORKERS, "total"))
    timed, slow = ([x for x in group if x.device_total is not None] for group in (steps, slowest))
    return on_host | (_percentiles(timed, slow, (*DEVICE_PHASES, DEVICE_TOTAL)) if timed else {})


def _percentiles(
    steps: Sequence[StepTime], slowest: Sequence[StepTime], names: Sequence[str]
) -> dict[str, Percentiles]:
    """Percentiles of the fields `names`; the last one is the whole time."""
    whole = math.fsum(getattr(step, names[-1]) for step in steps)
    by_name = {}
    for name in names:
        seconds = sorted(getattr(step, name) for step in steps)
        if name.endswith((START, WORKERS)):  # most steps have none
            seconds = [x for x in seconds if x] or [0.0]
        p50, p90, p99 = (quantile(seconds, q) for q in (0.5, 0.9, 0.99))
        longest = max(seconds[-1], *(getattr(step, name) for step in slowest), 0.0)
        mean, share = math.fsum(seconds) / len(seconds), math.fsum(seconds) / whole if whole else math.nan
        by_name[name] = Percentiles(p50, p90, p99, longest, mean, share)
    return by_name


def quantile(ascending: Sequence[float], q: float) -> float:
    """The `q`-quantile of sorted numbers, interpolated linearly like `numpy.quantile`.

    >>> quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    place = q * (len(ascending) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (place - below) * (ascending[above] - ascending[below])


def samples_per_second(steps: Sequence[StepTime]) -> float | None:
    """Median over steps; None if no batch has a known number of samples."""
    rates = [step.n_samples / step.total for step in steps if step.n_samples is not None and step.total]
    return statistics.median(rates) if rates else None


def outliers(steps: Sequence[StepTime], factor: float, usual: Sequence[StepTime] = ()) -> list[Outlier]:
    """Steps that took more than `factor` times the median, in order.

    The median is robust to the outliers themselves, unlike the standard deviation. The factor is a choice.

    Args:
        steps: steps to search.
        factor: multiple of the median, above 1.
        usual: steps whose medians to compare with, by default `steps`.
    """
    usual = usual or steps
    medians = {name: statistics.median(getattr(x, name) for x in usual) for name in (*SHOWN_PHASES, "total")}
    return [_outlier(step, medians) for step in steps if step.total > factor * medians["total"]]


def _outlier(step: StepTime, medians: Mapping[str, float]) -> Outlier:
    extra = {phase: getattr(step, phase) - medians[phase] for phase in SHOWN_PHASES}
    phase = max(extra, key=lambda phase: extra[phase])
    ratio = step.total / medians["total"] if medians["total"] else math.inf
    return Outlier(step.epoch, step.step, step.total, ratio, phase, extra[phase], step.notes)


class StepReport(Printed):
    """A table of the phases, and sentences about data and outliers.

    Args:
        phases: percentiles by phase, see `percentiles`.
        rate: samples per second.
        slow: the outliers among all steps.
        factor: multiple of the median from which a step is an outlier.
        steps: which steps these are, for the title.
        ranks: a table of the ranks, with `lines` below it; None for one process.
    """

    def __init__(
        self,
        phases: Mapping[str, Percentiles],
        rate: float | None,
        slow: Sequence[Outlier],
        factor: float,
        steps: str,
        ranks: Any = None,
    ) -> None:
        self.phases, self.ranks = phases, ranks
        self.title = steps if rate is None else f"{steps}, {rate:,.0f} samples per second"
        self.lines = findings(phases, slow, factor)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # validation has no backward, for example
        shown = [name for name in (START, WORKERS, *STEP_PHASES) if self.phases[name].max]
        names = [*shown, "total"]
        labels = [LABELS.get(name, name) for name in names]
        table = fitted(names, labels, self._columns(), options, title=self.title, head="phase")
        if shown:
            table.rows[-2].end_section = True
        yield table
        yield Text("\n".join(self.lines))
        if self.ranks is not None:
            yield self.ranks
            yield Text("\n".join(self.ranks.lines()))

    def _columns(self) -> list[Column[Any]]:
        def seconds(title: str, rank: int, field: str, prefix: str = "") -> Column[Any]:
            def text(name: str) -> str:
                return duration(getattr(self.phases.get(f"{prefix}{name}"), field, None))

            return Column(title, text, rank)

        device = [seconds("on the device", 2, "p50", "device_")] if DEVICE_TOTAL in self.phases else []
        return [
            Column("share", lambda name: f"{self.phases[name].share:.0%}"),
            seconds("median", 1, "p50"),
            seconds("90 %", 4, "p90"),
            seconds("99 %", 5, "p99"),
            seconds("longest", 3, "max"),
            *device,
        ]


def findings(phases: Mapping[str, Percentiles], slow: Sequence[Outlier], factor: float) -> list[str]:
    """Sentences about waiting for data and about outliers.

    Args:
        phases: percentiles by phase, see `percentiles`.
        slow: the outliers.
        factor: multiple of the median from which a step is an outlier.
    """
    prefix = "device_" if DEVICE_TOTAL in phases else ""  # idle time, on a device
    share, start = phases[f"{prefix}data"].share, phases[f"{prefix}{START}"].share
    until = f", {start:.0%} for the loader to start" if start > MIN_SHARE else ""
    if until and (workers := phases[WORKERS].share) > MIN_SHARE:
        until += f", {workers:.0%} for its workers"
    # 0: no fetch was seen
    lines = [f"{share:.0%} of the time is spent waiting for data{until}"] if share or until else []
    if not slow:
        return [*lines, f"no step took more than {factor:g} times the median"]
    first = sum(FIRST_BATCH in outlier.notes for outlier in slow)
    steps = f"{len(slow)} step{'s' * (len(slow) > 1)} took more than {factor:g} times the median"
    lines.append(f"{steps}, {first} of them the first of an epoch" if first else steps)
    longest = sorted(slow, key=lambda outlier: -outlier.seconds)[:N_SHOWN]
    lines += [f"- {outlier}" for outlier in longest]
    return [*lines, f"- and {len(slow) - N_SHOWN} more"] if len(slow) > N_SHOWN else lines
