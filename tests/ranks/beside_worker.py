"""Other callbacks beside `Distributed`, as one of the ranks: `beside_worker.py FOLDER MODE/CASE,MODE/CASE`.

Each case returns numbers, which must be those of one process that has the batches of both.
"""

import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hookcb import (
    EMA,
    ActivationStats,
    Callback,
    CancelFitException,
    ChannelsLast,
    Checkpoint,
    Compile,
    Diagnose,
    Distributed,
    EarlyStopping,
    Freeze,
    GradientAccumulation,
    GradientClip,
    GradientHealth,
    JSONLLogger,
    Learner,
    Log,
    MaxTime,
    MemoryStats,
    MixedPrecision,
    NanTrace,
    ProfilerCallback,
    ReduceLROnPlateau,
    StepTimer,
    TerminateOnNaN,
    accuracy,
    read_jsonl,
)
from hookcb.processes.groups import without_replicas
from tests.ranks import data_worker
from tests.ranks.support import data, join_group, run_cases, small_model
from tests.training.distributed_worker import quiet_fit, rows, weights

MODE, WORLD = "alone", 1  # how a case trains, and on how many ranks; alone, whose batches it has
FOLDER = Path()


def engine():
    """The callback of a mode, none alone."""
    kinds = {
        "ddp": lambda: Distributed(),
        "fsdp2": lambda: Distributed("fsdp2", shard=nn.Linear),
        "hsdp": lambda: Distributed("fsdp2", mesh={"replicate": 2, "shard": 2}),
        "tp": lambda: Distributed(prepare=parallelize, mesh={"tp": 2}),
        "hybrid": lambda: Distributed(prepare=parallelize, mesh={"dp": 2, "tp": 2}),
    }
    return [kinds[MODE]()] if MODE in kinds else []


def parallelize(model, mesh):
    tp = mesh["tp"] if MODE == "hybrid" else mesh
    parallelize_module(model, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if MODE == "hybrid":
        fully_shard(model, mesh=mesh["dp"])


def n_parts():
    """Number of parts of all samples."""
    return WORLD // 2 if MODE in ("tp", "hybrid") else WORLD


def is_culprit():
    """Whether this rank has the last part, as one has alone."""
    return not distributed.is_initialized() or (distributed.get_rank() + 1) * n_parts() > WORLD * (
        n_parts() - 1
    )


def interleaved(n):
    """The global batches of `n` processes, for one: rank r has samples r, r + n, …"""
    x, y = data(48).tensors
    places = [[4 * n * i + n * j + r for r in range(n) for j in range(4)] for i in range(48 // (4 * n))]
    return [(x[i], y[i]) for i in places]


def learner(model=small_model, opt=torch.optim.SGD, lr=0.1):
    torch.manual_seed(0)
    train = interleaved(WORLD) if MODE == "alone" else DataLoader(data(48), 4)
    valid = DataLoader(data(51, 1), 10)
    return Learner((train, valid), model(), cross_entropy, opt, lr, accuracy, engine())


def found(learn, **facts):
    return {"rows": rows(learn), "weights": weights(learn.model), **facts}


def fitted(*cbs, n=2, **kwargs):
    return quiet_fit(learner(**kwargs), n, cbs=cbs)


def accumulation():
    return found(fitted(GradientAccumulation(4)))


def clip_norm():
    learn = fitted(GradientClip(0.1))
    return found(learn, norms=learn.gradient_clip.norms, coefs=learn.gradient_clip.coefs)


def clip_value():
    learn = fitted(GradientClip(value=0.02))
    return found(learn, norms=learn.gradient_clip.norms, coefs=learn.gradient_clip.coefs)


def accumulation_and_clip():
    learn = fitted(GradientAccumulation(4), GradientClip(0.1), EMA(0.5))
    return found(learn, norms=learn.gradient_clip.norms, coefs=learn.gradient_clip.coefs)


def bf16():
    return found(fitted(MixedPrecision("bf16")))


def fp16():
    learn = fitted(MixedPrecision("fp16", init_scale=1024.0))
    return found(learn, skipped=learn.mixed_precision.skipped)


def fp16_overflow():
    learn = fitted(MixedPrecision("fp16", init_scale=2.0**40), GradientClip(0.1))
    return found(learn, skipped=learn.mixed_precision.skipped)


class Overflows(Callback):
    """Makes one gradient infinite, in the last part of the weight."""

    order = -25

    def after_backward(self):
        if self.train_iter == 3:
            grad = without_replicas(self.learn.model)[0].weight.grad
            if not hasattr(grad, "to_local"):
                grad[-1, 0] = float("inf")
            elif distributed.get_rank() % 2:  # replicas have the same
                grad.to_local()[-1, 0] = float("inf")


def fp16_overflow_in_a_part():
    learn = fitted(MixedPrecision("fp16", init_scale=1024.0), Overflows())
    return found(learn, skipped=learn.mixed_precision.skipped)


def fp16_accumulation():
    learn = fitted(MixedPrecision("fp16", init_scale=1024.0), GradientAccumulation(2))
    return found(learn, skipped=learn.mixed_precision.skipped)


def ema():
    learn = fitted(EMA(0.5))
    with learn.ema.applied(learn.model):
        averages = weights(learn.model)
    return found(learn, averages=averages)


def frozen():
    return found(fitted(Freeze("0")))


def thawed():
    return found(fitted(Freeze("0", until=1), EMA(0.5), GradientHealth(), n=3))


def param_groups():
    def make(params, lr):
        params = list(params)
        return torch.optim.AdamW([{"params": params[:2], "lr": 0.001}, {"params": params[2:]}], lr=0.01)

    return found(fitted(GradientClip(0.1), opt=make))


def lr_find():
    learn = learner()
    before = weights(learn.model)
    curve = learn.lr_find(num_it=30)
    return {
        "losses": list(curve.losses),
        "suggestion": curve.suggestion,
        "same": before == weights(learn.model),
    }


def health():
    learn = fitted(GradientHealth(every=1), ActivationStats(every=1))
    grads, acts = learn.gradient_health, learn.activation_stats
    return found(
        learn,
        norms=[list(grads.series(name, "norm")) for name in grads.names],
        updates=[list(grads.series(name, "update_ratio")) for name in grads.names],
        means=[list(acts.series(name, "mean")) for name in acts.names],
        stds=[list(acts.series(name, "std")) for name in acts.names],
    )


def diagnosis():
    learn = fitted(Diagnose(), n=4)
    return found(learn, verdict=learn.diagnose().status)


def plateau():
    lrs = []

    class Rates(Callback):
        def after_epoch(self):
            lrs.append(self.learn.opt.param_groups[0]["lr"])

    learn = fitted(ReduceLROnPlateau(min_delta=0.05), Rates(), n=5)
    return found(learn, lrs=lrs)


def early():
    return found(fitted(EarlyStopping(min_delta=0.05), n=9))


def max_time():
    learn = fitted(MaxTime(0.3), n=10_000)
    return {"ended": learn.epoch < 9_999}


def measured():
    learn = fitted(StepTimer(), MemoryStats(), ProfilerCallback())
    str(learn.step_timer.report()), str(learn.memory_stats.report())
    return found(learn)


def logged():
    file = FOLDER / f"{MODE}.jsonl"
    learn = fitted(Log(JSONLLogger(file)))
    distributed.is_initialized() and distributed.barrier()
    return found(learn, n=len(read_jsonl(file)))


def compiled():
    return found(fitted(Compile(backend="eager")))


def compiled_thawed():
    return found(fitted(Compile(backend="eager"), Freeze("0", until=1), EMA(0.5)))


def compiled_aot():
    return found(fitted(Compile(backend="aot_eager")))


def activation_checkpointing():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def wrapped():
        model = small_model()
        model[0] = checkpoint_wrapper(model[0])
        return model

    return found(fitted(GradientHealth(), ActivationStats(), Diagnose(), model=wrapped))


class Image(nn.Module):
    def forward(self, x):
        return x.view(-1, 4, 1, 1).expand(-1, -1, 3, 3)


def channels_last():
    def images():
        return nn.Sequential(Image(), nn.Conv2d(4, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))

    return found(fitted(ChannelsLast(), model=images))


class Plants(Callback):
    """Makes a batch of the last part NaN."""

    def before_batch(self):
        if self.training and self.epoch == 1 and self.iter == 2 and is_culprit():
            self.learn.xb[0][1, 2] = float("nan")


def terminate():
    learn = fitted(Plants(), TerminateOnNaN())
    return {"n_losses": len(learn.recorder.losses)}


def nan_trace():
    learn = fitted(Plants(), NanTrace())
    _, cause, *_ = str(learn.nan_trace.report).splitlines()
    return {"n_losses": len(learn.recorder.losses), "cause": cause}


def two_fits():
    learn = learner()
    quiet_fit(learn, 1)
    quiet_fit(learn, 1, lr=0.05)
    learn.lr_find(num_it=5)
    quiet_fit(learn, 1, cbs=GradientHealth())
    return found(learn)


def one_cycle():
    learn = learner()
    with learn.no_logging():
        learn.fit_one_cycle(2, 0.1)
    return found(learn, lrs=list(learn.recorder.lrs))


class Fails(Callback):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def after_batch(self):
        if self.training and self.iter == 2:
            raise self.error


def after_an_exception():
    learn, seen = learner(), []
    for error in (ValueError("planted"), KeyboardInterrupt()):
        try:
            quiet_fit(learn, 1, cbs=Fails(error))
        except BaseException as raised:
            seen.append(repr(raised))
    quiet_fit(learn, 2)
    return found(learn, seen=seen)


def replaced():
    learn = learner()
    quiet_fit(learn, 1)
    torch.manual_seed(5)
    learn.model = small_model()
    quiet_fit(learn, 2)
    preds, _ = learn.get_preds()
    return found(learn, preds=preds.tolist())


def moved():
    learn = learner()
    quiet_fit(learn, 1)
    learn.model.double().float()
    quiet_fit(learn, 1)
    return found(learn)


def one_batch():
    learn = learner()
    learn.one_batch()
    quiet_fit(learn, 1)
    return found(learn)


def summary():
    learn = quiet_fit(learner(), 1)
    return {"n": learn.summary().n_params}


class Stops(Callback):
    def after_batch(self):
        if self.training and self.epoch == 1 and self.iter == 1:
            raise CancelFitException


def resumed():
    """Ended in the second epoch, and resumed."""

    def cbs():
        return [EMA(0.5), GradientAccumulation(2), GradientClip(0.1)]

    folder = FOLDER / f"{MODE}-resumed"
    fitted(Checkpoint(folder), Stops(), *cbs(), n=3)
    learn = quiet_fit(learner(), 3, cbs=[Checkpoint(folder), *cbs()], resume="latest")
    other = learner()
    other.load(folder / ("epoch-0003" if len(engine()) else "epoch-0003.pt"))
    with learn.ema.applied(learn.model):
        average = weights(learn.model)
    return found(learn, average=average, loaded=weights(other.model), norms=learn.gradient_clip.norms)


def written_by_one():
    """One process writes, and all resume; then they write, and one resumes."""
    global MODE, WORLD
    mode, world, folder = MODE, WORLD, FOLDER / f"{MODE}-by-one"
    MODE, WORLD = "alone", n_parts()
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        fitted(Checkpoint(folder), EMA(0.5), n=1)
    MODE, WORLD = mode, world
    if distributed.is_initialized():
        distributed.barrier()
    learn = quiet_fit(learner(), 2, cbs=[Checkpoint(folder), EMA(0.5)], resume="latest")
    if distributed.is_initialized():
        distributed.barrier()
    facts = found(learn)
    MODE, WORLD = "alone", n_parts()
    written = sorted(folder.glob("epoch-0002*"))[0]
    learn = quiet_fit(learner(), 3, cbs=EMA(0.5), resume=written)
    MODE, WORLD = mode, world
    return facts | {"by_one": weights(learn.model)}


CASES = [
    accumulation, clip_norm, clip_value, accumulation_and_clip, bf16, fp16, fp16_overflow,
    fp16_overflow_in_a_part, fp16_accumulation, ema, frozen, thawed, param_groups, lr_find, health, diagnosis,
    plateau, early, max_time, measured, logged, compiled, compiled_aot, compiled_thawed,
    activation_checkpointing, channels_last, terminate, nan_trace, two_fits, one_cycle, replaced, moved,
    one_batch, summary, resumed, written_by_one, after_an_exception,
]  # fmt: skip
OF_PLAIN_LAYERS = [activation_checkpointing, channels_last]  # which tensor parallelism of torch needs


def bound(mode, world, folder, case):
    """A case of a mode, on a number of ranks, that writes to a folder."""

    def run():
        global MODE, WORLD, FOLDER
        MODE, WORLD, FOLDER = mode, world, folder
        return case()

    return run


def with_fsdp2(case):
    """A case that fails at once on all ranks if torch has no FSDP2 on CPUs; else one of them would hang."""

    def run():
        assert torch.cpu.Stream().record_event  # torch 2.6 has none
        return case()

    return run


def main():
    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    _, world = join_group()
    known = {**vars(data_worker), **globals()}
    cases = {}
    for name in names:
        mode, case = name.split("/")
        run = bound(mode, world, folder, known[case])
        cases[name] = with_fsdp2(run) if mode in ("fsdp2", "hsdp", "hybrid") else run
    run_cases(cases, folder)


if __name__ == "__main__":
    main()
