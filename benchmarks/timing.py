"""Timing of contestants in turn, so that what else the machine does falls on all alike."""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

Run = Callable[[], object]  # trains for so many steps


@dataclass
class Group:
    """Contestants that are measured by the first one of them, all in turns of as many steps."""

    runs: Mapping[str, Run]
    steps: int

    def __post_init__(self) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in self.runs}

    def extra(self, name: str) -> list[tuple[float, float]]:
        """By round, the ratio to the first one's time, and what is added to it, in seconds a step."""
        pairs = zip(self.seconds[name], next(iter(self.seconds.values())), strict=True)
        return [(own / base, (own - base) / self.steps) for own, base in pairs]


def compare(title: str, runs: Mapping[str, Run], steps: int, rounds: int) -> None:
    """Runs each in turn, round after round in changing order, and prints a table.

    A ratio is the median over rounds of a contestant's time by that of the first one, in the same round.
    """
    compare_groups(f"{title}: {steps} steps", [Group(runs, steps)], rounds)


def compare_groups(
    title: str,
    groups: Iterable[Group],
    rounds: int,
    *,
    notes: Mapping[str, str] | None = None,
    layers: int | None = None,
    caption: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """The same of several groups, each with a baseline of its own, in the same rounds.

    Args:
        title: of the table.
        groups: of contestants; names differ across all of them.
        rounds: how often each has its turn.
        notes: by contestant, what to say beside it.
        layers: tells the microseconds added to the baseline by so many layers, each.
        caption: below the table.
        clock: seconds; `time.process_time` where others keep the processors busy, for it stands still while
            this process waits for one. It misses what a process of a contestant's own does.
    """
    groups = list(groups)
    take_turns([(group, name) for group in groups for name in group.runs], rounds, clock)
    table = Table(
        title=f"{title}, median of {rounds} rounds, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread{', processor time' * (clock is time.process_time)}",
        caption=caption,
    )
    baselines = [next(iter(group.runs)) for group in groups]
    ratio = f"ratio to {baselines[0]}" if len(groups) == 1 else "ratio to first of group"
    table.add_column("", no_wrap=True)
    for column in ("µs a step", ratio, "quartiles", *(["µs a layer"] if layers else [])):
        table.add_column(column, justify="right")
    if notes:
        table.add_column("what is looked at", overflow="fold")
    for group in groups:
        for name in group.runs:
            table.add_row(name, *figures(group, name, layers), *([notes.get(name, "")] if notes else []))
        table.add_section()
    wide_console().print(table)


def wide_console() -> Console:
    """For tables of width: a file has none of its own, and rich takes it for 80 and cuts names."""
    console = Console()
    if not console.is_terminal:
        console.width = 150
    return console


def take_turns(turns: list[tuple[Group, str]], rounds: int, clock: Callable[[], float]) -> None:
    for group, name in turns:
        group.runs[name]()  # warm up
    shuffled = random.Random(0)
    for _ in range(rounds):
        for group, name in shuffled.sample(turns, len(turns)):
            began = clock()
            group.runs[name]()
            group.seconds[name].append(clock() - began)


def figures(group: Group, name: str, layers: int | None) -> list[str]:
    ratios, added = zip(*group.extra(name), strict=True)
    low, middle, high = statistics.quantiles(ratios, n=4)
    step = statistics.median(group.seconds[name]) / group.steps * 1e6
    cells = [f"{step:,.1f}", f"{middle:.3f}", f"{low:.3f}–{high:.3f}"]
    return cells + ([f"{statistics.median(added) * 1e6 / layers:,.1f}"] if layers else [])
