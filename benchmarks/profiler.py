"""What the profiler, the timer of steps and the count of memory cost, and whether their figures add up.

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
    """Trains for a turn with a callback, none by default; what a fit does once falls on all alike."""
    learn = learner(workload, workload.steps, loss)

    def turn() -> None:
        with learn.no_logging():
            learn.fit(1, cbs=() if make is None else make())

    return turn


def cost_outside(rounds: int) -> None:
    contestants = {
        "nothing": None,
        "nothing again": None,
        "ProfilerCallback, its window not there yet": partial(ProfilerCallback, wait=NEVER),
        "StepTimer": StepTimer,
        "MemoryStats, but for the first batch": partial(MemoryStats, every=NEVER),
    }
    for workload, loss in ((SMALLEST, F.mse_loss), *((WORKLOADS[key], loss_func) for key in TIMED)):
        steps = max(workload.steps, 3)
        turns = Workload(workload.title, workload.model, workload.batch, steps)
        runs = {name: outside(turns, make, loss) for name, make in contestants.items()}
        compare_groups(f"{workload.title}: outside the window", [Group(runs, steps)], rounds)


class Between(Callback):
    """Seconds a step, from the first batch after `skip` on."""

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
    """Seconds a step in the window, without what happens when it ends."""
    learn, between = learner(workload, STEPS + 2), Between(skip=2)
    cbs: list[Callback] = [between]
    if options:
        cbs.append(ProfilerCallback(wait=1, warmup=1, active=STEPS, **options))
    with learn.no_logging():
        learn.fit(1, cbs=cbs)
    return between.seconds


def by_hand(workload: Workload) -> float:
    """The same under torch's profiler alone."""
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
        found: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, run in contestants.items():
                found[name].append(run(workload))
        for name, seconds in found.items():
            of_nothing = [own / base for own, base in zip(seconds, found["nothing"], strict=True)]
            ratios[name].append(f"{median(of_nothing):.3f}")
    for name, cells in ratios.items():
        table.add_row(name, *cells)
    wide_console().print(table)


def do_layers_add_up() -> None:
    """Times of layers, without those inside them, against the forward they are part of."""
    table = Table(title="share of a phase that its layers' own times add up to")
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
    """What MemoryStats counts as kept for the backward, against what torch keeps by its formulas."""
    n, f, i = 64, 4, 8  # samples; bytes of a float32 and an int64
    loss = n * 10 * f + f  # log-probabilities, and the sum of weights
    conv = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * 16 * 16, 10),
    )  # fmt: skip
    image, pooled = n * 16 * 32 * 32, n * 16 * 16 * 16
    expected = {
        # each ReLU's output, which the next Linear has as its input; the batch was there before
        "mlp": (WORKLOADS["mlp"].model(), WORKLOADS["mlp"].batch(), 2 * n * 512 * f + loss),
        # input and statistics of BatchNorm; ReLU's output, that of MaxPool its input; indices; Linear's input
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
