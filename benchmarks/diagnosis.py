"""Cost of Diagnose: time relative to the same training without it, averaged over 500 steps.

    python benchmarks/diagnosis.py [--only tiny mlp resnet transformer] [--steps 500] [--rounds 9] [--busy]

A turn is a whole fit, including setup, the look at the end, and the verdict. Diagnose examines a larger part
of a shorter fit, which therefore costs more.
"""

import argparse
import time
import warnings
from dataclasses import replace

import torch
from activations import ALL
from loop import Batches
from timing import Group, Run, compare_groups
from workloads import Workload, loss_func

from hookcb import ActivationStats, Callback, Diagnose, GradientHealth, Learner


def training(workload: Workload, cbs: list[Callback]) -> Run:
    """A fit that learns; Diagnose would examine the end of one that does not more closely."""
    torch.manual_seed(0)
    data = Batches([workload.batch()] * workload.steps)
    learn = Learner(data, workload.model(), loss_func, torch.optim.SGD, lr=0.05)
    learn.remove_cbs(learn.cbs)
    learn.add_cbs(cbs)
    return lambda: learn.fit(1)


def contestants() -> dict[str, list[Callback]]:
    return {
        "hookcb without callbacks": [],
        "hookcb without callbacks again (noise)": [],
        "Diagnose()": [Diagnose(show=False)],
        "ActivationStats and GradientHealth, every step": [
            ActivationStats(include_paramless=True),
            GradientHealth(),
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(ALL), help="workloads")
    parser.add_argument("--steps", type=int, default=500, help="steps per fit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy", action="store_true", help="measure processor time, for a busy machine")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in args.only:
        workload = replace(ALL[name], steps=args.steps)
        runs = {who: training(workload, cbs) for who, cbs in contestants().items()}
        clock = time.process_time if args.busy else time.perf_counter
        title = f"{workload.title}: {args.steps} steps"
        compare_groups(title, [Group(runs, args.steps)], args.rounds, clock=clock)


if __name__ == "__main__":
    main()
