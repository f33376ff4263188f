"""Other callbacks beside `Distributed`, as one of two ranks or alone: `beside_worker.py FOLDER MODE,MODE`.

Each case returns numbers, which must be those of one process that has the batches of both.
"""

import sys
import warnings

import torch
from torch import distributed, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hookcb import (
    EMA,
    ActivationStats,
    Callback,
    ChannelsLast,
    Compile,
    Diagnose,
    Distributed,
    EarlyStopping,
    Freeze,
    GradientAccumulation,
    GradientClip,
    GradientHealth,
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
)
from tests.distributed.distributed_worker import interleaved, quiet_fit, rows, weights
from tests.ranks.support import answer, data, run_cases, small_model

MODE = "alone"


def engine():
    """The callback of a mode, none alone."""
    if MODE.startswith("alone"):
        return []
    if MODE == "ddp":
        return [Distributed()]
    if MODE == "fsdp2":
        return [Distributed("fsdp2", shard=nn.Linear)]
    return [Distributed(prepare=parallelize, mesh={"dp": 1, "tp": 2} if MODE == "hybrid" else {"tp": 2})]


def parallelize(model, mesh):
    from torch.distributed.fsdp import fully_shard

    tp = mesh["tp"] if MODE == "hybrid" else mesh
    parallelize_module(model, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if MODE == "hybrid":
        fully_shard(model, mesh=mesh["dp"])


def has_whole_batches():
    return MODE in ("tp", "hybrid", "alone_tp")


def learner(cbs=(), model=small_model, opt=torch.optim.SGD, batches=None, **kwargs):
    torch.manual_seed(0)
    train = DataLoader(data(48), 4)
    if MODE == "alone":
        train = batches or interleaved()
    valid = DataLoader(data(51, 1), 10)
    cbs = [*engine(), *cbs]
    return Learner((train, valid), model(), cross_entropy, opt, 0.1, accuracy, cbs, **kwargs)


def found(learn, **facts):
    return {"rows": rows(learn), "weights": weights(learn.model), **facts}


def fitted(*cbs, n=2, **kwargs):
    learn = quiet_fit(learner(**kwargs), n, cbs=cbs)
    return learn


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


def fp16_accumulation():
    learn = fitted(MixedPrecision("fp16", init_scale=2.0**20), GradientAccumulation(2))
    return found(learn, skipped=learn.mixed_precision.skipped)


def ema():
    learn = fitted(EMA(0.5))
    with learn.ema.applied(learn.model):
        averages = weights(learn.model)
    return found(learn, averages=averages)


def frozen():
    return found(fitted(Freeze("0")))


def thawed():
    return found(fitted(Freeze("0", until=1), n=3))


def param_groups():
    def make(params, lr):
        params = list(params)
        return torch.optim.AdamW([{"params": params[:2], "lr": 0.001}, {"params": params[2:]}], lr=0.01)

    return found(fitted(GradientClip(0.1), opt=make))


def lr_find():
    learn = learner()
    before = weights(learn.model)
    curve = learn.lr_find(num_it=30)
    return {"losses": list(curve.losses), "suggestion": curve.suggestion, "same": before == weights(learn.model)}


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
    class Keep:
        rows = []

        def log(self, *args, **kwargs):
            self.rows.append(args)

        def close(self):
            pass

    return found(fitted(Log(Keep())))


def compiled():
    return found(fitted(Compile(backend="eager")))


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
    if MODE in ("tp", "hybrid", "alone_tp"):
        return {}

    def images():
        return nn.Sequential(Image(), nn.Conv2d(4, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))

    learn = fitted(ChannelsLast(), model=images)
    return found(learn)


def terminate():
    return _with_nan(TerminateOnNaN())


def nan_trace():
    return _with_nan(NanTrace())


def _with_nan(cb):
    class Plant(Callback):
        def before_batch(self):
            rank = distributed.get_rank() if distributed.is_initialized() else 1
            if self.training and self.epoch == 1 and self.iter == 2 and (rank == 1 or has_whole_batches()):
                self.learn.xb[0][1, 2] = float("nan")

    torch.manual_seed(0)
    learn = fitted(Plant(), cb)
    report = getattr(learn.get(type(cb)), "report", None)
    return {"n_losses": len(learn.recorder.losses), "report": str(report)[:200]}


def two_fits():
    learn = learner()
    quiet_fit(learn, 1)
    quiet_fit(learn, 1, lr=0.05)
    quiet_fit(learn, 1, cbs=GradientHealth())
    return found(learn)


def after_an_exception():
    class Fails(Callback):
        def after_batch(self):
            if self.training and self.iter == 3:
                raise self.error

    learn = learner()
    seen = []
    for error in (ValueError, KeyboardInterrupt):
        cb = Fails()
        cb.error = error("planted")
        try:
            quiet_fit(learn, 1, cbs=cb)
        except (ValueError, KeyboardInterrupt, RuntimeError) as raised:
            seen.append(repr(raised))
    quiet_fit(learn, 2)
    return found(learn, seen=seen)


def replaced():
    learn = learner()
    quiet_fit(learn, 1)
    torch.manual_seed(5)
    learn.model = small_model()
    quiet_fit(learn, 2)
    return found(learn)


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
    learn = learner()
    quiet_fit(learn, 1)
    return {"text": str(learn.summary())}


CASES = [
    accumulation, clip_norm, clip_value, accumulation_and_clip, bf16, fp16, fp16_overflow, fp16_accumulation,
    ema, frozen, thawed, param_groups, lr_find, health, diagnosis, plateau, early, max_time, measured, logged,
    compiled, compiled_aot, activation_checkpointing, channels_last, terminate, nan_trace, two_fits, replaced, moved,
    one_batch, summary, after_an_exception,
]  # fmt: skip


def run_mode(mode, folder, only=()):
    global MODE
    MODE = mode
    cases = {f"{mode} {case.__name__}": case for case in CASES if not only or case.__name__ in only}
    return cases


class InMode:
    def __init__(self, mode, case):
        self.mode, self.case = mode, case

    def __call__(self):
        global MODE
        MODE = self.mode
        return self.case()


def main():
    global MODE
    folder, modes = sys.argv[1], sys.argv[2].split(",")
    only = sys.argv[3].split(",") if len(sys.argv) > 3 else ()
    MODE = "ddp"
    learner().validate()  # opens the group
    MODE = modes[0]
    answer(folder, {})
    cases = {
        f"{mode} {case.__name__}": InMode(mode, case)
        for mode in modes
        for case in CASES
        if not only or case.__name__ in only
    }
    run_cases(cases, folder)


if __name__ == "__main__":
    main()
