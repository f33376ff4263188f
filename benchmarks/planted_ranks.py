"""Planted faults on several ranks, and healthy controls: found, rank named, first, false alarms.

`python benchmarks/planted_ranks.py --world 2 --seeds 0 1 --models mlp cnn --only 'inputs*'` trains cases, one
after another, in one launch of gloo processes on this machine.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from hookcb import EMA, Callback, Diagnose, GradientAccumulation, GradientClip, Learner, MixedPrecision

sys.path.append(str(Path(__file__).parent / "planted"))
from data import digits, images, text_batches
from nets import Cnn, Mlp

MODELS = ("mlp", "cnn", "text")
TIMEOUT = timedelta(seconds=30)
FAULTY = 1  # the rank
N_TRAIN, N_VALID, BATCH, N_EPOCH = 1_280, 256, 16, 4
ALARMS = ("error", "warning")


class Text(nn.Module):
    """A small causal transformer."""

    def __init__(self, n: int = 16, width: int = 32, drop: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(n, width), nn.Embedding(16, width)
        block = nn.TransformerEncoderLayer(width, 2, 64, drop, batch_first=True, norm_first=True)
        self.block, self.norm, self.head = block, nn.LayerNorm(width), nn.Linear(width, n)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        x = self.tokens(x) + self.places(torch.arange(n))
        return self.head(self.norm(self.block(x, src_mask=mask))).transpose(1, 2)


@dataclass
class Setup:
    """A healthy training of this rank, which a case changes.

    Attributes:
        kind, seed, rank, world: model, seed, and place of this process.
        x, y: all samples, as this rank has them.
        size: samples in a batch of this rank.
        sampler: makes the sampler of a dataset; by default a DistributedSampler.
        loader: changes the training loader.
        cbs: callbacks.
        ddp: options of DistributedDataParallel.
    """

    kind: str
    seed: int
    rank: int
    world: int
    x: Tensor
    y: Tensor
    model: nn.Module
    size: int = BATCH
    sampler: Callable[[Dataset[Any]], Any] | None = None
    loader: Callable[[Any], Any] = lambda loader: loader
    opt: Callable[..., torch.optim.Optimizer] = SGD
    lr: float = 0.05
    cbs: list[Callback] = field(default_factory=list)
    ddp: dict[str, Any] = field(default_factory=dict)
    n_epoch: int = N_EPOCH
    seeds: tuple[int, ...] = ()
    is_cycle: bool = False

    @property
    def is_faulty(self) -> bool:
        return self.rank == FAULTY

    def learner(self) -> Learner:
        n = len(self.x) - N_VALID
        train, valid = TensorDataset(self.x[:n], self.y[:n]), TensorDataset(self.x[n:], self.y[n:])
        make = self.sampler or (lambda dataset: DistributedSampler(dataset, seed=self.seed))
        loader = self.loader(DataLoader(train, self.size, sampler=make(train)))
        others = DataLoader(valid, 64, sampler=DistributedSampler(valid, shuffle=False))
        model = DistributedDataParallel(self.model, **self.ddp)
        return Learner((loader, others), model, cross_entropy, self.opt, lr=self.lr)


@dataclass(frozen=True)
class Case:
    """A fault with the codes that name it, or a control without."""

    name: str
    plant: Callable[[Setup], None]
    models: tuple[str, ...]
    codes: frozenset[str] = frozenset()
    ranks: tuple[int, ...] = ()


CASES: list[Case] = []


def fault(name: str, *codes: str, ranks: Sequence[int] = (FAULTY,), models: Sequence[str] = MODELS):
    """Adds a fault; `ranks` are those that the finding must name, none if all have it."""

    def add(plant: Callable[[Setup], None]) -> Callable[[Setup], None]:
        CASES.append(Case(name, plant, tuple(models), frozenset(codes), tuple(ranks)))
        return plant

    return add


def control(name: str, models: Sequence[str] = MODELS):
    """Adds a control."""
    return fault(name, ranks=(), models=models)


FLOATS = ("mlp", "cnn")


# ---- callbacks and loaders


class Act(Callback):
    """Calls a function with the learner at an event."""

    def __init__(self, event: str, act: Callable[[Any], object]) -> None:
        super().__init__(name=f"act_{event}")
        self._event, self._act = event, act

    def before_batch(self) -> None:
        self._at("before_batch")

    def after_backward(self) -> None:
        self._at("after_backward")

    def before_step(self) -> None:
        self._at("before_step")

    def after_step(self) -> None:
        self._at("after_step")

    def before_validate(self) -> None:
        self._at("before_validate")

    def _at(self, event: str) -> None:
        if event == self._event and (self.training or "validate" in event):
            with torch.no_grad():
                self._act(self.learn)


class Around:
    """A loader around another one, as for prefetching, which does not pass on set_epoch."""

    def __init__(self, loader: Any, change: Callable[[Any], Any] = lambda batch: batch) -> None:
        self.loader, self.change = loader, change

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self.change, self.loader)


class Passing(Around):
    """A loader around another one that passes on set_epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.loader.sampler.set_epoch(epoch)


class Cycling(Passing):
    """A loader that reads its first batches again and again."""

    def __iter__(self) -> Iterator[Any]:
        first = [batch for batch, _ in zip(self.loader, range(3), strict=False)]
        return (first[i % 3] for i in range(len(self.loader)))


# ---- faults


@fault("inputs ×1e4 on a rank", "input.scale", models=FLOATS)
def scaled(s: Setup) -> None:
    s.x = s.x * (1e4 if s.is_faulty else 1.0)


@fault("labels shuffled on a rank", "loss.trivial", "data.labels", "loss.flat")
def shuffled(s: Setup) -> None:
    s.n_epoch = 3 * s.world  # as loss.trivial needs 200 batches
    if s.is_faulty:
        order = torch.randperm(len(s.y), generator=torch.Generator().manual_seed(s.seed))
        s.y = s.y.flatten()[torch.randperm(s.y.numel())].view_as(s.y) if s.y.ndim > 1 else s.y[order]


@fault("a slow rank", "time.straggler")
def slow(s: Setup) -> None:
    s.n_epoch = 6  # blocks of steps
    s.cbs.append(Act("before_batch", lambda learn: time.sleep(0.02 * s.is_faulty)))


@fault("a rank whose data repeat", "data.repeated")
def repeating(s: Setup) -> None:
    s.loader = Cycling if s.is_faulty else Passing


@fault("all ranks read the same batches", "data.duplicated", ranks=())
def same_batches(s: Setup) -> None:
    s.sampler = lambda dataset: DistributedSampler(dataset, 1, 0, seed=s.seed)
    s.n_epoch = 2


@fault("a parameter that is changed on a rank", "replica.diverged")
def drifting(s: Setup) -> None:
    def drift(learn: Any) -> None:
        list(learn.model.parameters())[-1].add_(1e-5 * s.is_faulty)

    s.cbs.append(Act("after_step", drift))


@fault("a learning rate that changes on a rank", "replica.settings")
def other_rate(s: Setup) -> None:
    def change(learn: Any) -> None:
        for group in learn.opt.param_groups:
            group["lr"] *= 1.001 if s.is_faulty else 1

    s.cbs.append(Act("after_step", change))


@fault("a buffer that is changed on a rank", "replica.buffers")
def drifting_buffer(s: Setup) -> None:
    s.model.register_buffer("temperature", torch.ones(3))
    s.ddp["broadcast_buffers"] = False
    s.cbs.append(Act("after_step", lambda learn: learn.model.module.temperature.add_(0.1 * s.is_faulty)))


@fault("the same seed on all ranks, with dropout", "random.duplicated", ranks=())
def same_seed(s: Setup) -> None:
    dropping(s)
    s.seeds = (s.seed,) * s.world


@fault("set_epoch is hidden", "data.same_order", ranks=())
def hidden_epoch(s: Setup) -> None:
    s.loader = Around


@fault("batch norm statistics that differ", "replica.buffers", ranks=(), models=["cnn"])
def other_statistics(s: Setup) -> None:
    s.ddp["broadcast_buffers"] = False
    s.x = s.x + 2.0 * s.is_faulty


@fault("gradients that are averaged twice", "grad.rescaled", ranks=())
def averaged_twice(s: Setup) -> None:
    def divide(learn: Any) -> None:
        for p in learn.model.parameters():
            p.grad.div_(s.world)

    s.cbs.append(Act("after_backward" if s.seed % 2 else "before_step", divide))


@fault("gradients that are summed on top", "grad.rescaled", ranks=())
def summed_on_top(s: Setup) -> None:
    s.lr /= s.world

    def add(learn: Any) -> None:
        for p in learn.model.parameters():
            distributed.all_reduce(p.grad)

    s.cbs.append(Act("after_backward", add))


@fault("NaN in a batch of a rank", "input.nonfinite", models=FLOATS)
def nan(s: Setup) -> None:
    if s.is_faulty:
        s.x = s.x.clone()
        s.x[: len(s.x) // 2, ..., 3] = torch.nan


# ---- controls


@control("nothing planted")
def plain(s: Setup) -> None: ...


@control("batch sizes that differ between ranks")
def other_sizes(s: Setup) -> None:
    class Half(DistributedSampler):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter(list(super().__iter__())[: self.num_samples // 2])

        def __len__(self) -> int:
            return self.num_samples // 2

    if s.is_faulty:
        s.size //= 2  # so the other ranks have more work; they are slower by less than 3 ms
        s.sampler = lambda dataset: Half(dataset, seed=s.seed)


@control("a last batch that is smaller")
def uneven(s: Setup) -> None:
    s.x, s.y = s.x[: -5 * s.world], s.y[: -5 * s.world]


@control("dropout with a seed for each rank")
def dropping(s: Setup) -> None:
    torch.manual_seed(s.seed)
    kinds = {
        "mlp": lambda: Mlp(drop=0.2),
        "cnn": lambda: nn.Sequential(Cnn(), nn.Identity()),
        "text": lambda: Text(drop=0.1),
    }
    s.model = kinds[s.kind]()
    if s.kind == "cnn":
        s.model[0].act2 = nn.Sequential(nn.ReLU(), nn.Dropout2d(0.2))


@control("shards in which some classes are more frequent", models=FLOATS)
def skewed(s: Setup) -> None:
    n = len(s.x) - N_VALID
    rng = torch.Generator().manual_seed(s.seed + s.rank)
    weights = 1.0 + 0.5 * ((s.y[:n] % s.world) == s.rank).float()
    rows = torch.multinomial(weights, n, replacement=False, generator=rng)
    order = torch.cat([rows[: n * 3 // 4], rows[: n - n * 3 // 4], torch.arange(n, len(s.x))])
    s.x, s.y = s.x[order], s.y[order]


@control("gradient accumulation")
def accumulating(s: Setup) -> None:
    s.cbs.append(GradientAccumulation(4))


@control("averaged weights")
def averaging(s: Setup) -> None:
    s.cbs.append(EMA(0.98))


@control("clipped gradients")
def clipping(s: Setup) -> None:
    s.cbs.append(GradientClip(0.5))


@control("AdamW in one cycle")
def cycle(s: Setup) -> None:
    s.opt, s.lr, s.is_cycle = AdamW, 3e-3, True


@control("a short fit")
def short(s: Setup) -> None:
    n = 8 * s.size * s.world
    s.x, s.y = torch.cat([s.x[:n], s.x[-N_VALID:]]), torch.cat([s.y[:n], s.y[-N_VALID:]])
    s.n_epoch = 1


@control("rank 0 is slow in validation")
def slow_validation(s: Setup) -> None:
    s.cbs.append(Act("before_validate", lambda learn: time.sleep(0.3 * (s.rank == 0))))


@control("rank 0 logs every tenth batch")
def logging(s: Setup) -> None:
    def log(learn: Any) -> None:
        if s.rank == 0 and learn.train_iter % 10 == 0:
            json.dumps([float(p.norm()) for p in learn.model.parameters()])

    s.cbs.append(Act("after_step", log))


@control("each rank keeps its batch norm statistics", models=["cnn"])
def own_statistics(s: Setup) -> None:
    s.ddp["broadcast_buffers"] = False


@control("augmentation with a seed for each rank", models=FLOATS)
def augmented(s: Setup) -> None:
    s.loader = lambda loader: Passing(
        loader, lambda batch: (batch[0] + 0.1 * torch.randn(batch[0].shape), batch[1])
    )


@control("samples in a fixed order")
def fixed_order(s: Setup) -> None:
    s.sampler = lambda dataset: DistributedSampler(dataset, shuffle=False)


@control("lists of batches")
def lists(s: Setup) -> None:
    s.loader = list


@control("a batch that is overfitted on purpose")
def overfitted(s: Setup) -> None:
    s.loader = lambda loader: [next(iter(loader))] * 40
    s.n_epoch = 2


@control("a parameter that DDP leaves out on purpose")
def left_out(s: Setup) -> None:
    s.model.own = nn.Parameter(torch.zeros(3))
    with torch.no_grad():
        s.model.own += s.rank
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(s.model, ["own"])
    s.model.own.requires_grad_(False)


@control("bfloat16 autocast", models=["mlp", "text"])
def half_precision(s: Setup) -> None:
    s.cbs.append(MixedPrecision("bf16"))


# ---- on ranks


def make_setup(kind: str, seed: int) -> Setup:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if kind == "text":
        batches = text_batches(seed, size=64, n_step=24)
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    else:
        x, y = {"mlp": digits, "cnn": images}[kind](seed)
    n = N_TRAIN + N_VALID
    torch.manual_seed(seed)
    model = {"mlp": Mlp, "cnn": Cnn, "text": Text}[kind]()
    setup = Setup(kind, seed, rank, world, x[:n].clone(), y[:n].clone(), model)
    if kind == "text":
        setup.opt, setup.lr = SGD, 0.5
    return setup


def trained(case: Case, kind: str, seed: int, on_sick: str = "ignore") -> dict[str, Any]:
    """The verdict of one training, as plain values."""
    setup = make_setup(kind, seed)
    case.plant(setup)
    diagnose = Diagnose(on_sick, show=False)
    learn = setup.learner()
    torch.manual_seed((setup.seeds or range(1000 * seed, 1000 * seed + setup.world))[setup.rank])
    fit = learn.fit_one_cycle if setup.is_cycle else learn.fit
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with learn.no_logging():
            fit(setup.n_epoch, cbs=[*setup.cbs, diagnose])
    verdict = diagnose.verdict
    assert verdict is not None
    keys = ("code", "severity", "layer", "param", "ranks", "consequence_of", "message", "value")
    return {
        "status": verdict.status,
        "primary": verdict.primary.code if verdict.primary else "",
        "headline": verdict.headline,
        "findings": [{key: getattr(f, key) for key in keys} for f in verdict.findings],
        "verdict": zlib.crc32(verdict.to_json().encode()),
        "n": len(learn.recorder.losses),
    }


def work(folder: str, jobs: Sequence[tuple[str, str, int]]) -> None:
    """Train all jobs on this rank; write the results after each."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=TIMEOUT)
    cases, results = {case.name: case for case in CASES}, []
    for name, kind, seed in jobs:
        began = time.perf_counter()
        try:
            result = trained(cases[name], kind, seed)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        result["seconds"] = round(time.perf_counter() - began, 2)
        results.append(result)
        Path(folder, f"rank-{distributed.get_rank()}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


def launch(world: int, jobs: Sequence[tuple[str, str, int]]) -> list[list[dict[str, Any]]]:
    """The results of each job, for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "jobs").write_text(json.dumps(jobs))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(world), __file__, folder, "--work"]
        subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return found_in(Path(folder), world, len(jobs))


def found_in(folder: Path, world: int, n: int) -> list[list[dict[str, Any]]]:
    """What ranks have written to a folder of `n` jobs, for each rank."""
    files = [folder / f"rank-{rank}.json" for rank in range(world)]
    by_rank = [json.loads(file.read_text()) if file.exists() else [] for file in files]
    missing = {"error": "the processes have ended before"}
    return [[one[i] if i < len(one) else missing for one in by_rank] for i in range(n)]


# ---- the table


def judged(case: Case, by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a verdict is worth: whether it found the fault, named its rank, and put it first."""
    first = by_rank[0]
    if errors := [one["error"] for one in by_rank if "error" in one]:
        return {"right": False, "shown": errors[0][:80]}
    found = [f for f in first["findings"] if f["code"] in case.codes]
    alarms = [f for f in first["findings"] if f["severity"] in ALARMS and not f["consequence_of"]]
    same = len({one["verdict"] for one in by_rank}) == 1
    others = [f["code"] for f in alarms if f["code"] not in case.codes]
    is_note = bool(found) and all(f["severity"] == "info" for f in found)
    shown = ", ".join(
        f"{f['code']} {f['layer'] or f['param']} {list(f['ranks']) or ''}".strip() for f in alarms
    )
    result = {"same": same, "others": others, "shown": shown, "alarm": bool(alarms)}
    if case.codes:
        result["found"] = bool(found)
        result["named"] = any(tuple(f["ranks"]) == case.ranks for f in found)
        result["first"] = is_note or first["primary"] in case.codes
        result["right"] = same and result["found"] and result["named"] and result["first"] and not others
    else:
        result["right"] = same and not alarms
    return result


def show(console: Console, world: int, jobs: Sequence[Any], results: Sequence[Any]) -> bool:
    """Print the table of one launch; returns whether all is right."""
    cases, rows = {case.name: case for case in CASES}, {}
    for (name, kind, seed), by_rank in zip(jobs, results, strict=True):
        rows.setdefault(name, []).append((kind, seed, judged(cases[name], by_rank)))
    table = Table("", "runs", "found", "rank named", "first", "other alarms", "wrong", title=f"{world} ranks")
    totals = {True: [0] * 6, False: [0] * 6}
    for name, runs in rows.items():
        of_fault = bool(cases[name].codes)
        counts = [len(runs)]
        counts += [sum(bool(r.get(key)) for _, _, r in runs) for key in ("found", "named", "first")]
        counts += [sum(bool(r.get("others") or "error" in r) for _, _, r in runs)]
        wrong = [f"{kind} {seed}: {r['shown'] or 'nothing'}" for kind, seed, r in runs if not r["right"]]
        shown = [str(n) if of_fault or i in (0, 4) else "" for i, n in enumerate(counts)]
        table.add_row(name, *shown, "; ".join(wrong))
        totals[of_fault] = [a + b for a, b in zip(totals[of_fault], [*counts, len(wrong)], strict=True)]
    console.print(table)
    for of_fault, what in ((True, "faults"), (False, "controls")):
        n, found, named, first, others, wrong = totals[of_fault]
        more = f"found {found}, rank named {named}, first {first}, " if of_fault else ""
        console.print(f"{what}: {n} trainings, {more}with {'other' if of_fault else 'any'} alarms {others}")
    return not (totals[True][-1] or totals[False][-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--only", nargs="*", default=["*"], help="globs on names of cases")
    parser.add_argument("--save", help="write the results to this file, as JSON")
    parser.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.folder, json.loads(Path(args.folder, "jobs").read_text()))
        return 0
    chosen = [case for case in CASES if any(fnmatch(case.name, only) for only in args.only)]
    jobs = [
        (c.name, kind, seed)
        for seed in args.seeds
        for c in chosen
        for kind in args.models
        if kind in c.models
    ]
    console, is_right = Console(width=150), True
    for world in args.world:
        results = launch(world, jobs)
        if args.save:
            Path(f"{args.save}.{world}").write_text(json.dumps([*zip(jobs, results, strict=True)], indent=1))
        is_right &= show(console, world, jobs, results)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
