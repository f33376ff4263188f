"""One of several processes that train a sharded or replicated model. Run by test_shards.py."""

import math
import os
import sys
import traceback
import warnings
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from hookcb import (
    EMA,
    ActivationStats,
    Callback,
    CancelBatchException,
    GradientClip,
    GradientHealth,
    Learner,
    MixedPrecision,
    NanTrace,
    TerminateOnNaN,
    watch,
)

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(3))
Y = (X.sum(1) > 0).long()
FLAT = {"device_id": torch.device("cpu")}  # else FullyShardedDataParallel asks for an accelerator


def make(middle=None):
    torch.manual_seed(0)
    first, second, third = nn.Linear(5, 8), nn.Linear(8, 130), nn.Linear(130, 12)
    with torch.no_grad():  # a ReLU that is off leaves rows of the gradient zero
        second.weight[3:6], second.bias[3:6] = 0, -1e3
    middle = middle or nn.ReLU()
    return nn.Sequential(first, nn.ReLU(), second, middle, third, nn.LayerNorm(12), nn.Linear(12, 2))


def learner(model, n, i, opt=torch.optim.SGD, **options):
    """A learner with the `i`-th of `n` parts of each batch."""
    inputs = X.to(next(model.parameters()).dtype)
    batches = [(x.chunk(n)[i], y.chunk(n)[i]) for x, y in zip(inputs.split(8), Y.split(8), strict=True)]
    return Learner(
        (batches[:4], [(inputs[32:], Y[32:])]), model, nn.functional.cross_entropy, opt, lr=0.1, **options
    )


def fit(model, n, i, *cbs, epochs=2, **options):
    learn = learner(model, n, i, **options)
    with learn.no_logging():
        learn.fit(epochs, cbs=list(cbs))
    return learn


def sharded(model, **options):
    for k in (0, 2, 4):
        fully_shard(model[k], **options)
    return fully_shard(model, **options)


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}


def divided(model, mesh):
    return parallelize_module(model, mesh, PLAN)


def flat(model, orig):
    wrap = partial(FullyShardedDataParallel, use_orig_params=orig, **FLAT)
    return wrap(nn.Sequential(wrap(checkpoint_wrapper(model[0])), *model[1:]))


def whole(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def distance(xs, ys):
    return max(float((x - y).detach().abs().max()) for x, y in zip(xs, ys, strict=True))


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def errors(health, expected):
    """The largest relative errors, by statistic."""
    assert health.names == expected.names, (health.names, expected.names)
    about = [h.records.about for h in (health, expected)]
    assert about[0] == about[1], about
    worst = {}
    for name in health.names:
        for stat in health.columns:
            if stat in ("update_ratio", "drift") and about[1][name][0] > 1_024:
                continue  # of other elements
            got, want = (torch.tensor(h.series(name, stat)) for h in (health, expected))
            assert torch.equal(got.isnan(), want.isnan()), (name, stat, got, want)
            error = float(((got - want).nan_to_num() / want.nan_to_num().abs().clamp(min=1e-3)).abs().max())
            worst[stat] = max(worst.get(stat, 0.0), error)
    for stat in ("total_norm", "clipped_total_norm", "clip_coef"):
        got, want = (torch.tensor(h.step_series(stat)) for h in (health, expected))
        worst[stat] = float(((got - want) / want).abs().max())
    return worst


def gradients_of(model, n, i):
    learn = fit(model, n, i, GradientHealth(detail_every=1), GradientClip(0.5))
    one = fit(make().double(), 1, 0, GradientHealth(detail_every=1), GradientClip(0.5))
    clip = [torch.tensor(x.gradient_clip.norms) for x in (learn, one)]
    found = errors(learn.gradient_health, one.gradient_health)
    return found | {"clip": float((clip[0] - clip[1]).abs().max())}


# ---- two ranks


def fsdp_gradients(rank):
    return gradients_of(sharded(make().double()), 2, rank)


def tp_gradients(rank):
    return gradients_of(divided(make().double(), init_device_mesh("cpu", (2,))), 1, 0)


class Block(nn.Module):
    """A block of a transformer, without attention."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.out = (
            nn.LayerNorm(8),
            nn.Linear(8, 16),
            nn.Linear(16, 8),
            nn.Linear(8, 2),
        )

    def forward(self, x):
        x = x[..., None] * torch.arange(1, 9, dtype=x.dtype) / (1 + x[..., None].abs())
        return self.out(self.down(self.up(self.norm(x)).relu())).mean(1)


def sequence_parallel_gradients(rank):
    """Ranks have summands of the gradients of the LayerNorm."""

    def block():
        torch.manual_seed(0)
        return Block().double()

    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    model = parallelize_module(block(), init_device_mesh("cpu", (2,)), plan)
    learn, one = (fit(m, 1, 0, GradientHealth(detail_every=1), GradientClip(0.1)) for m in (model, block()))
    return errors(learn.gradient_health, one.gradient_health)


def reductions(rank):
    """Number of collectives of 8 steps that are all recorded, and of 8 of which one is."""
    counts = []
    for every in (1, 1_000):
        with Collectives() as seen:
            fit(sharded(make()), 2, rank, GradientHealth(every=every))
        counts.append(len(seen.names))
    return counts


class SpoilGradient(Callback):
    order = -1_000

    def before_step(self):
        part = self.model[0].weight.grad.to_local()
        if self.train_iter == 3 and dist.get_rank() == 1:
            part[0, 0] = math.nan


def bad_gradients(rank):
    skipping = fit(sharded(make()), 2, rank, SpoilGradient(), GradientHealth(on_nonfinite="skip"), epochs=1)
    try:
        fit(sharded(make()), 2, rank, SpoilGradient(), GradientHealth(on_nonfinite="raise"), epochs=1)
    except FloatingPointError as error:
        return skipping.gradient_health.skipped, skipping.gradient_health.records.first_bad, str(error)


def watched_on_one(rank, is_gathered=False):
    """A watch on rank 0 only, which must not communicate."""
    model = sharded(make())
    opt, health = torch.optim.SGD(model.parameters(), lr=0.1), GradientHealth(detail_every=1)
    if is_gathered:
        with torch.no_grad():
            model(X)
    with Collectives() as seen:
        w = watch(model, opt, [health] if rank == 0 else [])
        for x, y in zip(X.split(8)[:3], Y.split(8)[:3], strict=True):
            nn.functional.cross_entropy(model(x.chunk(2)[rank]), y.chunk(2)[rank]).backward()
            opt.step()
            opt.zero_grad()
        w.close()
    own = model[6].weight.to_local().detach().norm()
    norm = health.stats[-1]["6.weight"]["weight_norm"] if rank == 0 else own
    told = health.shard, str(w.coverage), str(health.report())
    return len(seen.names), *told, abs(float(norm - own)), health.without_grad


def refused_to_watch(rank):
    """What a watch on one rank says to a callback that would decide on its own."""
    model = sharded(make())
    try:
        watch(model, torch.optim.SGD(model.parameters(), lr=0.1), [GradientHealth(on_nonfinite="skip")])
    except ValueError as error:
        return (str(error),)


def averaged(rank):
    one, learn = fit(make(), 1, 0, EMA(0.8)), fit(sharded(make()), 2, rank, EMA(0.8))
    trained = whole(learn.model)
    with Collectives() as seen, learn.ema.applied(learn.model):
        pass
    with learn.ema.applied(learn.model):
        averages = whole(learn.model)
    try:
        refusal = learn.ema.model
    except AttributeError as error:
        refusal = str(error)
    losses = [x.recorder.rows[-1]["valid_loss"] for x in (one, learn)]
    return {
        "trained": distance(trained, whole(one.model)),
        "averages": distance(averages, whole(one.ema.model)),
        "after": distance(whole(learn.model), trained),
        "loss": abs(losses[0] - losses[1]),
        "collectives": len(seen.names),
        "refusal": refusal,
    }


def half_precision(rank):
    """Steps that were skipped, and the distance to one process."""
    found = []
    for dtype, options in (("bf16", {}), ("fp16", {"init_scale": 2.0**60}), ("fp16", {"init_scale": 1.0})):
        cbs = [MixedPrecision(dtype, **options), GradientClip(0.3), GradientHealth(detail_every=1)]
        learn = fit(sharded(make()), 2, rank, *cbs)
        cbs = [MixedPrecision(dtype, **options), GradientClip(0.3), GradientHealth(detail_every=1)]
        one = fit(make(), 1, 0, *cbs)
        skipped = [x.mixed_precision.skipped for x in (learn, one)]
        found.append(
            (*skipped, learn.gradient_health.skipped, distance(whole(learn.model), whole(one.model)))
        )
    return found


def forward_before_fit(rank):
    """A forward without a backward leaves parameters gathered, which an optimizer must not get."""
    learn, other = learner(sharded(make()), 2, rank), learner(sharded(make()), 2, rank)
    with torch.no_grad():
        learn.model(X)
    learn.validate()
    for x in (learn, other):
        with x.no_logging():
            x.fit(1)
    return distance(whole(learn.model), whole(other.model))


def only_the_root(rank):
    """Whether ranks are found while all parameters are gathered."""
    model = fully_shard(make())
    with torch.no_grad():
        model(X)
    return fit(model, 2, rank, epochs=1).ranks.world


def old_fsdp(rank, orig):
    one = fit(make(), 1, 0, GradientHealth(detail_every=1), EMA(0.8))
    learn = fit(flat(make(), orig), 2, rank, ActivationStats(), GradientHealth(detail_every=1), EMA(0.8))
    health, expected = learn.gradient_health, one.gradient_health
    norms = [torch.tensor(x.step_series("total_norm")) for x in (health, expected)]
    each = [
        health.series(name, "norm")[-1] - expected.series(name, "norm")[-1] for name in expected.names if orig
    ]
    losses = [x.recorder.rows[-1]["valid_loss"] for x in (one, learn)]
    return {
        "names": health.names,
        "layers": learn.activation_stats.names,
        "without_grad": health.without_grad,
        "error": max([float((norms[0] - norms[1]).abs().max()), *map(abs, each)]),
        "loss": abs(losses[0] - losses[1]),
    }


def wrapped_names(rank):
    model = make()
    for k in (0, 2):
        model[k] = checkpoint_wrapper(model[k])
    learn = fit(
        DistributedDataParallel(model), 2, rank, ActivationStats(), GradientHealth(detail_every=1), epochs=1
    )
    return learn.gradient_health.names, learn.activation_stats.names


class LogHere(nn.Module):
    is_bad = False

    def forward(self, x):
        return x + ((x - 1e4) if self.is_bad else (x + 1e4)).log()  # here


class RootHere(nn.Module):
    is_bad = False

    def forward(self, x):
        return x + (x * 0 if self.is_bad else x * x + 1).sqrt()  # here


class Spoil(Callback):
    """Has rank 1 make a NaN in batch 2."""

    order = -10

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def before_batch(self):
        is_bad = self.training and self.iter == 2 and dist.get_rank() == 1
        for m in self.model.modules():
            if isinstance(m, LogHere | RootHere):
                m.is_bad = is_bad
        if is_bad and self.batch:
            self.learn.xb = (self.x * math.nan,)


def traced(rank, wrap, n=2, **options):
    found, i = [], rank % n
    for middle in (None, LogHere(), RootHere()):
        model = wrap(make(middle))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            learn = fit(model, n, i, Spoil(batch=middle is None), NanTrace(**options), epochs=1)
        told = [str(w.message) for w in told if "nan_trace.report" in str(w.message)]
        report = learn.nan_trace.report
        found.append((report.summary, report.rank, report.op, len(learn.recorder.losses), len(told)))
        if middle is not None:
            middle.is_bad = False
        again = fit(model, n, i, NanTrace(), epochs=1)
        assert again.nan_trace.report is None
        assert len(again.recorder.losses) == 4
    return found


def traced_under_ddp(rank):
    return traced(rank, DistributedDataParallel)


def traced_under_fsdp(rank):
    return traced(rank, sharded)


def traced_under_tp(rank):
    return traced(rank, partial(divided, mesh=init_device_mesh("cpu", (2,))), n=1)


def ended(rank):
    """TerminateOnNaN on shards."""
    with warnings.catch_warnings(action="ignore"):
        learn = fit(sharded(make()), 2, rank, Spoil(batch=True), TerminateOnNaN())
    return len(learn.recorder.losses), learn.terminate_on_nan.reason


def traced_and_skipped(rank):
    """A cancel by all ranks at an event at which another callback declares what it may cancel."""
    learn = fit(DistributedDataParallel(make()), 2, rank, Spoil(batch=True), NanTrace(), SkipNonFinite())
    return len(learn.recorder.losses), learn.nan_trace.report.rank


def bundled(rank):
    path = f"{sys.argv[2]}/bundle.pt"
    traced(rank, DistributedDataParallel, bundle=path)
    dist.barrier()
    report = torch.load(path, weights_only=True)["report"]
    return report["rank"], report["op"]


def overflowed(rank):
    """A GradScaler's overflow is no finding on any rank."""
    cbs = MixedPrecision("fp16", init_scale=2.0**60), NanTrace()
    learn = fit(DistributedDataParallel(make()), 2, rank, *cbs)
    return learn.nan_trace.report, learn.mixed_precision.skipped


class SkipNonFinite(Callback):  # as in the README
    may_cancel = frozenset({"batch"})

    def before_fit(self):
        self.skipped = 0

    def after_loss(self):
        if not self.loss.isfinite():
            self.skipped += 1
            raise CancelBatchException


def skipped_batches(rank):
    found = []
    for wrap in (DistributedDataParallel, sharded):
        learn = fit(wrap(make()), 2, rank, Spoil(batch=True), SkipNonFinite())
        weights = whole(learn.model)
        same = [x.clone() for x in weights]
        for x in same:
            dist.broadcast(x, 0)
        found.append((learn.skip_non_finite.skipped, len(learn.recorder.losses), distance(same, weights)))
    return found


# ---- four ranks


def hybrid_gradients(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return gradients_of(sharded(make().double(), mesh=mesh), 4, rank)


def mixed_gradients(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(divided(make().double(), mesh["tp"]), mesh=mesh["dp"])
    return gradients_of(model, 2, mesh["dp"].get_local_rank())


def gradients_of_four(rank):
    """With more ranks than a parameter has rows, some have no part of it."""
    return gradients_of(sharded(make().double()), 4, rank)


TWO = {
    f.__name__: f
    for f in (
        fsdp_gradients,
        tp_gradients,
        sequence_parallel_gradients,
        reductions,
        bad_gradients,
        watched_on_one,
        refused_to_watch,
        averaged,
        half_precision,
        forward_before_fit,
        only_the_root,
        wrapped_names,
        traced_under_ddp,
        traced_under_fsdp,
        traced_under_tp,
        ended,
        traced_and_skipped,
        bundled,
        overflowed,
        skipped_batches,
    )
} | {
    "watched_when_gathered": partial(watched_on_one, is_gathered=True),
    "traced_under_old_fsdp": partial(traced, wrap=partial(flat, orig=True)),
    "old_fsdp": partial(old_fsdp, orig=True),
    "flat_fsdp": partial(old_fsdp, orig=False),
}
FOUR = {f.__name__: f for f in (gradients_of_four, hybrid_gradients, mixed_gradients)}


def main():
    rank, folder = int(sys.argv[1]), sys.argv[2]
    world = 4 if "four" in os.path.basename(folder) else 2
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=15))
    results = {}
    for name, case in (FOUR if world == 4 else TWO).items():
        try:
            results[name] = case(rank)
        except Exception:
            results[name] = traceback.format_exc()
            break
    torch.save(results, f"{folder}/{rank}.pt")
    if not any(isinstance(r, str) for r in results.values()):
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # with gloo the process may abort at a normal exit


if __name__ == "__main__":
    main()
