"""One of several ranks; records what layers put out: `activations_worker.py FOLDER CASE,CASE`.

Run by tests/activations/test_merge.py.
"""

import hashlib
import math
import shutil
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hookcb import (
    ActivationStats,
    Callback,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelTrainException,
    Checkpoint,
    HookCallback,
    Learner,
    watch,
)
from hookcb.processes import exchange
from tests.ranks.support import answer, join_group
from tests.ranks.trace_worker import Trace

RANK, WORLD = 0, 1
FOLDER = Path()
STATS = ("mean", "std", "min", "max", "abs_max", "near_zero", "zeros", "nonfinite", "rms", "kurtosis")
SIZES = [[3, 5, 1, 4], [7, 2, 6, 8], [1, 1, 2, 3], [9, 1, 1, 1]]  # of batches, by rank


def inputs(dtype=torch.float64, mean=0.0, seed=5):
    """Batches of all ranks."""
    g = torch.Generator().manual_seed(seed)
    return [
        [(mean + torch.randn(n, 4, generator=g, dtype=torch.float64)).to(dtype) for n in sizes]
        for sizes in SIZES[:WORLD]
    ]


def labelled(xs):
    return [(x, torch.zeros(len(x)).long()) for x in xs]


def small(first=None):
    torch.manual_seed(0)
    return nn.Sequential(first or nn.Identity(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def fitted(train, valid=None, model=None, n=1, cbs=(), **options):
    """A fit on this rank's batches."""
    model = DistributedDataParallel(model or small(), find_unused_parameters=True)
    learn = Learner((train, valid), model, cross_entropy, lr=0.01)
    stats = options.pop("stats", None) or ActivationStats(**{"include_paramless": True} | options)
    with learn.no_logging():
        learn.fit(n, cbs=[stats, *cbs])
    return learn, stats


def oracle(x, eps=0.05):
    x = x.double().flatten()
    good = x[x.isfinite()]
    near, zeros = (x.abs() <= eps).double().mean().item(), (x == 0).double().mean().item()
    low, high = good.min().item(), good.max().item()
    z = x - x.mean()
    last = x.square().mean().sqrt().item(), ((z**4).mean() / z.square().mean() ** 2).item()
    first = x.mean().item(), x.std().item(), low, high, max(high, -low)
    return [*first, near, zeros, len(x) - len(good), *last]


def off(found, expected):
    """Largest relative difference of each statistic over the records."""
    pairs = [
        [(row[stat], want) for stat, want in zip(STATS, wants, strict=True)]
        for row, wants in zip(found, expected, strict=True)
    ]
    return [
        max(abs(a - b) / max(abs(b), 1e-300) if a != b else 0.0 for a, b in column)
        for column in zip(*pairs, strict=True)
    ]


def digest(stats):
    """Of all numbers, to the bit."""
    stores = [stats.store_of(phase) for phase in ("train", "valid")]
    texts = [
        f"{store.infos}{[(name, store.series(name).tolist()) for name in store.names]}" for store in stores
    ]
    return hashlib.sha1("".join(texts).encode()).hexdigest()[:8]


def about(stats):
    return {
        "names": stats.names,
        "coverage": str(stats.coverage),
        "digest": digest(stats),
        "left_out": stats.left_out,
    }


# ---- data parallel


def all_samples():
    xs, vs = inputs(mean=1e6), inputs(seed=7)
    _, stats = fitted(labelled(xs[RANK]), labelled(vs[RANK][: 1 + RANK]), n=2, with_hist=True, on_valid=True)
    train = [oracle(torch.cat([x[i] for x in xs])) for i in range(4)] * 2
    n_valid = min(WORLD, 4)
    valid = [oracle(torch.cat([v[i] for r, v in enumerate(vs) if i <= r])) for i in range(n_valid)] * 2
    n = [sum(sizes[i] for sizes in SIZES[:WORLD]) * 4 for i in range(4)] * 2
    return {
        "train": off([record["0"] for record in stats.stats], train),
        "valid": off([record["0"] for record in stats.valid_stats], valid),
        "counted": [round(x) for x in stats.hist("0").expm1().sum(0).tolist()] == n,
        "n_valid": len(stats.valid_stats),
        "edges": stats.hist_edges("0").tolist(),
        "report": "all samples on" in str(stats.report()),
        **about(stats),
    }


def large_outputs():
    """Above the number of elements up to which all are kept."""
    g = torch.Generator().manual_seed(3 + RANK)
    x = 1e3 + torch.randn(8, 4, generator=g)
    parts = [1e3 + torch.randn(8, 4, generator=torch.Generator().manual_seed(3 + r)) for r in range(WORLD)]

    class Wide(nn.Module):
        def forward(self, x):
            return x.repeat(1, 3000)

    model = nn.Sequential(Wide(), nn.Linear(12_000, 2))
    torch.manual_seed(0)
    _, stats = fitted([(x, torch.zeros(8).long())], model=model, with_hist=True)
    whole = torch.cat(parts).repeat(1, 3000)
    return [*off([stats.stats[0]["0"]], [oracle(whole)])[:5], stats.hist("0").expm1().sum().item()]


def odd_layers():
    """Layers that some ranks call, or call twice, in some batches; NaN, infinite and empty outputs."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.tag, self.extra, self.fc = nn.Identity(), nn.Identity(), nn.Linear(4, 2)
            self.n = 0

        def forward(self, x):
            self.n += 1
            if self.n == 2 and RANK == WORLD - 1:
                self.extra(x)
            if self.n == 3 and RANK == 0:
                self.tag(x)
            if self.n == 4:
                x = x.clone()
                x[0, 0] = math.nan if RANK == 0 else math.inf
                return self.fc(self.tag(x[:0] if RANK == 0 else x)).sum() + self.fc(x.nan_to_num(0, 0, 0))
            return self.fc(self.tag(x))

    xs = inputs(torch.float32)
    with warnings.catch_warnings(action="ignore"):
        _, stats = fitted(labelled(xs[RANK]), model=Odd(), with_hist=True)
    rows = stats.stats
    return {
        "extra": off([rows[1]["extra"]], [oracle(xs[WORLD - 1][1])]),
        "others": [math.isnan(rows[i]["extra"]["mean"]) for i in (0, 2, 3)],
        "once": off([rows[2]["tag"]], [oracle(torch.cat([x[2] for x in xs[1:]]))]),
        "twice": off([rows[2]["tag#1"]], [oracle(xs[0][2])]),
        "nonfinite": [rows[3]["tag"]["nonfinite"], str(rows[3]["tag"]["mean"])],
        **about(stats),
    }


def collectives():
    """Per looked-at batch, and outside of them; the traces must be equal."""
    traces = {}
    for every in (None, 1, 2):
        cbs = [] if every is None else [ActivationStats(every=every, with_hist=True)]
        learn = Learner(
            (labelled(inputs()[RANK]) * 3, None), DistributedDataParallel(small()), cross_entropy, lr=0.0
        )
        with Trace() as trace, learn.no_logging():
            learn.fit(1, cbs=cbs)
        traces[every] = trace.ops
    return {"n": [len(ops) for ops in traces.values()], "ops": traces}


def arguments_that_differ():
    fitted(labelled(inputs()[RANK]), every=1 + (RANK > 0))


def own_schedule():
    """A subclass that decides by rank which batches it wants."""

    class Mine(ActivationStats):
        def wants(self, i):
            return (i + RANK) % 2 == 0

    xs = inputs()
    _, stats = fitted(labelled(xs[RANK]), stats=Mine(include_paramless=True))
    mine = [oracle(x) for i, x in enumerate(xs[RANK]) if (i + RANK) % 2 == 0]
    return {
        "off": max(off([record["0"] for record in stats.stats], mine)),
        "report": f"those of rank {RANK} of" in str(stats.report()),
    }


def own_hooks():
    """A hook of the user, and a subclass that changes `hook`: results are of the rank."""
    xs = inputs()

    class Doubled(ActivationStats):
        def hook(self, m, *seen):
            super().hook(m, *seen[:-1], seen[-1] * 2)

    means = HookCallback(lambda m: isinstance(m, nn.Identity), hook=lambda m, i, o: o.mean().item())
    _, stats = fitted(labelled(xs[RANK]), cbs=[means], stats=Doubled(include_paramless=True))
    whole = [oracle(torch.cat([x[i] for x in xs]) * 2) for i in range(4)]
    return {
        "mean": abs(means.results["0"] - xs[RANK][-1].mean().item()),
        "doubled": max(off([record["0"] for record in stats.stats], whole)),
    }


class CancelsOnce(Callback):
    may_cancel = frozenset({"batch"})

    def __init__(self, cancel, training):
        super().__init__()
        self.cancel, self.when = cancel, training

    def after_pred(self):
        if self.training == self.when and self.iter == 1 and self.epoch == 0 and RANK == WORLD - 1:
            raise self.cancel


def cancels():
    """Of a batch of the training or the validation, or of the epoch in a validation, by one rank."""
    xs = labelled(inputs()[RANK])
    found = []
    for cancel, training in (
        (CancelBatchException, True),
        (CancelBatchException, False),
        (CancelEpochException, False),
    ):
        _, stats = fitted(xs, xs, n=2, on_valid=True, cbs=[CancelsOnce(cancel, training)])
        found.append([len(stats.stats), len(stats.valid_stats), digest(stats)])
    return found


class Stops(Callback):
    def after_batch(self):
        if self.training and self.epoch == 1 and self.iter == 1:
            raise CancelFitException


def resumed():
    folder = FOLDER / "resumed"
    if RANK == 0:
        shutil.rmtree(folder, ignore_errors=True)
    distributed.barrier()
    xs = labelled(inputs()[RANK])
    _, whole = fitted(xs, n=3, with_hist=True)
    fitted(xs, n=3, with_hist=True, cbs=[Checkpoint(folder), Stops()])
    distributed.barrier()
    learn = Learner(
        (xs, None), DistributedDataParallel(small(), find_unused_parameters=True), cross_entropy, lr=0.01
    )
    stats = ActivationStats(include_paramless=True, with_hist=True)
    with learn.no_logging():
        learn.fit(3, cbs=[stats, Checkpoint(folder)], resume="latest")
    file = stats.save(FOLDER / f"stats-{RANK}.pt")
    loaded = ActivationStats.load(file)
    return {
        "same": digest(stats) == digest(whole),
        "loaded": digest(loaded) == digest(whole) and str(loaded.report()) == str(stats.report()),
        "digest": digest(whole),
    }


# ---- parts of a layer


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.w1, self.act, self.w2 = nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 8)
        self.post, self.head = nn.ReLU(), nn.Linear(8, 2)

    def forward(self, x):
        x = self.w2(self.act(self.w1(self.norm(self.emb(x)))))
        return self.head(self.post(x).mean(1))


def tokens(rank=0):
    g = torch.Generator().manual_seed(rank)
    x = [torch.randint(0, 10, (6, 4), generator=g) for _ in range(3)]
    return [(x, torch.arange(6) % 2) for x in x]


def of_block(wrap, data):
    torch.manual_seed(0)
    learn = Learner((data, None), wrap(Block()), cross_entropy, lr=0.1)
    stats = ActivationStats(include_paramless=True, with_hist=True)
    with learn.no_logging():
        learn.fit(1, cbs=stats)
    return stats


def beside_one_process(wrap, n_data=1):
    """Largest difference of any statistic, by layer; `n_data` groups of ranks have other data."""
    shards = [tokens(r) for r in range(n_data)]
    mine = shards[RANK * n_data // WORLD]
    together = [tuple(map(torch.cat, zip(*batches, strict=True))) for batches in zip(*shards, strict=True)]
    alone, stats = of_block(lambda m: m, together), of_block(wrap, mine)
    apart = {
        name: max(
            abs(a[name][stat] - b[name][stat]) / max(1, abs(a[name][stat]))
            for a, b in zip(alone.stats, stats.stats, strict=True)
            for stat in STATS
        )
        if name in stats.names
        else "no record"
        for name in alone.names
    }
    counts = {
        name: (alone.hist(name).expm1().sum() - stats.hist(name).expm1().sum()).abs().item()
        for name in stats.names
    }
    types = sorted({kind for kind, _ in stats.outputs.values()})
    return {"apart": apart, "counts": counts, "types": types, **about(stats)}


MLP = {"w1": ColwiseParallel(), "w2": RowwiseParallel()}
OF_DTENSORS = {
    "w1": ColwiseParallel(use_local_output=False),
    "w2": RowwiseParallel(use_local_output=False),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
OF_SUMMANDS = OF_DTENSORS | {"w2": RowwiseParallel(use_local_output=False, output_layouts=Partial())}
OF_SEQUENCES = {
    "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "w1": ColwiseParallel(input_layouts=Shard(1)),
    "w2": RowwiseParallel(output_layouts=Replicate()),
}


def parallel(plan, mesh=None):
    return lambda m: parallelize_module(m, mesh or init_device_mesh("cpu", (WORLD,)), plan)


def tensor_parallel():
    return beside_one_process(parallel(MLP))


def tensor_parallel_dtensors():
    return beside_one_process(parallel(OF_DTENSORS))


def summands():
    return about(of_block(parallel(OF_SUMMANDS), tokens()))


def changed_in_place():
    """After a layer whose output was still awaited; in a validation, as autograd forbids it in training."""

    def wrap(m):
        m.post.inplace = True
        return parallel(MLP)(m)

    torch.manual_seed(0)
    learn = Learner((tokens(), tokens()), wrap(Block()), cross_entropy, lr=0.1)
    stats = ActivationStats(include_paramless=True, on_valid=True)

    class Only(Callback):
        def before_train(self):
            raise CancelTrainException

    with learn.no_logging():
        learn.fit(1, cbs=[stats, Only()])
    return {"n": len(stats.valid_stats), **about(stats)}


def sequence_parallel():
    return beside_one_process(parallel(OF_SEQUENCES))


def sharded(m, mesh=None):
    for layer in (m.norm, m.w1, m.w2, m.head):
        fully_shard(layer, mesh=mesh)
    return fully_shard(m, mesh=mesh)


def fsdp2():
    return beside_one_process(sharded, WORLD)


def fsdp2_and_tensor_parallel():
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    return beside_one_process(lambda m: sharded(parallel(MLP, mesh["tp"])(m), mesh["dp"]), WORLD // 2)


def flattened(m, use_orig_params=False):
    return FullyShardedDataParallel(m, device_id=torch.device("cpu"), use_orig_params=use_orig_params)


def fsdp1():
    return beside_one_process(partial(flattened, use_orig_params=True), WORLD)


def fsdp1_flat():
    return beside_one_process(flattened, WORLD)


def watched():
    """Under watch on one rank only, as nothing is communicated; slices are told."""
    torch.manual_seed(0)
    model = parallel(MLP)(Block())
    opt = torch.optim.SGD(model.parameters(), 0.1)
    stats = ActivationStats(include_paramless=True)
    w = watch(model, opt, cbs=stats) if RANK == 0 else None
    for x, y in tokens():
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    if w is not None:
        w.close()
    return (
        {"slices": sorted(stats.records.slices), "report": str(stats.report()), **about(stats)} if w else {}
    )


def main():
    global RANK, WORLD, FOLDER
    FOLDER, exchange.GRACE = Path(sys.argv[1]), 0.5
    RANK, WORLD = join_group()
    facts = {}
    for name in sys.argv[2].split(","):
        began = time.perf_counter()
        try:
            outcome = {"result": globals()[name]()}
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            outcome = {"error": type(error).__name__, "text": "\n".join([str(error), *notes])}
        outcome["seconds"] = round(time.perf_counter() - began, 2)
        facts[name] = outcome
        answer(FOLDER, facts)


if __name__ == "__main__":
    main()
