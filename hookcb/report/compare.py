"""Runs beside one another: what they end with, where they begin to differ, and how they were configured."""

import math
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hookcb.core.arguments import check_page
from hookcb.core.whole import write_whole
from hookcb.records.printing import Printed
from hookcb.records.series import Series
from hookcb.report.data import PageData, to_text
from hookcb.report.departures import Departure, departures
from hookcb.report.page import COMPARISON, Page, filled, load_report

if TYPE_CHECKING:
    import torch

MAX_RUNS = 8  # runs on a page
STATUSES = {"healthy": 1.0, "suspect": 2.0, "sick": 3.0}
N_WARM = 10  # steps that are left out of times
LATEST = 0.1  # share of the losses whose mean is the loss of a run
N_RESAMPLED = 1_000
MIN_SAMPLES = 8  # fewer have no interval
CONDITION = re.compile(r"\s*([\w. -]+?)\s*([<>])\s*([-+.\w]+)\s*")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of each run.

    Attributes:
        name: "loss", "step_time" and "data_time" (seconds), "memory" (bytes), "status" (1 healthy, 2 suspect,
            3 sick), "valid_loss", or a metric.
        values: the numbers, None for a run without it.
        samples: what each number was computed from, in order; empty if it is one number.
    """

    name: str
    values: tuple[float | None, ...]
    samples: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    @property
    def ratio(self) -> float:
        """Last run's number, divided by the first run's; NaN if that is 0, or one is unknown."""
        first, last = self.values[0], self.values[-1]
        return last / first if first and last is not None else math.nan

    def interval(self) -> tuple[float, float]:
        """Limits within which the ratio of the last run to the first lies, at 95 %.

        Steps that follow one another are alike, so blocks of √n of them are drawn, always by the same random
        numbers (moving-block bootstrap). It knows the noise within the runs only, not a machine that was
        busier in one of them. Of 300 pairs of simulated runs of 1,000 steps, 94 % of the intervals have the
        true ratio if steps are correlated by 0.8 with the one before, 86 % if by 0.95.

        Source: Künsch, "The jackknife and the bootstrap for general stationary observations", 1989.
        """
        if not self.samples or min(map(len, self.samples)) < MIN_SAMPLES:
            return self.ratio, self.ratio
        import torch  # seconds, which a comparison without noise does not take

        generator = torch.Generator().manual_seed(0)
        first, last = (_resampled(x, self.center, generator) for x in (self.samples[0], self.samples[-1]))
        low, high = torch.quantile(
            last / first, torch.tensor([0.025, 0.975], dtype=torch.float64, device="cpu")
        ).tolist()
        return low, high

    @property
    def center(self) -> str:
        """How the number follows from the samples: "mean" for losses, "median" for times."""
        return "mean" if self.name == "loss" else "median"


class Difference(NamedTuple):
    """A line of the configuration in which runs differ; "" for a run without it."""

    section: str
    key: str
    values: list[str]


class Outcome(NamedTuple):
    """Result of a condition: whether it holds, None if the noise does not allow to say; and why."""

    is_met: bool | None
    why: str


class Comparison(Printed):
    """Runs beside one another; prints as a table.

    Attributes:
        names: names of the runs.
        runs: what was recorded of each.
        figures: numbers of each run, a `Figure` each.
        departures: for each run but the first, where it departs from the first, the earliest first.
        differences: lines of the configuration in which they differ.
    """

    def __init__(self, runs: Sequence[PageData], names: Sequence[str]) -> None:
        self.runs, self.names = list(runs), list(names)
        self.figures = list(_figures(self.runs))
        self.departures: list[list[Departure]] = [departures(self.runs[0], other) for other in self.runs[1:]]
        self.differences = list(_differences(self.runs))

    @property
    def headline(self) -> str:
        """The layer that departs first, in one line."""
        pairs = zip(self.names[1:], self.departures, strict=True)
        found = [(name, own[0]) for name, own in pairs if own]
        if found:
            name, first = min(found, key=lambda pair: pair[1].step)
            return f"{name} departs from {self.names[0]}: {first}"
        return "No layer departs from those of the first run, as far as both recorded the same ones"

    def __getitem__(self, name: str) -> Figure:
        for figure in self.figures:
            if figure.name == name:
                return figure
        raise LookupError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        known = [own.name for own in self.figures if math.isfinite(own.ratio)]
        return f"there is no figure {name!r} that both runs have; there are {', '.join(known) or 'none'}"

    def check(self, condition: str) -> Outcome:
        """Whether a condition on the ratio of the last run to the first holds: `"step_time > 1.1"`.

        If the number of the last run is not finite, each condition on it does.

        Raises:
            ValueError: If the condition cannot be read.
            LookupError: If there is no such figure.
        """
        found = CONDITION.fullmatch(condition)
        try:
            name, sign, limit = found[1], found[2], float(found[3])  # type: ignore[index]
        except (TypeError, ValueError):
            raise ValueError(f"{condition!r} is no condition; give NAME > NUMBER or NAME < NUMBER") from None
        figure = self[name]
        last = figure.values[-1]
        if last is not None and not math.isfinite(last):  # worse than any limit
            return Outcome(True, f"{name} is {last} in {self.names[-1]}")
        if not math.isfinite(figure.ratio):
            raise LookupError(self._unknown(name))
        low, high = figure.interval()
        noise = "" if low == high else f", {low:.3g} to {high:.3g} with the noise within the runs"
        is_met = low > limit if sign == ">" else high < limit
        is_not = high <= limit if sign == ">" else low >= limit
        why = f"{name} is ×{figure.ratio:.4g}{noise}; the limit is {sign} {limit:g}"
        return Outcome(True if is_met else False if is_not else None, why)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain values; numbers that are not finite become None."""
        return {
            "names": self.names,
            "figures": {
                own.name: [x if x is not None and math.isfinite(x) else None for x in own.values]
                for own in self.figures
            },
            "departures": [[asdict(own) for own in found] for found in self.departures],
            "differences": [own._asdict() for own in self.differences],
        }

    def save(self, path: str | Path) -> Path:
        """Writes the comparison as one HTML file.

        Raises:
            ValueError: If the name of the file does not end in .html.
            OSError: If the file cannot be written.
        """
        path = check_page(path)
        verdicts = "; ".join(
            f"{name}: {run.headline}" for name, run in zip(self.names, self.runs, strict=True)
        )
        markup = {"HEADLINE": escape(self.headline), "FACTS": escape(verdicts), "COMMAND": ""}
        text = filled(COMPARISON, to_text(self._content()), markup)
        return write_whole(path, lambda file: file.write(text.encode()))

    def _content(self) -> dict[str, Any]:
        """Content of the page, which its script reads: texts, and series of each run by name."""
        runs, curves = self.runs, dict[str, list[Series]]()
        for part in ("run", "epochs"):
            for name in dict.fromkeys(name for run in runs for name in getattr(run, part)):
                curves[name] = [getattr(run, part).get(name, Series()) for run in runs]
        looked = ["; ".join((run.verdict or {}).get("looked", [])) for run in runs]
        firsts = [found[0] for found in self.departures if found]
        return {
            "headline": self.headline,
            "names": self.names,
            "verdicts": [[run.headline, seen] for run, seen in zip(runs, looked, strict=True)],
            "figures": [[own.name, *_cells(own)] for own in self.figures],
            "curves": curves,
            "departures": [[str(own) for own in found] for found in self.departures],
            "layers": {f"{own.name}: {own.stat}": [_series_of(run, own) for run in runs] for own in firsts},
            "differences": [[own.section, own.key, *own.values] for own in self.differences],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table("", *self.names, f"{self.names[-1]} / {self.names[0]}")
        table.add_row("verdict", *(run.headline.partition("  ")[0] for run in self.runs), "")
        for figure in self.figures:
            table.add_row(figure.name, *_cells(figure))
        yield table
        yield Text(f"{self.headline}.")
        for section, key, values in self.differences:
            yield Text(f"{section}, {key}: {' | '.join(x or 'none' for x in values)}")


def compare(*runs: Any, names: Sequence[str] | None = None) -> Comparison:
    """Compares two to eight runs.

    Args:
        *runs: pages, files of saved records, checkpoints, folders, what `load_report` has read, learners, or
            watches.
        names: names of the runs, by default those of the files.

    Raises:
        TypeError, ValueError: If these are not two to eight runs, or there are not as many names.
        FileNotFoundError: If there is no such file.

    >>> from hookcb import Diagnose, compare, synth_learner
    >>> learners = [synth_learner(lr=lr) for lr in (0.1, 0.01)]
    >>> for learn in learners:
    ...     with learn.no_logging():
    ...         learn.fit(2, cbs=Diagnose(show=False))
    >>> found = compare(*learners, names=["fast", "slow"])
    >>> found["loss"].ratio > 1
    True
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"compare takes 2 to {MAX_RUNS} runs, got {len(runs)}")
    pages = [_page(run) for run in runs]
    if names is not None and len(names) != len(runs):
        raise ValueError(f"there are {len(runs)} runs, but {len(names)} names")
    if names is None:
        names = _told_apart([page.title or f"run {i}" for i, page in enumerate(pages, 1)])
    return Comparison(pages, list(names))


def _page(run: Any) -> PageData:
    if isinstance(run, PageData):
        return run
    if isinstance(run, Page):
        return run.data
    if isinstance(run, str | os.PathLike):
        data = _read(Path(run))
        data.title = data.title or Path(run).stem
        return data
    if hasattr(run, "cbs"):
        from hookcb.report.collect import collect

        return collect(run)
    raise TypeError(f"a run is a file, a page, a learner or a watch, got {run!r:.80}")


def _read(path: Path) -> PageData:
    if path.suffix == ".html":  # pages are compared without torch, which takes seconds to import
        return load_report(path)
    from hookcb.report.saved import load_run

    return load_run(path)


def _told_apart(names: Sequence[str]) -> list[str]:
    """Names with a number where two are alike."""
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def _series_of(run: PageData, departure: Departure) -> Series:
    """Series of what departs, in one of the runs; empty if it is not recorded there."""
    own = getattr(run, "layers" if departure.stat == "std" else "params").get(departure.name)
    return own.stats.get(departure.stat, Series()) if own else Series()


# ---- figures


def _figures(runs: Sequence[PageData]) -> Iterator[Figure]:
    """Numbers that at least one of the runs has."""
    losses = [_latest(run.run.get("loss", Series()).values) for run in runs]
    times = [_seconds(run, None) for run in runs]
    data_times = [_seconds(run, "data") for run in runs]
    statuses = [STATUSES.get((run.verdict or {}).get("status", "")) for run in runs]
    metrics = dict.fromkeys(name for run in runs for name in run.epochs)
    memory = [max(run.memory.used.values, default=None) if run.memory else None for run in runs]
    found = [
        Figure("loss", tuple(map(_mean, losses)), tuple(losses)),
        *(Figure(name, tuple(_last(run.epochs.get(name)) for run in runs)) for name in metrics),
        Figure("step_time", tuple(map(_median, times)), tuple(times)),
        Figure("data_time", tuple(map(_median, data_times)), tuple(data_times)),
        Figure("memory", tuple(memory)),
        Figure("status", tuple(statuses)),
    ]
    return (own for own in found if any(x is not None for x in own.values))


def _latest(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(values[-max(1, round(LATEST * len(values))) :]) if values else ()


def _seconds(run: PageData, phase: str | None) -> tuple[float, ...]:
    """Seconds of each step in a phase, by default in all."""
    if run.time is None:
        return ()
    by_step: dict[int, float] = {}
    for name, series in run.time.phases.items():
        if phase in (None, name):
            for step, x in series:
                by_step[step] = by_step.get(step, 0.0) + x
    values = list(by_step.values())
    return tuple(values[N_WARM:] if len(values) > 2 * N_WARM else values)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _last(series: Series | None) -> float | None:
    return series.values[-1] if series is not None and len(series) else None


def _resampled(values: Sequence[float], center: str, generator: "torch.Generator") -> "torch.Tensor":
    """The center of samples drawn in blocks, `(N_RESAMPLED,)`."""
    import torch

    x, n = torch.tensor(values, dtype=torch.float64, device="cpu"), len(values)
    length = max(1, round(math.sqrt(n)))
    starts = torch.randint(n - length + 1, (N_RESAMPLED, -(-n // length)), generator=generator, device="cpu")
    places = (starts[:, :, None] + torch.arange(length, device="cpu")).flatten(1)[:, :n]
    drawn = x[places]
    return drawn.mean(1) if center == "mean" else drawn.median(1).values


def _cells(figure: Figure) -> list[str]:
    """Texts of the numbers, and of the ratio of the last to the first."""
    ratio = "" if math.isnan(figure.ratio) or figure.name == "status" else f"×{figure.ratio:.3g}"
    return [*(_shown(figure.name, x) for x in figure.values), ratio]


def _shown(name: str, x: float | None) -> str:
    if x is None:
        return "–"
    if name == "status":
        return next(word for word, number in STATUSES.items() if number == x)
    if name == "memory":
        return f"{x / 1e6:.4g} MB"
    return f"{x * 1e3:.4g} ms" if name.endswith("_time") else f"{x:.4g}"


def _differences(runs: Sequence[PageData]) -> Iterator[Difference]:
    known = [
        {(section, key): value for section, rows in run.config.items() for key, value in rows} for run in runs
    ]
    for section, key in dict.fromkeys(place for own in known for place in own):
        values = [own.get((section, key), "") for own in known]
        if len(set(values)) > 1:
            yield Difference(section, key, values)
