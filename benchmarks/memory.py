"""Memory of a training of 10,000 steps with statistics, in a separate process for each figure; Linux only.

python benchmarks/memory.py
"""

import gc
import re
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from costs import hookcb
from rich.table import Table
from timing import wide_console
from workloads import TINY

from hookcb import ActivationStats, Callback

MARKS = (1_000, 5_000, 10_000)  # steps
CONTESTANTS: dict[str, Callable[[], list[Callback]]] = {
    "hookcb without callbacks": list,
    "ActivationStats()": lambda: [ActivationStats()],
    "ActivationStats(with_hist=True)": lambda: [ActivationStats(with_hist=True)],
}


def memory_of(who: str, traced: bool) -> dict[str, float]:
    """Train in this process; MB of Python objects or the process, after each of MARKS and at the peak."""
    torch.set_num_threads(1)
    measured: dict[str, float] = {}

    def look(cb: Callback) -> None:
        if cb.train_iter + 1 in MARKS:
            gc.collect()
            now = tracemalloc.get_traced_memory()[0] / 1e6 if traced else resident("VmRSS")
            measured[f"{cb.train_iter + 1:,}"] = now

    cbs = CONTESTANTS[who]
    hookcb(replace(TINY, steps=1), cbs())()  # torch imports modules at the first step
    run = hookcb(replace(TINY, steps=MARKS[-1]), [*cbs(), Callback(after_batch=look, name="look")])
    if traced:
        tracemalloc.start()
    run()
    measured["peak"] = tracemalloc.get_traced_memory()[1] / 1e6 if traced else resident("VmHWM")
    return measured


def resident(field: str) -> float:
    """VmRSS or VmHWM (the peak) of this process, in MB. `ru_maxrss` would start at the parent's value."""
    match = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(match[1]) * 1024 / 1e6


def show_memory() -> None:
    table = Table(title=f"{TINY.title}: MB after each number of steps, each row in a separate process")
    for column in ("", *(f"{mark:,}" for mark in MARKS), "peak"):
        table.add_column(column, justify="right" if column else "left")
    for traced, kind in (True, "Python objects (tracemalloc)"), (False, "resident"):
        measured = {}
        for who in CONTESTANTS:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                measured[who] = pool.submit(memory_of, who, traced).result()
            table.add_row(f"{kind}, {who}", *(f"{mb:,.2f}" for mb in measured[who].values()))
        table.add_section()
    plain, *others = (measured[who]["peak"] for who in CONTESTANTS)
    ratios = " and ".join(f"{peak / plain:.3f}" for peak in others)
    table.caption = f"peak resident memory relative to a fit without callbacks: {ratios}"
    wide_console().print(table)


if __name__ == "__main__":
    show_memory()
