"""Cost of the fused statistics of a tensor on a GPU, relative to plain operations.

    python benchmarks/fused.py [--rounds 30] [--eps 0.05]

Both take a turn in each round, timed by CUDA events on an otherwise idle GPU: a small tensor shows the time
Python needs to launch kernels, a large one the time to read the memory. The size above which the ratio is
below 1 belongs in `hookcb.activations.fused.THRESHOLD`. GB/s count the tensor as read once.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hookcb.activations.fused import fused_layer_stats
from hookcb.activations.stats import layer_stats

SIZES = [2**power for power in range(10, 27, 2)]
CALLS = 10  # in a row between two events, like one layer after another
Run = Callable[[Tensor, float], Tensor]
RUNS: Mapping[str, Run] = {"plain": layer_stats, "fused": fused_layer_stats}


def microseconds(run: Run, x: Tensor, eps: float) -> float:
    """Time of one call in microseconds, including the launch."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began.record()
    for _ in range(CALLS):
        run(x, eps)
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) * 1e3 / CALLS


def measure(x: Tensor, eps: float, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each contestant for each round, in changing order."""
    for run in RUNS.values():
        for _ in range(3):
            run(x, eps)  # compiles, and fills the allocator
    times: dict[str, list[float]] = {name: [] for name in RUNS}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample(list(RUNS), len(RUNS)):
            times[name].append(microseconds(RUNS[name], x, eps))
    return times


def sizes(eps: float, rounds: int) -> Iterator[dict[str, Any]]:
    """The figures of each dtype and size, smaller ones first."""
    for dtype in (torch.float32, torch.bfloat16):
        for n in SIZES:
            x = torch.randn(n, device="cuda").to(dtype)
            # layer_stats itself calls can_fuse
            with patch("hookcb.activations.stats.can_fuse", return_value=False):
                times = measure(x, eps, rounds)
            yield {"dtype": str(dtype).removeprefix("torch."), "n": n, "bytes": x.nbytes} | figures(times)


def figures(times: Mapping[str, list[float]]) -> dict[str, Any]:
    ratios = [fused / plain for fused, plain in zip(times["fused"], times["plain"], strict=True)]
    return {
        "us": {name: statistics.median(values) for name, values in times.items()},
        "quartiles": statistics.quantiles(ratios, n=4),
    }


def threshold(rows: Iterable[Mapping[str, Any]]) -> int | None:
    """The smallest size from which on the fused kernel is faster, for every dtype; None if it never is."""
    slower: dict[int, bool] = {}
    for row in rows:
        slower[row["n"]] = slower.get(row["n"], False) or row["quartiles"][1] >= 1
    chosen = None
    for n in sorted(slower, reverse=True):
        if slower[n]:
            break
        chosen = n
    return chosen


def table_of(rows: Iterable[Mapping[str, Any]], title: str) -> Table:
    table = Table(title=title)
    columns = "dtype", "elements", *(f"{name} µs" for name in RUNS), "ratio", "quartiles"
    for column in (*columns, *(f"{name} GB/s" for name in RUNS)):
        table.add_column(column, justify="right")
    for row in rows:
        low, middle, high = row["quartiles"]
        table.add_row(
            row["dtype"],
            f"{row['n']:,}",
            *(f"{us:,.1f}" for us in row["us"].values()),
            f"{middle:.3f}",
            f"{low:.3f}–{high:.3f}",
            *(f"{row['bytes'] / 1e9 / (us * 1e-6):,.1f}" for us in row["us"].values()),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="compare fused with plain statistics on a GPU")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--eps", type=float, default=0.05)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU (torch.cuda.is_available() is False): nothing to compare")
        return
    rows = list(sizes(options.eps, options.rounds))
    title = f"{torch.cuda.get_device_name()}: median of {options.rounds} rounds of {CALLS} calls, "
    Console().print(table_of(rows, title + f"torch {torch.__version__}"))
    print(f"faster at every size from: {threshold(rows)} elements")


if __name__ == "__main__":
    main()
