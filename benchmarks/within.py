"""Cost of one batch: callbacks and hooks take turns with their absence within one fit.

    python benchmarks/within.py [--only mlp residual transformer tiny] [--fits 7] [--write]

They act in seven batches and not in the next seven, to the end; the first of a turn does not count. So both
have the same net at the same addresses, and the machine of the same moment: a callback that does not act
differs by 0.2 %, where two fits differ by 3 %. A figure is a mean over all batches, also of work that is done
for many of them together, and then the median of several fits. What a fit costs at its begin and end is not
in it; `benchmarks/costs.py` has whole fits.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import peers
import torch
from costs import HEAD, NETS, OURS, Rows, caption_of, hookcb, row_of, show, targets, write
from floors import OfBatch, of_gradients, of_outputs
from peers import Install, by_hooks
from timing import keep_memory
from torch.optim.optimizer import _global_optimizer_pre_hooks
from workloads import KEPT, Workload, learnable

from hookcb import ActivationStats, Callback, Diagnose, GradientHealth
from hookcb.core.torch_private import forward_hooks
from hookcb.diagnosis.schedule import N_FREE, Schedule

TURN = 7  # batches; no multiple of 10, so that `every=10` does not always fall on the same one of a turn
FIRST = 21  # batch of the first turn
STEPS = {"mlp": 800, "residual": 160, "transformer": 70, "tiny": 2_000}
FIRST_IDLE = 98  # batch of the first turn of a `Diagnose`, which looks at each step before it


class Turns(Callback):
    """Has callbacks act in every second turn of batches; they act in none before the first turn.

    Args:
        *cbs: the callbacks, with those that they attach.
        first: batch at which the first turn begins.

    Attributes:
        seconds: processor time of each batch, by whether they act in it.
    """

    order = 2000

    def __init__(self, *cbs: Callback, first: int) -> None:
        super().__init__(name="turns")
        self._cbs, self._first = cbs, first
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._acts, self._began = True, 0.0

    def before_batch(self) -> None:
        now, i = time.process_time(), self.train_iter - self._first
        if i > 0 and (i - 1) % TURN:  # the batch before was not the first of its turn
            self.seconds[self._acts].append(now - self._began)
        self._began = time.process_time()

    def after_batch(self) -> None:
        i = self.train_iter + 1 - self._first
        if i >= 0 and i % TURN == 0:
            self._switch(acts=i // TURN % 2 == 1)

    def _switch(self, acts: bool) -> None:
        loop = self.learn
        for cb in [*self._cbs, *(x for cb in self._cbs for x in getattr(cb, "_led", ()))]:
            cb.run = acts
        hooks = [_global_optimizer_pre_hooks, *(x for m in loop.model.modules() for x in forward_hooks(m))]
        if acts:
            followers, kept = self._kept
            for follower in followers:
                loop.follow_phases(follower)
            for of_one, before in zip(hooks, kept, strict=True):
                of_one.update(before)
        else:
            self._kept = loop._followers, [dict(of_one) for of_one in hooks]
            for follower in loop._followers:
                loop.leave_phases(follower)
            for of_one in hooks:
                of_one.clear()
        self._acts = acts


class Hooked(Callback):
    """Acts by hooks of torch, and once the gradients are there."""

    def __init__(self, install: Install) -> None:
        super().__init__(name="hooked")
        self._install = install

    def before_fit(self) -> None:
        self._look = self._install(self.learn.model, Path(), ExitStack())

    def after_backward(self) -> None:
        self._look()


class Idle(Diagnose):
    """Looks closely at the first batches only, and gives no verdict on the way."""

    def __init__(self) -> None:
        super().__init__(on_sick="ignore")

    def before_fit(self) -> None:
        super().before_fit()
        assert self._dispatcher is not None
        self._dispatcher.schedule = FirstBatches(budget=0)


class FirstBatches(Schedule):
    """The batches that are looked at closely whatever the budget."""

    def is_wanted(self, n: int) -> bool:
        return n < N_FREE and super().is_wanted(n)


def hooked(act: Callable[[str, torch.Tensor], object]) -> list[Callback]:
    return [Hooked(by_hooks(act))]


CONTESTANTS: dict[str, Callable[[], list[Callback]]] = {
    "nothing (noise)": lambda: [Callback(name="nothing")],
    "torch's hooks that do nothing": lambda: hooked(peers.no_act),
    "four reductions": lambda: hooked(peers.four_reductions),
    "three statistics by hand, .item()": lambda: hooked(peers.three_by_hand()),
    "operations of ActivationStats alone": lambda: [Hooked(of_outputs)],
    "ActivationStats()": lambda: [ActivationStats()],
    "operations of its histograms too": lambda: [Hooked(partial(of_outputs, with_hist=True))],
    "ActivationStats(with_hist=True)": lambda: [ActivationStats(with_hist=True)],
    "operations of GradientHealth alone": lambda: [Hooked(of_gradients)],
    "GradientHealth()": lambda: [GradientHealth()],
    "both, with_hist=True, every=10": lambda: [
        ActivationStats(with_hist=True, every=10),
        GradientHealth(every=10),
    ],
    "its loss, a gradient's sum and times alone": lambda: [OfBatch()],
    "Diagnose(), a batch that it does not look at": lambda: [Idle()],
}
LIMITS: Mapping[str, Mapping[str, float]] = {who: x.target for who, x in OURS.items() if x.target} | {
    "Diagnose(), a batch that it does not look at": targets(1.02, 1.02, 1.02),
}


def seconds_of(workload: Workload, cbs: list[Callback]) -> tuple[float, float]:
    """Mean seconds of a batch in which the callbacks act, and of one in which they do not."""
    diagnoses = any(isinstance(cb, Idle | OfBatch) for cb in cbs)
    turns = Turns(*cbs, first=FIRST_IDLE if diagnoses else FIRST)
    steps = workload.steps + (FIRST_IDLE if diagnoses else 0)
    # a training that learns nothing is tried to overfit at its end
    work = replace(learnable(workload) if diagnoses else workload, steps=steps)
    hookcb(work, [turns, *cbs])()
    return statistics.mean(turns.seconds[True]), statistics.mean(turns.seconds[False])


def compare(net: str, fits: int) -> tuple[str, Rows, str]:
    """Table of a net: its title, rows and caption."""
    workload = replace(KEPT[net], steps=STEPS[net])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    for _ in range(fits):
        for name, make in CONTESTANTS.items():
            found[name].append(seconds_of(workload, make()))
    rows, extra = [], {}
    for name, pairs in found.items():
        base = statistics.median(without for _, without in pairs)
        ratios = sorted(acting / without for acting, without in pairs)
        middle = statistics.median(ratios)
        extra[name] = (middle - 1) * base * 1e6
        limit = LIMITS.get(name, {}).get(net)
        row = row_of(name, base, middle * base, ratios[0], limit)
        rows.append([*row[:4], f"{ratios[0]:.3f} to {ratios[-1]:.3f}", *row[5:]])
    return f"{KEPT[net].title}, in turns within {fits} fits", rows, caption_of(net, extra)


HEAD_WITHIN = [x if x != "median" else "of the fits" for x in HEAD]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NETS, default=list(NETS), help="nets")
    parser.add_argument("--fits", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/costs.md")
    args = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for net in args.only:
        table = compare(net, args.fits)
        show(HEAD_WITHIN, table)
        if args.write:
            write(f"within {net}", HEAD_WITHIN, table)


if __name__ == "__main__":
    main()
