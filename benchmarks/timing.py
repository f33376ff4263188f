"""Timing of contestants in turn, so that what else the machine does falls on all alike."""

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from rich.console import Console
from rich.table import Table

Run = Callable[[], object]  # trains for so many steps


def compare(title: str, runs: Mapping[str, Run], steps: int, rounds: int) -> None:
    """Runs each in turn, round after round in changing order, and prints a table.

    A ratio is the median over rounds of a contestant's time by that of the first one, in the same round.
    """
    baseline = next(iter(runs))
    for run in runs.values():
        run()  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample(list(runs), len(runs)):
            began = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - began)
    table = Table(
        title=f"{title}: {steps} steps, median of {rounds} rounds, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread"
    )
    for column in ("", "µs a step", f"ratio to {baseline}", "quartiles"):
        table.add_column(column, justify="right" if column else "left")
    for name, times in seconds.items():
        ratios = [own / base for own, base in zip(times, seconds[baseline], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        step = statistics.median(times) / steps * 1e6
        table.add_row(name, f"{step:,.1f}", f"{middle:.3f}", f"{low:.3f}–{high:.3f}")
    Console().print(table)
