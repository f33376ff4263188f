"""What steps took, phase by phase: percentiles, samples a second, and the steps that took much longer."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from hookcb.core.console import printable
from hookcb.core.text import duration
from hookcb.profiling.phases import PHASES
from hookcb.records.printing import Printed
from hookcb.records.tables import Column, fitted

FIRST_BATCH = "first batch of an epoch"
STEP_PHASES = (*PHASES, "other")
DEVICE_PHASES = tuple(f"device_{phase}" for phase in STEP_PHASES)
DEVICE_TOTAL = "device_total"
N_SHOWN = 5  # outliers in the report


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step took, in seconds by the host's clock.

    On CUDA work is handed over and goes on later: there the host's seconds are those of handing it over, and
    of waiting where it waits. The device's are between events on its stream, idle time included.

    Attributes:
        epoch: in this fit, from 0.
        step: number of training batches before this one; in validation, of its own batches.
        data: the fetch of the batch, from the end of the last step to `before_batch`.
        forward: the model.
        loss: the loss function.
        backward: the backward pass.
        optimizer: the step of the optimizer, and `zero_grad`.
        callbacks: what callbacks do at all events.
        other: what a loop that is not a Learner's does between its batches; 0 in a Learner. In such a loop
            `data` is the time in fetches of a DataLoader, and 0 if batches come from elsewhere.
        total: all of these.
        n_samples: in the batch, None where there is no tensor to tell.
        notes: what happened: "first batch of an epoch", "cancelled", "validation", "compilation" …
        device_data, device_forward, device_loss, device_backward, device_optimizer, device_callbacks,
            device_other: seconds of the same phases by the device's clock; None without CUDA, or until it has
            come to that.
        device_total: all of these.
    """

    epoch: int
    step: int
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
    device_data: float | None = None
    device_forward: float | None = None
    device_loss: float | None = None
    device_backward: float | None = None
    device_optimizer: float | None = None
    device_callbacks: float | None = None
    device_other: float | None = None
    device_total: float | None = None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """How long a phase takes.

    Attributes:
        p50, p90, p99: seconds that half, 90 % and 99 % of the steps do not exceed, interpolated.
        max, mean: seconds.
        share: of the time of all steps, 0..1.
    """

    p50: float
    p90: float
    p99: float
    max: float
    mean: float
    share: float


@dataclass(frozen=True, slots=True)
class Outlier:
    """A step that took much longer than others; it prints as a sentence.

    Attributes:
        epoch, step: which one.
        seconds: what it took.
        ratio: to the median step.
        phase: the one that took most more than its own median.
        extra: how many seconds more.
        notes: what happened then.
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
        return printable(
            f"step {self.step}, epoch {self.epoch}: {duration(self.seconds)}, {ratio} times the "
            f"median; {self.phase} took {duration(self.extra)} more than usual{happened}"
        )


# a step as it is kept: its total and the seconds of each of STEP_PHASES, then epoch, step and n_samples
Row = tuple[float, tuple[float, ...], int, int, int | None]


def step_time(row: Row, notes: Sequence[str] = (), on_device: Sequence[float] = ()) -> StepTime:
    """A step as it is read.

    Args:
        row: as it is kept.
        notes: what happened.
        on_device: seconds of each phase by the device's clock, if they are there.
    """
    total, seconds, epoch, step, n_samples = row
    named: dict[str, Any] = dict(zip(STEP_PHASES, seconds, strict=True))
    if on_device:
        named |= zip((*DEVICE_PHASES, DEVICE_TOTAL), (*on_device, sum(on_device)), strict=True)
    return StepTime(epoch, step, **named, total=total, n_samples=n_samples, notes=tuple(notes))


def percentiles(steps: Sequence[StepTime], slowest: Sequence[StepTime] = ()) -> dict[str, Percentiles]:
    """Of each phase, of "total" and, where the device has a clock, of the same on it, "device_forward" ….

    Args:
        steps: one or more.
        slowest: others, that count for the longest only.
    """
    found = _percentiles(steps, slowest, (*STEP_PHASES, "total"))
    timed, slow = ([x for x in of if x.device_total is not None] for of in (steps, slowest))
    return found | (_percentiles(timed, slow, (*DEVICE_PHASES, DEVICE_TOTAL)) if timed else {})


def _percentiles(
    steps: Sequence[StepTime], slowest: Sequence[StepTime], names: Sequence[str]
) -> dict[str, Percentiles]:
    """Of fields, of which the last is the sum of the others."""
    whole = math.fsum(getattr(step, names[-1]) for step in steps)
    found = {}
    for name in names:
        seconds = sorted(getattr(step, name) for step in steps)
        p50, p90, p99 = (quantile(seconds, q) for q in (0.5, 0.9, 0.99))
        longest = max(seconds[-1], *(getattr(step, name) for step in slowest), 0.0)
        mean, share = math.fsum(seconds) / len(seconds), math.fsum(seconds) / whole if whole else math.nan
        found[name] = Percentiles(p50, p90, p99, longest, mean, share)
    return found


def quantile(ascending: Sequence[float], q: float) -> float:
    """What a share `q` of the numbers does not exceed, interpolated between neighbours as numpy does.

    >>> quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    place = q * (len(ascending) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (place - below) * (ascending[above] - ascending[below])


def samples_per_second(steps: Sequence[StepTime]) -> float | None:
    """The median over steps; None where no batch tells how many samples it has."""
    rates = [step.n_samples / step.total for step in steps if step.n_samples is not None and step.total]
    return statistics.median(rates) if rates else None


def outliers(steps: Sequence[StepTime], factor: float, usual: Sequence[StepTime] = ()) -> list[Outlier]:
    """The steps that took more than `factor` times the median, in their order.

    A multiple of the median does not move with the outliers themselves, as one of a standard deviation would.
    How large it is, is a choice.

    Args:
        steps: to look at.
        factor: above 1.
        usual: steps to take the medians of, by default `steps`.
    """
    usual = usual or steps
    medians = {name: statistics.median(getattr(x, name) for x in usual) for name in (*STEP_PHASES, "total")}
    return [_outlier(step, medians) for step in steps if step.total > factor * medians["total"]]


def _outlier(step: StepTime, medians: Mapping[str, float]) -> Outlier:
    extra = {phase: getattr(step, phase) - medians[phase] for phase in STEP_PHASES}
    phase = max(extra, key=lambda phase: extra[phase])
    ratio = step.total / medians["total"] if medians["total"] else math.inf
    return Outlier(step.epoch, step.step, step.total, ratio, phase, extra[phase], step.notes)


class StepReport(Printed):
    """A table of the phases, with what is to be said about them.

    Args:
        of: by phase, see `percentiles`.
        rate: samples a second.
        found: the outliers among all steps.
        factor: from which multiple of the median they are.
        what: the steps are, for the title.
    """

    def __init__(
        self,
        of: Mapping[str, Percentiles],
        rate: float | None,
        found: Sequence[Outlier],
        factor: float,
        what: str,
    ) -> None:
        self.of, self.title = of, what if rate is None else f"{what}, {rate:,.0f} samples a second"
        self.lines = findings(of, found, factor)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = [
            name for name in STEP_PHASES if self.of[name].max
        ]  # as of backward in validation there is none
        names = [*shown, "total"]
        table = fitted(names, names, self._columns(), options, title=self.title, head="phase")
        if shown:
            table.rows[-2].end_section = True
        yield table
        yield Text("\n".join(self.lines))

    def _columns(self) -> list[Column[Any]]:
        def seconds(title: str, rank: int, field: str, of: str = "") -> Column[Any]:
            return Column(title, lambda name: duration(getattr(self.of[f"{of}{name}"], field)), rank)

        device = [seconds("on the device", 2, "p50", "device_")] if DEVICE_TOTAL in self.of else []
        return [
            Column("share", lambda name: f"{self.of[name].share:.0%}"),
            seconds("median", 1, "p50"),
            seconds("90 %", 4, "p90"),
            seconds("99 %", 5, "p99"),
            seconds("longest", 3, "max"),
            *device,
        ]


def findings(of: Mapping[str, Percentiles], found: Sequence[Outlier], factor: float) -> list[str]:
    """What the numbers say, in words.

    Args:
        of: by phase, see `percentiles`.
        found: the outliers.
        factor: from which multiple of the median they are.
    """
    share = of.get("device_data", of["data"]).share  # idle time, on a device
    lines = [f"{share:.0%} of the time is spent waiting for data"] if share else []  # 0: no fetch was seen
    if not found:
        return [*lines, f"no step took more than {factor:g} times the median"]
    first = sum(FIRST_BATCH in outlier.notes for outlier in found)
    steps = f"{len(found)} step{'s' * (len(found) > 1)} took more than {factor:g} times the median"
    lines.append(f"{steps}, {first} of them the first of an epoch" if first else steps)
    longest = sorted(found, key=lambda outlier: -outlier.seconds)[:N_SHOWN]
    lines += [f"- {outlier}" for outlier in longest]
    return [*lines, f"- and {len(found) - N_SHOWN} more"] if len(found) > N_SHOWN else lines
