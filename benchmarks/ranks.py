"""Cost of several ranks: steps with and without a vote, and what 1,024 ranks would send.

`python benchmarks/ranks.py [rounds]` trains with 2 and 4 gloo processes on this machine. Ranks beyond the
number of processors take turns, so the figures for 4 are an upper bound on a machine with 2.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hookcb import Learner
from hookcb.processes.votes import Votes

ROOT = Path(__file__).parents[1]
WORLD = 1_024  # ranks that do not exist
MODELS = {"MLP 64": (64, 1, 32, 400), "MLP 512×4": (512, 4, 64, 100)}  # width, layers, samples, steps
WITHOUT, WITH, AGAIN = "without votes", "with votes", "without again"


def learner(width: int, n_layers: int, n_samples: int, n_steps: int) -> Learner:
    """A learner of a replicated MLP."""
    torch.manual_seed(0)
    layers = [layer for _ in range(n_layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 10)))
    batch = torch.randn(n_samples, width), torch.randint(10, (n_samples,))
    return Learner(([batch] * n_steps, None), model, cross_entropy, torch.optim.SGD, lr=1e-3)


def turn(learn: Learner, has_votes: bool) -> tuple[float, float]:
    """Seconds of a step in a fit of all ranks, and of processor time in it."""
    without = mock.patch.multiple(
        Votes, end_batch=lambda *args: None, decide=lambda self, event, cbs, cancels, training: list(cancels)
    )
    distributed.barrier()
    began, began_work = time.perf_counter(), time.process_time()
    with learn.no_logging():
        if has_votes:
            learn.fit(1)
        else:
            with without:
                learn.fit(1)
    n = len(learn.recorder.losses)
    return (time.perf_counter() - began) / n, (time.process_time() - began_work) / n


def vote_alone(n: int = 300) -> float:
    """Seconds of a vote that is waited for at once."""
    flags = torch.zeros(10)
    distributed.barrier()
    began = time.perf_counter()
    for _ in range(n):
        distributed.all_reduce(flags, op=distributed.ReduceOp.MAX)
    return (time.perf_counter() - began) / n


def work(file: Path, rounds: int) -> None:
    """Measure as one of several ranks; rank 0 writes the seconds of each turn."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, size in MODELS.items():
        learn = learner(*size)
        turn(learn, True)
        turns = found.setdefault(name, {WITHOUT: [], WITH: [], AGAIN: []})
        for _ in range(rounds):
            for what, seconds in turns.items():
                seconds.append(turn(learn, what == WITH))
    alone = {"vote": [vote_alone() for _ in range(rounds)]}
    if distributed.get_rank() == 0:
        file.write_text(json.dumps({"turns": found, "alone": alone}))
    distributed.destroy_process_group()


def measured(world: int, rounds: int) -> dict[str, dict[str, dict[str, list]]]:
    """What rank 0 of `world` processes has measured."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(world), __file__, "--work", str(file), str(rounds)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(file.read_text())


def show_votes(console: Console, rounds: int) -> None:
    """Print what votes cost on 2 and 4 processes."""
    title = f"A DDP step, median of {rounds} rounds in turn, gloo on {os.cpu_count()} processors"
    names = "", "", "µs a step", "ratio", "quartiles", "of processor time", "ratio", "quartiles"
    table = Table(*names, title=title)
    for world in (2, 4):
        found = measured(world, rounds)
        for model, turns in found["turns"].items():
            for what, seconds in turns.items():
                row = []
                for own, base in zip(
                    zip(*seconds, strict=True), zip(*turns[WITHOUT], strict=True), strict=True
                ):
                    ratios = [x / y for x, y in zip(own, base, strict=True)]
                    low, middle, high = statistics.quantiles(ratios, n=4)
                    row += [f"{1e6 * statistics.median(own):.0f}", f"{middle:.3f}", f"{low:.3f} – {high:.3f}"]
                table.add_row(f"{world} ranks, {model}", what, *row)
        µs = f"{1e6 * statistics.median(found['alone']['vote']):.0f}"
        table.add_row(f"{world} ranks", "a vote that is waited for", µs, "", "")
    console.print(table)


def show_bytes(console: Console) -> None:
    """Print what rank 0 of 1,024 would send with each callback, in two epochs of six steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "tests/ranks/fake_worker.py"), folder, str(WORLD)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        found = json.loads(Path(folder, "0.json").read_text())
    columns = ("DDP: collectives", "bytes", "FSDP2: collectives", "bytes")
    table = Table("more than without it", *columns, title="Rank 0 of 1,024, 2 epochs of 6 steps")
    for name in found["ddp"]:
        row = [name]
        for how in ("ddp", "fsdp2"):
            cost, base = found[how][name], found[how]["none"]
            known = "n" in cost and name != "none"
            row += [f"{cost['n'] - base['n']:,}", f"{cost['bytes'] - base['bytes']:,}"] if known else ["", ""]
        table.add_row(*row)
    for how in ("ddp", "fsdp2"):
        base = found[how]["none"]
        console.print(f"{how}, model and Learner alone: {base['n']:,} collectives, {base['bytes']:,} bytes")
    console.print(table)


if __name__ == "__main__":
    if "--work" in sys.argv:
        work(Path(sys.argv[-2]), int(sys.argv[-1]))
    else:
        console = Console(width=130)
        show_votes(console, int(sys.argv[1]) if len(sys.argv) > 1 else 15)
        show_bytes(console)
