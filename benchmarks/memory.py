"""Memory of a training with callbacks, in a separate process for each row; Linux only.

    python benchmarks/memory.py [--write]

Resident memory over 10,000 steps of a tiny net, Python objects among it (tracemalloc); the peak of the
process on the transformer of costs.py; and the outputs of its layers that are still in memory when the next
batch begins. `--write` puts the tables into docs/costs.md.
"""

import argparse
import gc
import os
import re
import tracemalloc
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from costs import hookcb, show, write
from floors import FLOORS
from peers import plain
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from workloads import KEPT, TINY, Workload

from hookcb import ActivationStats, Callback, Diagnose, GradientHealth

MARKS = (1_000, 5_000, 10_000)  # steps
CONTESTANTS: dict[str, Callable[[], list[Callback]]] = {
    "hookcb without callbacks": list,
    "ActivationStats()": lambda: [ActivationStats()],
    "ActivationStats(with_hist=True)": lambda: [ActivationStats(with_hist=True)],
    "GradientHealth()": lambda: [GradientHealth()],
    "Diagnose()": lambda: [Diagnose()],
}
PLAIN = next(iter(CONTESTANTS))
STEPS = 40  # of the transformer
PEAK = 1.02  # target
# glibc takes large blocks from the system and gives them back, so that no holes between them count
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}


def memory_of(who: str, traced: bool) -> dict[str, float]:
    """Train in this process; MB of Python objects or the process, after each of MARKS and at the peak."""
    quiet()
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


def peak_of(who: str) -> dict[str, float]:
    """Train the transformer in this process; MB at the peak, and of machine code at the end."""
    quiet()
    work = replace(KEPT["transformer"], steps=STEPS)
    if who in FLOORS:
        plain(work, FLOORS[who], Path(), ExitStack())()
    else:
        hookcb(work, CONTESTANTS[who]())()
    return {"peak": resident("VmHWM"), "code": resident("RssFile")}


def kept_by(who: str) -> int:
    """Train the transformer in this process; number of outputs in memory when the next batch begins."""
    quiet()
    outputs: list[StorageWeakRef] = []
    counts: list[int] = []

    def note(module: nn.Module, args: object, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append(StorageWeakRef(output.untyped_storage()))

    def model() -> nn.Module:
        made = KEPT["transformer"].model()
        for module in made.modules():
            if not list(module.children()):
                module.register_forward_hook(note)
        return made

    def count(cb: Callback) -> None:
        counts.append(sum(not output.expired() for output in outputs))
        outputs.clear()

    work: Workload = replace(KEPT["transformer"], steps=STEPS, model=model)
    hookcb(work, [*CONTESTANTS[who](), Callback(before_batch=count, name="count")])()
    return max(counts[1:])


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # verdicts of Diagnose


def alone(function: Callable[..., Any], *args: Any, environ: Mapping[str, str] | None = None) -> Any:
    """Result of a function in a new process, with these variables in its environment."""
    with patch.dict(os.environ, environ or {}), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def resident(field: str) -> float:
    """A field of this process in MB, as VmRSS or VmHWM, the peak. `ru_maxrss` would start at the parent's."""
    match = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(match[1]) * 1024 / 1e6


def over_steps() -> tuple[str, list[list[str]], str]:
    """Table of the memory over MARKS."""
    rows = []
    for traced, kind in (True, "Python objects"), (False, "resident"):
        for who in CONTESTANTS:
            measured = alone(memory_of, who, traced)
            rows.append([f"{kind}, {who}", *(f"{mb:,.2f}" for mb in measured.values())])
    return f"{TINY.title}: MB after each number of steps", rows, ""


def on_transformer() -> tuple[str, list[list[str]], str]:
    """Table of peaks, of how much of them is machine code that was read, and of outputs that are kept."""
    peaks = {who: least_of(3, who)["peak"] for who in (*CONTESTANTS, *FLOORS)}
    again = least_of(3, PLAIN)["peak"] / peaks[PLAIN]
    without = least_of(2, PLAIN, MAPPED)
    rows = []
    for who, peak in peaks.items():
        ratio = peak / peaks[PLAIN]
        is_ours = who in CONTESTANTS and who != PLAIN
        verdict = [f"{PEAK:g}", "yes" if ratio <= PEAK else "no"] if is_ours else ["", ""]
        mapped = without if who == PLAIN else least_of(2, who, MAPPED)
        of_mapped = f"{mapped['peak']:,.1f}", f"{mapped['peak'] / without['peak']:.3f}"
        code = f"{mapped['code'] - without['code']:.1f}"
        kept = str(alone(kept_by, who)) if who in CONTESTANTS else ""
        rows.append([who, f"{peak:,.1f}", f"{ratio:.3f}", *verdict, *of_mapped, code, kept])
    caption = (
        f"Peak of the process; without callbacks and without again: {again:.3f}. `mapped` is the peak when "
        "glibc maps blocks of 64 kB or more; `code` is what more of torch's machine code was read then."
    )
    return f"{KEPT['transformer'].title}, {STEPS} steps", rows, caption


def least_of(n: int, who: str, environ: Mapping[str, str] | None = None) -> dict[str, float]:
    """Results of `peak_of`, each the least of n processes."""
    found = [alone(peak_of, who, environ=environ) for _ in range(n)]
    return {part: min(x[part] for x in found) for part in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables into docs/costs.md")
    write_too = parser.parse_args().write
    heads = {
        "memory": [
            "",
            "peak, MB",
            "ratio",
            "target",
            "met",
            "mapped, MB",
            "ratio",
            "code, MB",
            "outputs kept",
        ],
        "memory-steps": ["", *(f"{mark:,}" for mark in MARKS), "peak"],
    }
    for (key, head), measure in zip(heads.items(), (on_transformer, over_steps), strict=True):
        table = measure()
        show(head, table)
        if write_too:
            write(key, head, table)


if __name__ == "__main__":
    main()
