"""Cost of watching a training, beside other tools, on four nets that nothing was tuned on.

    python benchmarks/costs.py [--only mlp residual transformer tiny] [--rounds 9] [--ours] [--write]
    python benchmarks/costs.py --take       statistics of one output, against four reductions
    python benchmarks/costs.py --diagnose   fits of 500 steps with `Diagnose`

Processor time of one thread, which other programs disturb less than a clock on the wall. All contestants
take turns in one process, round after round in changing order; a turn is a whole fit, with setup and
results. A ratio is the least time of a contestant divided by the least of the first one in its group, with
the median of the ratios of all rounds beside it. The noise is a group's first contestant against itself,
and a hook that does nothing. glibc keeps the memory that it has got, see `keep_memory`. `--write` puts the
tables into docs/costs.md. Peers that cannot be imported are listed below.
"""

import argparse
import platform
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import peers
import torch
from floors import FLOORS
from loop import Batches
from peers import by_hooks, plain
from rich.table import Table
from timing import Group, Run, keep_memory, take_turns, wide_console
from workloads import KEPT, Workload, learnable, loss_func

from hookcb import ActivationStats, Callback, Diagnose, GradientHealth, Learner
from hookcb.activations.stats import take

PAGE = Path(__file__).parents[1] / "docs" / "costs.md"
STEPS = {"mlp": (300, 20), "residual": (40, 3), "transformer": (20, 3), "tiny": (600, 40)}  # ours, slow peers
NETS = tuple(STEPS)


@dataclass(frozen=True)
class Contestant:
    """One row of a table.

    Attributes:
        make: makes the function that trains for a turn.
        target: largest ratio that is wanted, by net.
    """

    make: Callable[[Workload], Run]
    target: Mapping[str, float] | None = None


def targets(mlp: float, residual: float, transformer: float) -> dict[str, float]:
    return {"mlp": mlp, "residual": residual, "transformer": transformer}


# ---- contestants


def hookcb(
    workload: Workload,
    cbs: list[Callback],
    *,
    default: bool = False,
    opt_func: Any = torch.optim.SGD,
    n_batches: int | None = None,
) -> Run:
    """Trains with hookcb, with these callbacks alone or beside those that every Learner has.

    With `n_batches` these are repeated; by default each step has its own, which is in no cache.
    """
    torch.manual_seed(0)
    own = [workload.batch() for _ in range(n_batches or workload.steps)]
    data = Batches([own[i % len(own)] for i in range(workload.steps)])
    learn = Learner(data, workload.model(), loss_func, opt_func, lr=1e-3)
    if not default:
        learn.remove_cbs(learn.cbs)
    learn.add_cbs(cbs)

    def run() -> None:
        with learn.no_logging():
            learn.fit(1)

    return run


def ours(make: Callable[[], list[Callback]], *limits: float) -> Contestant:
    return Contestant(lambda workload: hookcb(workload, make()), targets(*limits) if limits else None)


OURS: dict[str, Contestant] = {
    "hookcb, no callbacks": ours(list),
    "the same again (noise)": ours(list),
    "default callbacks": Contestant(
        lambda workload: hookcb(workload, [], default=True), targets(1.03, 1.03, 1.03)
    ),
    "ActivationStats()": ours(lambda: [ActivationStats()], 1.08, 1.05, 1.055),
    "ActivationStats(with_hist=True)": ours(lambda: [ActivationStats(with_hist=True)], 1.13, 1.06, 1.06),
    "GradientHealth()": ours(lambda: [GradientHealth()], 1.08, 1.015, 1.015),
    "both, with_hist=True, every=10": ours(
        lambda: [ActivationStats(with_hist=True, every=10), GradientHealth(every=10)], 1.03, 1.015, 1.015
    ),
}


def hooked(
    act: Callable[[], Callable[[str, torch.Tensor], object]],
) -> Callable[[Workload, Path, ExitStack], Run]:
    return lambda workload, folder, stack: plain(workload, by_hooks(act()), folder, stack)


Maker = Callable[[Workload, Path, ExitStack], Run]
BY_HAND: dict[str, Maker] = {
    "plain loop": partial(plain, install=peers.nothing),
    "the same again (noise) ": partial(plain, install=peers.nothing),
    "hookcb, no callbacks ": lambda workload, **_: hookcb(workload, [], n_batches=1),
    "torch's hooks that do nothing": hooked(lambda: peers.no_act),
    "four reductions": hooked(lambda: peers.four_reductions),
    "three statistics by hand, .item()": hooked(peers.three_by_hand),
    "mean, std and histc, as miniai": hooked(peers.miniai),
    "clip_grad_norm_(inf): one number": partial(plain, install=peers.clip_of_torch),
    ".norm().item(), isnan, isinf of gradients": partial(plain, install=peers.norms_by_hand),
    **{who: partial(plain, install=install) for who, install in FLOORS.items()},
}
SLOW: dict[str, Maker] = {
    "plain loop ": partial(plain, install=peers.nothing),
    "wandb.watch(log='gradients', log_freq=1)": partial(plain, install=peers.wandb_watch("gradients")),
    "wandb.watch(log='all', log_freq=1)": partial(plain, install=peers.wandb_watch("all")),
    "TensorBoard histograms by hooks": partial(plain, install=peers.tensorboard),
    "Composer ActivationMonitor('1ba')": partial(plain, install=peers.composer_monitor),
    "Hugging Face DebugUnderflowOverflow": partial(plain, install=peers.hf_debug),
}
FASTAI: dict[str, Maker] = {
    "fastai, no statistics": lambda workload, **_: peers.fastai(workload),
    "fastai ActivationStats()": lambda workload, **_: peers.fastai(workload, False),
    "fastai ActivationStats(with_hist=True)": lambda workload, **_: peers.fastai(workload, True),
}
IGNITE: dict[str, Maker] = {
    "Ignite": lambda workload, **_: peers.ignite(workload, False),
    "Ignite GradsScalarHandler(norm)": lambda workload, **_: peers.ignite(workload, True),
}
LIGHTNING: dict[str, Maker] = {
    "Lightning": lambda workload, **_: peers.lightning(workload, False),
    "Lightning grad_norm": lambda workload, **_: peers.lightning(workload, True),
}
LIMITS = {"hookcb, no callbacks ": targets(1.02, 1.02, 1.02)}


def groups_of(net: str, only_ours: bool, folder: Path, stack: ExitStack) -> tuple[list[Group], str]:
    """Contestants for a net, and a note on those that are left out."""
    steps, few = STEPS[net]
    long, short = replace(KEPT[net], steps=steps), replace(KEPT[net], steps=few)
    missing: list[str] = []

    def group(makers: Mapping[str, Maker], workload: Workload) -> list[Group]:
        runs: dict[str, Run] = {}
        for who, make in makers.items():
            try:
                runs[who] = make(workload, folder=folder, stack=stack)
            except (ImportError, RuntimeError) as error:  # RuntimeError: a broken binary
                missing.append(f"{who} ({error})")
        return [Group(runs, workload.steps)] if len(runs) > 1 else []

    ours = {who: partial(x.make, long) for who, x in OURS.items()}
    by_hand = {who: partial(make, long, folder=folder, stack=stack) for who, make in BY_HAND.items()}
    groups = [
        Group({who: make() for who, make in makers.items()}, steps, makers) for makers in (ours, by_hand)
    ]
    if only_ours:
        return groups, ""
    for makers in (SLOW, FASTAI, IGNITE, LIGHTNING):
        groups += group(makers, short)
    return groups, "; ".join(missing)


# ---- tables


Rows = list[list[str]]


def least(group: Group, name: str) -> float:
    """Least time of a contestant by that of the first one."""
    return min(group.seconds[name]) / min(next(iter(group.seconds.values())))


def added(group: Group, name: str) -> float:
    """Microseconds that a contestant adds to a step."""
    first = min(next(iter(group.seconds.values())))
    return (min(group.seconds[name]) - first) / group.steps * 1e6


def row_of(name: str, base: float, own: float, middle: float, target: float | None) -> list[str]:
    """A row from seconds per step, the median of the ratios, and the largest ratio that is wanted."""
    ratio = own / base
    verdict = ["", ""] if target is None else [f"{target:g}", "yes" if ratio <= target else "no"]
    return [
        name,
        f"{own * 1e6:,.0f}",
        f"{(own - base) * 1e6:,.0f}",
        f"{ratio:.3f}",
        f"{middle:.3f}",
        *verdict,
    ]


def rows_of(group: Group, limits: Mapping[str, float]) -> Rows:
    rows: Rows = []
    for name, seconds in group.seconds.items():
        first = next(iter(group.seconds.values()))
        middle = statistics.median(x for x, _ in group.extra(name))
        base, own = min(first) / group.steps, min(seconds) / group.steps
        rows.append(row_of(name.strip(), base, own, middle, limits.get(name)))
    return rows


HEAD = ["", "µs a step", "added", "ratio", "median", "target", "met"]


def compare(net: str, rounds: int, only_ours: bool) -> tuple[str, Rows, str]:
    """Table of a net: its title, rows and caption."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        groups, missing = groups_of(net, only_ours, folder, stack)
        take_turns([(group, name) for group in groups for name in group.runs], rounds, time.process_time)
    by_name = {name.strip(): added(group, name) for group in groups for name in group.runs}
    caption = caption_of(net, by_name)
    limits = {who: x.target[net] for who, x in OURS.items() if x.target and net in x.target}
    limits |= {who: target[net] for who, target in LIMITS.items() if net in target}
    rows = [row for group in groups for row in rows_of(group, limits)]
    return KEPT[net].title, rows, caption + (f" Not installed: {missing}." if missing else "")


def caption_of(net: str, added: Mapping[str, float]) -> str:
    """What ActivationStats adds beside other statistics, from microseconds added to a step by contestant."""
    own, noop = added["ActivationStats()"], added["torch's hooks that do nothing"]
    if net == "tiny":
        n = 20
        caption = f"A layer costs {own / n:.1f} µs; torch's hook that does nothing {noop / n:.2f} µs."
        if fastai := added.get("fastai ActivationStats()"):
            caption += f" fastai's costs {fastai / n:.1f} µs."
        return caption
    four, by_hand = added["four reductions"], added["three statistics by hand, .item()"]
    return (
        f"ActivationStats adds {own:,.0f} µs a step: {own / four:.2f} times what four reductions add, and "
        f"{own / by_hand:.2f} of what three statistics by hand add."
    )


SIZES = (98_304, 442_368, 786_432, 1_572_864)


def compare_take(rounds: int) -> tuple[str, Rows, str]:
    """Table of `take` of one output against four reductions of it."""
    rows: Rows = []
    for n in SIZES:
        x = torch.randn(n)

        def four(x: torch.Tensor = x) -> None:
            for _ in range(20):
                peers.four_reductions("", x)

        def own(x: torch.Tensor = x) -> None:
            for _ in range(20):
                take(x, "auto")

        group = Group({"four": four, "again": four, "own": own}, 20)
        take_turns([(group, name) for name in group.runs], rounds, time.process_time)
        times = [f"{min(group.seconds[name]) / 20 * 1e6:,.0f}" for name in ("four", "own")]
        ratio, noise = least(group, "own"), least(group, "again")
        rows.append(
            [f"{n:,}", *times, f"{ratio:.2f}", f"{noise:.2f}", "1.35", "yes" if ratio <= 1.35 else "no"]
        )
    return "statistics of one output", rows, ""


HEAD_TAKE = ["elements", "four reductions, µs", "take, µs", "ratio", "noise", "target", "met"]


def compare_diagnose(net: str, rounds: int, steps: int = 500) -> tuple[str, Rows, str]:
    """Table of whole fits with `Diagnose`.

    The nets learn something, by Adam: of a training that does not, it tries to overfit a batch at the end.
    """
    workload = learnable(replace(KEPT[net], steps=steps))
    train = partial(hookcb, workload, opt_func=torch.optim.Adam)
    makers: dict[str, Callable[[], Run]] = {
        "hookcb, no callbacks": lambda: train([]),
        "the same again (noise)": lambda: train([]),
        "Diagnose()": lambda: train([Diagnose()]),
    }
    group = Group({name: make() for name, make in makers.items()}, steps, makers)
    take_turns([(group, name) for name in makers], rounds, time.process_time)
    rows = rows_of(group, {"Diagnose()": 1.05 if net == "mlp" else 1.02})
    return f"{KEPT[net].title}, {steps} steps", rows, ""


def show(head: list[str], table: tuple[str, Rows, str]) -> None:
    title, rows, caption = table
    shown = Table(title=title, caption=caption or None)
    for i, name in enumerate(head):
        shown.add_column(name, justify="right" if i else "left", no_wrap=not i)
    for row in rows:
        shown.add_row(*row)
    wide_console().print(shown)


def write(key: str, head: list[str], table: tuple[str, Rows, str]) -> None:
    """Puts a table between the marks `<!-- key -->` and `<!-- end -->` of the page."""
    title, rows, caption = table
    version, threads = torch.__version__, torch.get_num_threads()
    lines = [
        f"**{title}** ({date.today()}, {platform.machine()}, {threads} thread, torch {version})",
        "",
        "| " + " | ".join(head) + " |",
        "|---" + "|---:" * (len(head) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        *(["", caption] if caption else []),
    ]
    mark = re.compile(rf"(<!-- {key} -->\n).*?(<!-- end -->)", re.DOTALL)
    text = PAGE.read_text()
    if not mark.search(text):
        raise SystemExit(f"{PAGE} has no <!-- {key} -->")
    PAGE.write_text(mark.sub(lambda m: f"{m[1]}{chr(10).join(lines)}\n{m[2]}", text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NETS, default=list(NETS), help="nets")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ours", action="store_true", help="without the slow peers")
    parser.add_argument("--take", action="store_true", help="statistics of one output instead")
    parser.add_argument("--diagnose", action="store_true", help="fits with Diagnose instead")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/costs.md")
    args = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # peers warn about themselves
    made: list[tuple[str, list[str], Callable[[], tuple[str, Rows, str]]]]
    if args.take:
        made = [("take", HEAD_TAKE, partial(compare_take, args.rounds))]
    elif args.diagnose:
        nets = [net for net in args.only if net != "tiny"]
        made = [(f"diagnose {net}", HEAD, partial(compare_diagnose, net, args.rounds)) for net in nets]
    else:
        made = [(net, HEAD, partial(compare, net, args.rounds, args.ours)) for net in args.only]
    for key, head, make in made:
        table = make()
        show(head, table)
        if args.write:
            write(key, head, table)


if __name__ == "__main__":
    main()
