"""Timing of contestants in turn, so that other load on the machine affects all alike."""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table

Run = Callable[[], object]  # trains for a turn, a fixed number of steps


@dataclass
class Group:
    """Contestants that are compared with the first one, all in turns of `steps` steps.

    A net that stays where it is in memory keeps its luck: the same loop beside itself may take 3 % more in
    all rounds. So with `makers` each turn makes its net anew, at other addresses, which is not timed.
    """

    runs: Mapping[str, Run]
    steps: int
    makers: Mapping[str, Callable[[], Run]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in self.runs}

    def extra(self, name: str) -> list[tuple[float, float]]:
        """Ratio to the first contestant's time and added seconds per step, for each round."""
        pairs = zip(self.seconds[name], next(iter(self.seconds.values())), strict=True)
        return [(seconds / base, (seconds - base) / self.steps) for seconds, base in pairs]


def compare(title: str, runs: Mapping[str, Run], steps: int, rounds: int) -> None:
    """Run each in turn, round after round in changing order, and print a table.

    A ratio is the median over rounds of a contestant's time divided by the first one's in the same round.
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
    """Compare several groups in the same rounds, each with its own baseline.

    Args:
        title: title of the table.
        groups: groups of contestants, with names that are unique across all of them.
        rounds: number of turns for each contestant.
        notes: note to print beside each contestant.
        layers: number of layers; adds a column of microseconds per layer above the baseline.
        caption: text below the table.
        clock: returns seconds; use `time.process_time` if others keep the processors busy, because it stops
            while this process waits for one. It does not include subprocesses of a contestant.
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
    for column in ("µs per step", ratio, "quartiles", *(["µs per layer"] if layers else [])):
        table.add_column(column, justify="right")
    if notes:
        table.add_column("what is recorded", overflow="fold")
    for group in groups:
        for name in group.runs:
            table.add_row(name, *figures(group, name, layers), *([notes.get(name, "")] if notes else []))
        table.add_section()
    wide_console().print(table)


def wide_console() -> Console:
    """A console wide enough for the tables; for a file, rich assumes 80 columns and truncates names."""
    console = Console()
    if not console.is_terminal:
        console.width = 150
    return console


KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_MAX_": "0"}


def keep_memory() -> None:
    """Starts this program again, so that glibc returns no memory to the system.

    By default it returns and gets pages in each step of a training, at 2 to 4 µs each: some hundred or some
    thousand of them, depending on what happens to be at the end of the heap. The same loop, again, then takes
    up to a tenth more or less.
    """
    if not KEEPING.items() <= os.environ.items():
        os.environ.update(KEEPING)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def take_turns(turns: list[tuple[Group, str]], rounds: int, clock: Callable[[], float]) -> None:
    for group, name in turns:
        group.runs[name]()  # warm up
    shuffled = random.Random(0)
    for _ in range(rounds):
        for group, name in shuffled.sample(turns, len(turns)):
            elsewhere = torch.empty(shuffled.randrange(1_000, 500_000))
            run = group.makers[name]() if group.makers else group.runs[name]
            began = clock()
            run()
            group.seconds[name].append(clock() - began)
            del elsewhere, run


def figures(group: Group, name: str, layers: int | None) -> list[str]:
    ratios, added = zip(*group.extra(name), strict=True)
    low, middle, high = statistics.quantiles(ratios, n=4)
    step = statistics.median(group.seconds[name]) / group.steps * 1e6
    cells = [f"{step:,.1f}", f"{middle:.3f}", f"{low:.3f}–{high:.3f}"]
    return cells + ([f"{statistics.median(added) * 1e6 / layers:,.1f}"] if layers else [])
