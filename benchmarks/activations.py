"""Cost of activation statistics: time relative to the same training without them, compared with peers.

    python benchmarks/activations.py [--only tiny mlp resnet transformer] [--rounds 9] [--ours] [--busy]
    python benchmarks/activations.py --memory

A turn is a fit of many steps, including setup and reading the results. hookcb is compared with its Learner
without callbacks, fastai with its Learner without statistics, the others with a plain loop. All write to
memory or to a temporary folder, never to a network. Peers that cannot be imported are listed below the table.
Only Composer's monitor is timed, on a plain loop: its hooks stay registered, and its logger discards all.

`--memory` trains the tiny MLP for 10,000 steps, in a separate process for each figure; Linux only.
"""

import argparse
import gc
import importlib
import re
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from loop import Batches
from rich.table import Table
from timing import Group, Run, compare_groups, wide_console
from torch import nn
from workloads import TINY, WORKLOADS, Workload, loss_func

from hookcb import ActivationStats, Callback, Learner, find_modules

ALL = {"tiny": TINY} | WORKLOADS
STEPS = {
    "tiny": (1000, 50),
    "mlp": (200, 20),
    "resnet": (10, 1),
    "transformer": (10, 2),
}  # a turn: hookcb, peers
AUTO = "every element; 4,096 for shares in outputs above 8,192"
ALSO_HIST = "every element; 4,096 for shares and bins in outputs above 8,192"

OURS: dict[str, tuple[Callable[[], list[Callback]], str]] = {
    "hookcb without callbacks": (list, ""),
    "hookcb without callbacks again (noise)": (list, ""),
    "ActivationStats()": (lambda: [ActivationStats()], AUTO),
    "ActivationStats(include_paramless=True)": (lambda: [ActivationStats(include_paramless=True)], AUTO),
    "ActivationStats(with_hist=True)": (lambda: [ActivationStats(with_hist=True)], ALSO_HIST),
    "ActivationStats(every=10)": (lambda: [ActivationStats(every=10)], f"every 10th batch: {AUTO}"),
    "ActivationStats(with_hist=True, every=10)": (
        lambda: [ActivationStats(with_hist=True, every=10)],
        f"every 10th batch: {ALSO_HIST}",
    ),
    "ActivationStats(sample=1024)": (
        lambda: [ActivationStats(sample=1024)],
        "1,024 elements of each output",
    ),
    "ActivationStats(with_hist=True, sample=1024)": (
        lambda: [ActivationStats(with_hist=True, sample=1024)],
        "1,024 elements of each output",
    ),
}


def hookcb(workload: Workload, cbs: list[Callback]) -> Run:
    torch.manual_seed(0)
    data = Batches([workload.batch()] * workload.steps)
    learn = Learner(data, workload.model(), loss_func, torch.optim.SGD, lr=1e-3)
    learn.remove_cbs(learn.cbs)
    learn.add_cbs(cbs)
    return lambda: learn.fit(1)


def fastai(workload: Workload, *options: bool) -> Run:
    """Train with fastai and, if there are any options, its ActivationStats with these."""
    from fastai.callback.hook import ActivationStats as FastaiStats
    from fastai.callback.progress import ProgressCallback
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner as FastaiLearner
    from fastai.optimizer import OptimWrapper

    class FastaiBatches(Batches):
        n_inp, bs, device = 1, 64, torch.device("cpu")

    def sgd(params: Any, **kwargs: Any) -> OptimWrapper:
        return OptimWrapper(params, torch.optim.SGD)

    torch.manual_seed(0)
    data = [workload.batch()] * workload.steps
    dls = DataLoaders(FastaiBatches(data), FastaiBatches([]), device=torch.device("cpu"))
    stats = [FastaiStats(*options)] if options else []
    learn = FastaiLearner(dls, workload.model(), loss_func=loss_func, opt_func=sgd, lr=1e-3, cbs=stats)
    learn.remove_cb(ProgressCallback)

    def run() -> None:
        with learn.no_logging():
            learn.fit(1)

    return run


# Attaches a peer to a model, permanently; the function it returns is called after each turn.
Peer = Callable[[nn.Module, Path, ExitStack], Run | None]


def plain(workload: Workload, install: Peer, folder: Path, stack: ExitStack) -> Run:
    model, turn = workload.train()
    finish = install(model, folder, stack)

    def run() -> None:
        turn()
        if finish:
            finish()

    return run


def nothing(model: nn.Module, folder: Path, stack: ExitStack) -> None:
    """Leave the loop plain."""


def wandb_watch(model: nn.Module, folder: Path, stack: ExitStack) -> None:
    import wandb

    quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    record = stack.enter_context(wandb.init(mode="offline", dir=folder, settings=quiet))
    record.watch(model, log="all", log_freq=1)
    # logs the previous step; users call log after each step
    model.register_forward_pre_hook(lambda m, i: record.log({}))


def composer_monitor(model: nn.Module, folder: Path, stack: ExitStack) -> None:
    let_torchvision_in()
    from composer.callbacks import ActivationMonitor

    monitor = ActivationMonitor("1ba")
    monitor.create_module_names(model)
    logger = SimpleNamespace(destinations=(), log_metrics=lambda metrics: None)
    monitor.register_forward_hook(model, logger, step=None)


@cache
def let_torchvision_in() -> None:
    """Make torchvision importable, which Composer imports.

    PyPI's build is for CUDA: with a CPU build of torch it cannot load its operators, and needs two of them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)


def hf_debug(model: nn.Module, folder: Path, stack: ExitStack) -> None:
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(model)


def tensorboard(model: nn.Module, folder: Path, stack: ExitStack) -> Run:
    from torch.utils.tensorboard import SummaryWriter

    writer = stack.enter_context(SummaryWriter(folder))
    calls = dict.fromkeys(find_modules(model), 0)

    def log(name: str, o: Any) -> None:
        writer.add_histogram(name, o[0] if isinstance(o, tuple) else o, calls[name])
        calls[name] += 1

    for name, m in find_modules(model).items():
        m.register_forward_hook(lambda m, i, o, name=name: log(name, o))
    return writer.flush


PEERS: dict[str, tuple[Peer, str]] = {
    "plain loop": (nothing, ""),
    "wandb.watch(log='all', log_freq=1)": (
        wandb_watch,
        "every element of parameters, gradients; no activations",
    ),
    "Composer ActivationMonitor('1ba')": (
        composer_monitor,
        "every element of inputs, outputs of all modules",
    ),
    "Hugging Face DebugUnderflowOverflow": (
        hf_debug,
        "every element of weights, inputs, outputs of all modules",
    ),
    "TensorBoard add_histogram by hooks": (tensorboard, "every element"),
}
FASTAI: dict[str, tuple[tuple[bool, ...], str]] = {
    "fastai without statistics": ((), ""),
    "fastai ActivationStats()": ((False,), "every element"),
    "fastai ActivationStats(with_hist=True)": (
        (True,),
        "every element; bins for 0–10 only",
    ),
}


def groups_of(name: str, only_ours: bool, stack: ExitStack) -> tuple[list[Group], str]:
    """Contestants for a workload, and a note about those that are left out."""
    steps, peer_steps = STEPS[name]
    workload, short = replace(ALL[name], steps=steps), replace(ALL[name], steps=peer_steps)
    groups = [Group({who: hookcb(workload, cbs()) for who, (cbs, _) in OURS.items()}, steps)]
    if only_ours:
        return groups, "without peers"
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    makers: list[dict[str, Callable[[], Run]]] = [
        {who: lambda o=options: fastai(short, *o) for who, (options, _) in FASTAI.items()},
        {who: lambda p=peer: plain(short, p, folder, stack) for who, (peer, _) in PEERS.items()},
    ]
    missing: list[str] = []
    for contestants in makers:
        runs = made(contestants, missing)
        if runs:
            groups.append(Group(runs, peer_steps))
    return groups, "not installed: " + "; ".join(missing) if missing else ""


def made(contestants: dict[str, Callable[[], Run]], missing: list[str]) -> dict[str, Run]:
    """Contestants that can be imported; the others are added to `missing`."""
    runs: dict[str, Run] = {}
    for who, make in contestants.items():
        try:
            runs[who] = make()
        except (ImportError, RuntimeError) as error:  # RuntimeError: a broken binary
            missing.append(f"{who} ({error})")
    return runs


def show_costs(name: str, rounds: int, only_ours: bool, clock: Callable[[], float]) -> None:
    notes = {who: note for who, (_, note) in (OURS | FASTAI | PEERS).items()}
    with ExitStack() as stack:
        groups, caption = groups_of(name, only_ours, stack)
        layers = 20 if name == "tiny" else None
        title = ALL[name].title
        compare_groups(title, groups, rounds, notes=notes, layers=layers, caption=caption, clock=clock)


# ---- memory


MARKS = (1_000, 5_000, 10_000)  # steps
MEASURED = ("hookcb without callbacks", "ActivationStats()", "ActivationStats(with_hist=True)")


def memory_of(who: str, traced: bool) -> dict[str, float]:
    """Train in this process; MB of Python objects or the process, after each of MARKS and at the peak."""
    torch.set_num_threads(1)
    measured: dict[str, float] = {}

    def look(cb: Callback) -> None:
        if cb.train_iter + 1 in MARKS:
            gc.collect()
            now = tracemalloc.get_traced_memory()[0] / 1e6 if traced else resident("VmRSS")
            measured[f"{cb.train_iter + 1:,}"] = now

    cbs = OURS[who][0]
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
        for who in MEASURED:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                measured[who] = pool.submit(memory_of, who, traced).result()
            table.add_row(f"{kind}, {who}", *(f"{mb:,.2f}" for mb in measured[who].values()))
        table.add_section()
    plain, *others = (measured[who]["peak"] for who in MEASURED)
    ratios = " and ".join(f"{peak / plain:.3f}" for peak in others)
    table.caption = f"peak resident memory relative to {MEASURED[0]}: {ratios}"
    wide_console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(ALL), help="workloads")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ours", action="store_true", help="no peers")
    parser.add_argument("--busy", action="store_true", help="measure processor time, for a busy machine")
    parser.add_argument("--memory", action="store_true", help="measure memory growth instead of time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # peers warn about themselves
    if args.memory:
        show_memory()
        return
    for name in args.only:
        show_costs(name, args.rounds, args.ours, time.process_time if args.busy else time.perf_counter)


if __name__ == "__main__":
    main()
