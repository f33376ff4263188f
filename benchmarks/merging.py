"""Statistics that ranks merge, beside an oracle that has the whole tensors: `python benchmarks/merging.py`.

Launches gloo processes on this machine. In each way to divide a model, ranks gather what layers put out,
gradients and weights, and NumPy reduces them in float64. The table has the largest relative difference of
each statistic. What hookcb itself sends in a training step is counted too.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hookcb import ActivationStats, Callback, GradientClip, GradientHealth, Learner
from hookcb.activations.bins import Bins
from hookcb.activations.stats import STORED
from hookcb.processes.exchange import Exchange

ROOT = Path(__file__).parents[1]
OUTPUTS = ("mean", "std", "min", "max", "abs_max", "near_zero", "zeros", "nonfinite", "rms", "kurtosis")
GRADIENTS = ("norm", "clipped_norm", "rms", "abs_max", "nonfinite", "zero_rows")
WEIGHTS = ("weight_norm", "weight_mean", "weight_std", "update_ratio", "drift")
OFFSET, N_STEPS = 1e6, 3
CLIP = 1e-3  # far below the norms of these gradients
TRAININGS = (  # the type of numbers, and what is changed
    (torch.float64, ""),
    (torch.float32, ""),
    (torch.bfloat16, ""),
    (torch.float64, "clipped"),
    (torch.float64, "NaN on a rank"),
)


class Net(nn.Module):
    """Layers with an offset input, NaN and infinite outputs, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.far, self.odd = nn.Identity(), nn.Identity()
        self.emb, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.w1, self.act, self.w2 = nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of tokens, `(B, L)`."""
        self.far(x.to(self.head.weight.dtype) / 7 + OFFSET)
        self.odd((x.to(self.head.weight.dtype) - 5).reciprocal().log())
        return self.head(self.w2(self.act(self.w1(self.norm(self.emb(x))))).mean(1))


MLP = {"w1": ColwiseParallel(), "w2": RowwiseParallel()}
DTENSORS = {
    "w1": ColwiseParallel(use_local_output=False),
    "w2": RowwiseParallel(use_local_output=False),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
SEQUENCES = {
    "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "w1": ColwiseParallel(input_layouts=Shard(1)),
    "w2": RowwiseParallel(output_layouts=Replicate()),
}


def sharded(model: Net, mesh: object = None) -> nn.Module:
    """The model by `fully_shard`."""
    for layer in (model.norm, model.w1, model.w2, model.head):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ways(world: int) -> dict[str, tuple[Callable[[Net], nn.Module], int]]:
    """How to divide a model among ranks, and how many groups of ranks have batches of their own."""
    line = init_device_mesh("cpu", (world,))
    found = {
        "DDP": (lambda m: DistributedDataParallel(m), world),
        "FSDP2": (sharded, world),
        "TP": (lambda m: parallelize_module(m, line, MLP), 1),
        "TP, DTensors": (lambda m: parallelize_module(m, line, DTENSORS), 1),
        "TP, sequences": (lambda m: parallelize_module(m, line, SEQUENCES), 1),
    }
    if world >= 4:
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        hybrid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
        found["FSDP2 × TP"] = (
            lambda m: sharded(parallelize_module(m, both["tp"], MLP), both["dp"]),
            world // 2,
        )
        found["HSDP"] = (lambda m: sharded(m, hybrid), world)
    return found


def array(x: Tensor) -> np.ndarray:
    """All numbers of a tensor, of a DTensor those of all ranks, in float64."""
    x = x.detach()
    whole = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole.double().numpy().copy()


class Oracle(Callback):
    """Keeps what layers put out, gradients, and weights around steps, whole."""

    order = 1_000

    def __init__(self, n_groups: int) -> None:
        super().__init__()
        self.n_groups, self.outputs, self.grads, self.clipped, self.weights = n_groups, [], [], [], []

    def before_fit(self) -> None:
        """Begins to listen."""
        model = getattr(self.model, "module", self.model)
        named = dict(model.named_modules())
        self.slices = {"w1", "act"} if self.n_groups < self.learn.ranks.world else set()
        if self.n_groups == 1 and any("norm" in name for name in getattr(model, "_own_plan", ())):
            self.slices |= {"emb", "norm"}
        self.handles = [
            named[name].register_forward_hook(self.hook_of(name))
            for name in ("far", "odd", "emb", "norm", "w1", "act", "w2", "head")
        ]
        self.weights.append({name: array(p) for name, p in model.named_parameters()})

    def hook_of(self, name: str) -> Callable[..., None]:
        """A hook that keeps what all ranks together put out."""

        def hook(m: nn.Module, inputs: object, output: Tensor) -> None:
            is_dtensor = hasattr(output, "full_tensor")
            own, parts = array(output).ravel(), [None] * self.learn.ranks.world
            distributed.all_gather_object(parts, own)
            n_peers = len(parts) // self.n_groups
            is_slice = name in self.slices and not is_dtensor
            self.now[name] = np.concatenate(parts if is_slice else parts[::n_peers])

        return hook

    def before_batch(self) -> None:
        """Begins a record."""
        self.now: dict[str, np.ndarray] = {}
        self.outputs.append(self.now)

    def after_backward(self) -> None:
        """Keeps gradients before they are clipped."""
        self.grads.append(self._gradients())

    def before_step(self) -> None:
        """Keeps gradients as the optimizer gets them."""
        self.clipped.append(self._gradients())

    def _gradients(self) -> dict[str, np.ndarray]:
        model = getattr(self.model, "module", self.model)
        return {name: array(p.grad) for name, p in model.named_parameters()}

    def after_step(self) -> None:
        """Keeps weights."""
        model = getattr(self.model, "module", self.model)
        self.weights.append({name: array(p) for name, p in model.named_parameters()})

    def after_fit(self) -> None:
        """Ends listening."""
        for handle in self.handles:
            handle.remove()


def of_output(x: np.ndarray, eps: float = 0.05) -> list[float]:
    """Statistics of a whole output, in the order of `OUTPUTS`."""
    good = x[np.isfinite(x)]
    low, high, near_zero, zeros = (
        (good.min(), good.max(), (np.abs(x) <= eps).mean(), (x == 0).mean()) if good.size else [np.nan] * 4
    )
    centered = x - x.mean()
    std = np.sqrt((centered**2).sum() / (len(x) - 1))
    kurtosis = (centered**4).mean() / (centered**2).mean() ** 2 if low < high else np.nan
    last = np.hypot(x.mean(), centered.std()), kurtosis
    return [x.mean(), std, low, high, max(high, -low), near_zero, zeros, len(x) - len(good), *last]


def of_param(
    g: np.ndarray, clipped: np.ndarray, start: np.ndarray, before: np.ndarray, now: np.ndarray
) -> list[float]:
    """Statistics of a whole parameter, in the order of `GRADIENTS` and `WEIGHTS`."""
    norm, good = np.linalg.norm(g), np.abs(g[np.isfinite(g)])
    sums = np.abs(g.reshape(len(g), -1)).sum(1)
    zero_rows = (sums == 0).mean() if g.ndim > 1 and np.isfinite(sums).any() else np.nan
    largest = good.max() if good.size else np.nan
    n_odd = (~np.isfinite(g)).sum()
    found = [norm, np.linalg.norm(clipped), norm / np.sqrt(g.size), largest, n_odd, zero_rows]
    ratio = np.linalg.norm(now - before) / np.linalg.norm(before)
    drift = np.linalg.norm(now - start) / np.linalg.norm(start)
    return [*found, np.linalg.norm(now), now.mean(), now.std(ddof=1), ratio, drift]


def apart(found: float, wanted: float, scale: float) -> float:
    """Relative difference; equal if both are NaN."""
    if found == wanted or (np.isnan(found) and np.isnan(wanted)):
        return 0.0
    difference = abs(found - wanted) / max(abs(wanted), scale, 1e-300)
    return float("inf") if np.isnan(difference) else float(difference)


def batches(group: int, n_groups: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of a group of ranks, of sizes that differ."""
    g = torch.Generator().manual_seed(group)
    sizes = [4 + (group + i) % 3 for i in range(N_STEPS)] if n_groups > 1 else [6] * N_STEPS
    return [(torch.randint(1, 9, (n, 4), generator=g), torch.arange(n) % 3) for n in sizes]


class Poison(Callback):
    """Makes the loss of one rank NaN, in the second batch."""

    def __init__(self, is_here: bool) -> None:
        super().__init__()
        self.is_here = is_here

    def after_loss(self) -> None:
        if self.is_here and self.train_iter == 1:
            self.learn.loss = self.learn.loss * float("nan")


def compare(
    way: str, wrap: Callable[[Net], nn.Module], n_groups: int, dtype: torch.dtype, variant: str = ""
) -> dict:
    """Largest relative differences of one way, by statistic, and what a step has sent."""
    torch.manual_seed(0)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model = Net().to(dtype)
    model._own_plan = tuple(SEQUENCES) if way == "TP, sequences" else ()
    learn = Learner(
        (batches(rank * n_groups // world, n_groups), None),
        wrap(model),
        cross_entropy,
        torch.optim.SGD,
        lr=0.05,
    )
    stats = ActivationStats(include_paramless=True, with_hist=True)
    health, oracle = GradientHealth(detail_every=1), Oracle(n_groups)
    sent, gathers = [], []
    start, gather = Exchange.start, Exchange.gather

    def counted(self: Exchange, x: Tensor, op: object = None) -> object:
        if x.dtype == torch.float64 and learn.training and getattr(learn, "iter", 0) == N_STEPS - 1:
            sent.append([str(op).rpartition(".")[-1], x.numel()])
        return start(self, x, op)

    def told(self: Exchange, item: object) -> list:
        if learn.training and getattr(learn, "iter", 0) == N_STEPS - 1:
            gathers.append(1)
        return gather(self, item)

    with learn.no_logging(), mock.patch.multiple(Exchange, start=counted, gather=told):
        changes = {"clipped": [GradientClip(CLIP)], "NaN on a rank": [Poison(rank < world // n_groups)]}
        learn.fit(1, cbs=[stats, health, oracle, *changes.get(variant, [])])
    off: dict[str, float] = {}

    def note(kind: str, stat: str, where: str, found: float, wanted: float, scale: float = 0.0) -> None:
        key, value = f"{kind} {stat}", apart(found, wanted, scale)
        if value >= off.get(key, 0.0):
            off[key] = value
            worst[key] = f"{where}: {found!r} instead of {float(wanted)!r}"

    worst: dict[str, str] = {}
    for i, outputs in enumerate(oracle.outputs):
        for name, x in outputs.items():
            wants, size = of_output(x), float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
            for stat, wanted in zip(OUTPUTS, wants, strict=True):
                # a mean of numbers that cancel is known to the rounding of their size
                scale = size if stat == "mean" else 0.0
                what = "std, offset" if (name, stat) == ("far", "std") else stat
                note("output", what, f"{name}, batch {i}", stats.stats[i][name][stat], wanted, scale)
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            counts = Bins(stats.records.bins).counts_of(torch.from_numpy(x)[None].to(wide))[0]
            found = stats.records.store_of("train").series(name)[i][len(STORED) :]
            note("output", "histogram", name, float((found - counts).abs().max().round(decimals=6)), 0.0, 1.0)
    for i, grads in enumerate(oracle.grads):
        for name, g in grads.items():
            start, before, now = (oracle.weights[k][name] for k in (0, i, i + 1))
            wants = of_param(g, oracle.clipped[i][name], start, before, now)
            size = float(np.abs(now).max())
            row = health.stats[i][name]
            for stat, wanted in zip((*GRADIENTS, *WEIGHTS), wants, strict=True):
                scale = size if stat == "weight_mean" else 0.0
                kind = "gradient" if stat in GRADIENTS else "weight"
                note(kind, stat, f"{name}, step {i}", row[stat], wanted, scale)
    return {"off": off, "worst": worst, "sent": sent, "gathers": len(gathers)}


def work(folder: Path, in_turn: bool) -> None:
    """Compare as one of several ranks; each writes what it found.

    Args:
        folder: for what it found.
        in_turn: whether each way is tried with one of the others of `TRAININGS` beside the first, in turn.
    """
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found, (first, *others) = {}, TRAININGS
    for i, (way, (wrap, n_groups)) in enumerate(ways(world).items()):
        for dtype, variant in [first, *([others[i % len(others)]] if in_turn else others)]:
            name = ", ".join(filter(None, (way, variant, str(dtype)[6:])))
            found[name] = compare(way, wrap, n_groups, dtype, variant)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def measured(world: int, timeout: float = 120) -> list[dict]:
    """What each of `world` processes has found, by way."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(world), __file__, "--work", folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=env, timeout=timeout)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]


def show(console: Console, world: int) -> None:
    """Print the largest relative differences of any rank."""
    ranks = measured(world)
    table = Table("", *ranks[0], title=f"Largest relative difference from the whole tensors, {world} ranks")
    for stat in next(iter(ranks[0].values()))["off"]:
        table.add_row(stat, *(f"{max(rank[way]['off'][stat] for rank in ranks):.0e}" for way in ranks[0]))
    sent = [" ".join(f"{op}[{n}]" for op, n in ranks[0][way]["sent"]) for way in ranks[0]]
    table.add_row("sent in a step", *sent)
    table.add_row("gathered", *(str(ranks[0][way]["gathers"]) for way in ranks[0]))
    console.print(table)


if __name__ == "__main__":
    if "--work" in sys.argv:
        work(Path(sys.argv[-1]), "--in-turn" in sys.argv)
    else:
        show(Console(width=220), int(sys.argv[1]) if len(sys.argv) > 1 else 4)
