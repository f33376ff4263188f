"""Growth of what watching costs, with the layers of a net, the steps of a fit, and the parameters of a layer.

    python benchmarks/growth.py [layers steps parameters] [--rounds 3] [--write]

Processor time of one thread: what a callback adds to the same fit without it, the least over rounds in
changing order. The exponent (1 is linear) is fitted to the upper half of the sizes, as below them what is
fixed hides it, and to what is more than twice what a fit adds to itself. Python's garbage collector is off:
what it walks through is mostly torch, and when it runs depends on what ran before. `--write` draws
docs/growth-*.svg and puts the tables into docs/costs.md; it needs matplotlib.
"""

import argparse
import gc
import math
import random
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from costs import PAGE, hookcb, show, write
from torch import Tensor, nn
from workloads import Workload

from hookcb import ActivationStats, Callback, Diagnose, GradientHealth, module_summary

CALLBACKS: dict[str, Callable[[], list[Callback]]] = {
    "the same again (noise)": list,
    "ActivationStats()": lambda: [ActivationStats()],
    "ActivationStats(with_hist=True)": lambda: [ActivationStats(with_hist=True)],
    "GradientHealth()": lambda: [GradientHealth()],
    "Diagnose()": lambda: [Diagnose()],
    "default callbacks": list,
}
BASE, AGAIN, SUMMARY = "no callbacks", "the same again (noise)", "module_summary, on meta"
LAYERS = (10, 30, 100, 300, 1_000, 2_000)
STEPS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
WIDTHS = (100, 300, 1_000, 2_000, 3_000, 5_000)  # of a square layer
WIDTHS_ON_META = (100, 1_000, 3_000, 10_000)
HEAD = ["", "from", "µs", "to", "µs ", "exponent", "at most linear"]
NOISE = 0.15  # of an exponent: with two sizes, a tenth of an octave each
Curves = dict[str, dict[int, float]]  # seconds by size, by contestant


class Beside(nn.Module):
    """Layers beside each other, whose outputs are averaged: gradients neither vanish nor grow with them."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).mean(0)


def square(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 8))


def workload(title: str, model: Callable[[], nn.Module], steps: int) -> Workload:
    return Workload(title, model, lambda: (torch.randn(16, 8), torch.randint(8, (16,))), steps)


def timed(run: Callable[[], object]) -> float:
    gc.collect()
    began = time.process_time()
    run()
    return time.process_time() - began


def fit(who: str, work: Workload, *others: Callback) -> Callable[[], object]:
    """A fit by a new learner with the callbacks of a contestant."""
    cbs = [] if who == BASE else CALLBACKS[who]()
    return hookcb(work, [*cbs, *others], default=who == "default callbacks")


def added(least: Mapping[str, Mapping[int, float]]) -> Curves:
    """What each contestant adds to the time without callbacks."""
    base = least[BASE]
    curves = {who: {n: x - base[n] for n, x in by.items()} for who, by in least.items() if who != BASE}
    noise = curves.pop(AGAIN)
    return {who: {n: x for n, x in by.items() if x > 2 * abs(noise[n])} for who, by in curves.items()}


def by_size(sizes: tuple[int, ...], make: Callable[[int], Workload], rounds: int) -> Curves:
    """Seconds that each contestant adds to a step, by size."""
    least: Curves = {who: {} for who in (BASE, *CALLBACKS)}
    order = random.Random(0)
    for n in sizes:
        work = make(n)
        for _ in range(rounds + 1):  # the first one warms up
            for who in order.sample(list(least), len(least)):
                seconds = timed(fit(who, work)) / work.steps
                least[who][n] = min(seconds, least[who].get(n, math.inf))
    return added(least)


def grow_layers(rounds: int) -> Curves:
    curves = by_size(LAYERS, lambda n: workload("", partial(Beside, n), 20), rounds)
    with torch.device("meta"):
        curves[SUMMARY] = {
            n: min(timed(partial(module_summary, Beside(n), torch.ones(1, 8))) for _ in range(rounds))
            for n in LAYERS
        }
    return curves


class Clock(Callback):
    """Processor time after each of STEPS."""

    order = 2000

    def __init__(self) -> None:
        super().__init__(name="times_of_steps")
        self.at: dict[int, float] = {}

    def after_batch(self) -> None:
        if (n := self.train_iter + 1) in STEPS:
            self.at[n] = time.process_time()


def grow_steps(rounds: int) -> Curves:
    """Seconds that each contestant has added after each number of steps of one fit."""
    least: Curves = {who: {} for who in (BASE, *CALLBACKS)}
    order = random.Random(0)
    for _ in range(rounds):
        for who in order.sample(list(least), len(least)):
            clock = Clock()
            run = fit(who, workload("", partial(Beside, 3), STEPS[-1]), clock)
            began = time.process_time()
            run()
            for n, at in clock.at.items():
                least[who][n] = min(at - began, least[who].get(n, math.inf))
    return added(least)


def grow_parameters(rounds: int) -> Curves:
    by_width = by_size(WIDTHS, lambda n: workload("", partial(square, n), 20), rounds)
    curves = {who: {n * n: x for n, x in by.items()} for who, by in by_width.items()}
    with torch.device("meta"):
        curves[SUMMARY] = {
            n * n: min(timed(partial(module_summary, square(n), torch.ones(1, 8))) for _ in range(rounds))
            for n in WIDTHS_ON_META
        }
    return curves


@dataclass(frozen=True)
class Growth:
    """Something that grows.

    Attributes:
        title: what grows, and on which net.
        unit: what is counted below.
        time: what is measured.
        sizes: all sizes that are measured with callbacks.
        measure: seconds by contestant and size, from the number of rounds.
    """

    title: str
    unit: str
    time: str
    sizes: Collection[int]
    measure: Callable[[int], Curves]


GROWTHS = {
    "layers": Growth("layers, each a Linear(8, 8)", "layers", "added to a step", LAYERS, grow_layers),
    "steps": Growth("steps of one fit, 3 × Linear(8, 8)", "steps", "added in all", STEPS, grow_steps),
    "parameters": Growth(
        "parameters of a square layer",
        "parameters",
        "added to a step",
        [n * n for n in WIDTHS],
        grow_parameters,
    ),
}


def exponent(curve: Mapping[int, float], sizes: Collection[int]) -> float:
    """Slope of time over size, both in logarithms, in the upper half of the sizes; NaN without two times.

    >>> round(exponent({n: 3 * n**2 for n in (1, 10, 100, 1000)}, (1, 10, 100, 1000)), 3)
    2.0
    """
    upper = sorted(sizes)[len(sizes) // 2 :]
    points = [(math.log(n), math.log(curve[n])) for n in upper if n in curve]
    if len(points) < 2:
        return math.nan
    n, x = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - n) * (b - x) for a, b in points) / sum((a - n) ** 2 for a, _ in points)


def rows_of(curves: Curves, sizes: Collection[int]) -> list[list[str]]:
    rows = []
    for who, curve in curves.items():
        slope = exponent(curve, sizes if who != SUMMARY else curve)
        ends = [min(curve), max(curve)] if curve else []
        times = [cell for n in ends for cell in (f"{n:,}", f"{curve[n] * 1e6:,.0f}")] or [""] * 4
        fit = (
            ["lost in noise", ""]
            if math.isnan(slope)
            else [f"{slope:.2f}", "no" if slope > 1 + NOISE else "yes"]
        )
        rows.append([who, *times, *fit])
    return rows


def draw(name: str, growth: Growth, curves: Curves) -> None:
    """Draws docs/growth-<name>.svg: both axes logarithmic, with a line that is linear."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
    }  # small, and alike from alike figures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    for who, curve in curves.items():
        points = [(n, x * 1e3) for n, x in curve.items()]
        if not points:
            continue
        axes.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=who)
    sizes = sorted({n for curve in curves.values() for n in curve})
    top = max(x / n for curve in curves.values() for n, x in list(curve.items())[-1:]) * 1e3
    ends = sizes[0], sizes[-1]
    axes.loglog(ends, [n * top for n in ends], color="gray", linestyle=":", label="linear")
    axes.set(xlabel=growth.unit, ylabel=f"ms {growth.time}")
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(PAGE.with_name(f"growth-{name}.svg"), metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=list(GROWTHS), default=list(GROWTHS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="draw the pictures, write into docs/costs.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    warnings.simplefilter("ignore")  # verdicts of Diagnose
    for name in args.what:
        growth = GROWTHS[name]
        curves = growth.measure(args.rounds)
        table = f"{growth.title}; time {growth.time}", rows_of(curves, growth.sizes), ""
        show(HEAD, table)
        if args.write:
            draw(name, growth, curves)
            title, rows, _ = table
            write(f"growth-{name}", HEAD, (title, rows, f"![{growth.title}](growth-{name}.svg)"))


if __name__ == "__main__":
    main()
