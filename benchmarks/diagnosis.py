"""What Diagnose costs: ratios to the same training without, averaged over 500 steps.

    python benchmarks/diagnosis.py [--only tiny mlp resnet transformer] [--steps 500] [--rounds 9] [--busy]

A turn is a whole fit, setting up, looking at the end and the verdict included. The budget counts in time, so
a fit of fewer steps costs more: its first 20 batches are looked at whatever the budget says.
"""

import argparse
import time
import warnings
from dataclasses import replace

import torch
from activations import ALL, hookcb
from timing import Group, compare_groups

from hookcb import ActivationStats, Callback, Diagnose, GradientHealth


def contestants() -> dict[str, list[type[Callback] | Callback]]:
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
    parser.add_argument("--steps", type=int, default=500, help="of a fit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy", action="store_true", help="processor time, for a machine that others use")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in args.only:
        workload = replace(ALL[name], steps=args.steps)
        runs = {who: hookcb(workload, cbs) for who, cbs in contestants().items()}
        clock = time.process_time if args.busy else time.perf_counter
        title = f"{workload.title}: {args.steps} steps"
        compare_groups(title, [Group(runs, args.steps)], args.rounds, clock=clock)


if __name__ == "__main__":
    main()
