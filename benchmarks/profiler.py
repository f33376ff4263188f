"""Cost of ProfilerCallback, StepTimer, and MemoryStats, and whether their figures add up.

`python benchmarks/profiler.py [rounds]`
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from rich.table import Table
from timing import Group, compare_groups, wide_console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS, Workload, loss_func

from hookcb import Callback, Learner, MemoryStats, ProfilerCallback, StepTimer

NEVER = 10**9
STEPS = 20  # in the window
TIMED = ("mlp", "transformer")  # a step of the ResNet takes seconds on a small machine
SMALLEST = Workload(
    "Linear 10-10-1, batch 32",
    lambda: nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 1)),
    lambda: (torch.randn(32, 10), torch.randn(32, 1)),
    300,
)


def learner(workload: Workload, n: int, loss: Callable[..., Tensor] = loss_func) -> Learner:
    torch.manual_seed(0)
    return Learner([workload.batch()] * n, workload.model(), loss, torch.optim.SGD, lr=1e-3)


def outside(workload: Workload, make: Callable[[], Callback] | None, loss: Callable[..., Tensor]) -> Callable:
    """Train for a turn with a callback, or without; the fixed cost of a fit is the same for all."""
    learn = learner(workload, workload.steps, loss)

    def turn() -> None:
        with learn.no_logging():
            learn.fit(1, cbs=() if make is None else make())

    return turn


def cost_outside(rounds: int) -> None:
    contestants = {
        "nothing": None,
        "nothing again": None,
        "ProfilerCallback, before its window": partial(ProfilerCallback, wait=NEVER),
        "StepTimer": StepTimer,
        "MemoryStats, first batch only": partial(MemoryStats, every=NEVER),
    }
    for workload, loss in ((SMALLEST, F.mse_loss), *((WORKLOADS[key], loss_func) for key in TIMED)):
        steps = max(workload.steps, 3)
        turns = Workload(workload.title, workload.model, workload.batch, steps)
        runs = {name: outside(turns, make, loss) for name, make in contestants.items()}
        compare_groups(f"{workload.title}: outside the window", [Group(runs, steps)], rounds)


class Between(Callback):
    """Seconds per step, from batch `skip` on."""

    def __init__(self, skip: int) -> None:
        super().__init__()
        self.skip = skip

    def before_batch(self) -> None:
        if self.train_iter == self.skip:
            self.began = time.perf_counter()

    def after_batch(self) -> None:
        self.seconds = (time.perf_counter() - self.began) / (self.train_iter + 1 - self.skip) if (
            self.train_iter >= self.skip) else 0.0  # fmt: skip


def inside(workload: Workload, **options: object) -> float:
    """Seconds per step in the window, without the work at its end."""
    learn, between = learner(workload, STEPS + 2), Between(skip=2)
    cbs: list[Callback] = [between]
    if options:
        cbs.append(ProfilerCallback(wait=1, warmup=1, active=STEPS, **options))
    with learn.no_logging():
        learn.fit(1, cbs=cbs)
    return between.seconds


def by_hand(workload: Workload) -> float:
    """Seconds per step under torch's profiler alone."""
    learn, between = learner(workload, STEPS + 2), Between(skip=2)
    with learn.no_logging(), profile(activities=[ProfilerActivity.CPU]):
        learn.fit(1, cbs=between)
    return between.seconds


def cost_inside(rounds: int) -> None:
    contestants = {
        "nothing": inside,
        "nothing again": inside,
        "torch.profiler alone": by_hand,
        "ProfilerCallback(modules=())": partial(inside, modules=()),
        "ProfilerCallback, a range for each layer": partial(inside, modules=None),
    }
    table = Table(title=f"inside the window of {STEPS} steps: ratio to nothing, median of {rounds} rounds")
    table.add_column("")
    for key in TIMED:
        table.add_column(key, justify="right")
    ratios: dict[str, list[str]] = {name: [] for name in contestants}
    for workload in (WORKLOADS[key] for key in TIMED):
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, run in contestants.items():
                times[name].append(run(workload))
        for name, seconds in times.items():
            to_nothing = [value / base for value, base in zip(seconds, times["nothing"], strict=True)]
            ratios[name].append(f"{median(to_nothing):.3f}")
    for name, cells in ratios.items():
        table.add_row(name, *cells)
    wide_console().print(table)


def do_layers_add_up() -> None:
    """Compare the sum of the layers' self times with the phase that they are part of."""
    table = Table(title="sum of the layers' self times, as a share of the phase")
    for column in ("", "forward", "backward"):
        table.add_column(column, justify="right")
    for key in ("resnet", "transformer"):
        learn = learner(WORKLOADS[key], 5)
        with learn.no_logging():
            learn.fit(1, cbs=ProfilerCallback())
        layers, phases = learn.profiler.layers(), learn.profiler.phases()
        forward = sum(row.forward_self for row in layers) / phases["forward"].seconds
        backward = sum(row.backward_self or 0.0 for row in layers) / phases["backward"].seconds
        table.add_row(key, f"{forward:.1%}", f"{backward:.1%}")
    wide_console().print(table)


def is_memory_counted() -> None:
    """Compare the bytes that MemoryStats counts as kept for the backward with those torch's formulas need."""
    n, f, i = 64, 4, 8  # samples; bytes of a float32 and an int64
    loss = n * 10 * f + f  # log-probabilities, and the sum of weights
    conv = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * 16 * 16, 10),
    )  # fmt: skip
    image, pooled = n * 16 * 32 * 32, n * 16 * 16 * 16
    expected = {
        # each ReLU's output is the next Linear's input; the batch existed before
        "mlp": (WORKLOADS["mlp"].model(), WORKLOADS["mlp"].batch(), 2 * n * 512 * f + loss),
        # BatchNorm's input and statistics; ReLU's output, which is MaxPool's input; indices; Linear's input
        "conv net": (
            conv,
            (torch.randn(n, 3, 32, 32), torch.randint(10, (n,))),
            image * f + 2 * 16 * f + image * f + pooled * i + pooled * f + loss,
        ),
    }
    table = Table(title="bytes kept for the backward")
    for column in ("", "by formula", "MemoryStats"):
        table.add_column(column, justify="right")
    for name, (model, batch, n_bytes) in expected.items():
        learn = Learner([batch], model, loss_func, torch.optim.SGD, lr=1e-3)
        with learn.no_logging():
            learn.fit(1, cbs=MemoryStats())
        table.add_row(name, f"{n_bytes:,}", f"{learn.memory_stats.totals.kept:,}")
    wide_console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    is_memory_counted()
    do_layers_add_up()
    cost_inside(max(3, n_rounds // 2))
    cost_outside(n_rounds)
