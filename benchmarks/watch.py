"""Cost of watching a loop: `watch` on a plain loop, the same callbacks in a `Learner`, and neither.

`python benchmarks/watch.py [rounds]`
"""

import sys
from collections.abc import Callable

import torch
from timing import Group, compare_groups
from workloads import WORKLOADS, Workload, loss_func

from hookcb import ActivationStats, Callback, GradientHealth, Learner, watch


def watched(workload: Workload, make: Callable[[], list[Callback]]) -> Callable[[], None]:
    """Train for a turn with a watched plain loop."""
    model, turn = workload.train()

    def watched_turn() -> None:
        with watch(model, None, *make()):
            turn()

    return watched_turn


def learned(workload: Workload, make: Callable[[], list[Callback]]) -> Callable[[], None]:
    """Train for a turn with a Learner."""
    torch.manual_seed(0)
    learn = Learner(
        [workload.batch()] * workload.steps, workload.model(), loss_func, torch.optim.SGD, lr=1e-3
    )

    def turn() -> None:
        with learn.no_logging():
            learn.fit(1, cbs=make())

    return turn


def both() -> list[Callback]:
    return [ActivationStats(), GradientHealth()]


def both_at_times() -> list[Callback]:
    return [ActivationStats(every=10), GradientHealth(every=10)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    for key in ("mlp", "transformer"):
        workload = WORKLOADS[key]
        if key == "transformer":
            workload = Workload(workload.title, workload.model, workload.batch, 5)
        runs = {
            "plain loop": workload.train()[1],
            "plain loop again": workload.train()[1],
            "watch, no callbacks": watched(workload, list),
            "watch, ActivationStats and GradientHealth": watched(workload, both),
            "watch, both with every=10": watched(workload, both_at_times),
            "Learner, no callbacks": learned(workload, list),
            "Learner, ActivationStats and GradientHealth": learned(workload, both),
            "Learner, both with every=10": learned(workload, both_at_times),
        }
        compare_groups(workload.title, [Group(runs, workload.steps)], n_rounds)
