"""One of several ranks that write or read checkpoints: `checkpoint_worker.py FOLDER CASE,CASE`.

What several ranks have written is in FOLDER/../shared, where others read it.
"""

import hashlib
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hookcb import (
    EMA,
    Callback,
    CancelFitException,
    Checkpoint,
    GradientAccumulation,
    GradientHealth,
    Learner,
)
from tests.ranks.support import data, join_group, run_cases

RANK, WORLD = 0, 1
SHARED = Path()
N = 96


def fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return model


def tensor_parallel(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})


WRAPS = {"ddp": DistributedDataParallel, "fsdp2": fsdp2, "tp": tensor_parallel, "plain": lambda model: model}


def learner(wrap, per_batch=4, dropout=0.0, batch_norm=False):
    torch.manual_seed(0)
    n = 8 if wrap == "tp" else 9  # FSDP2 has parts of other sizes then
    middle = [*[nn.BatchNorm1d(n)] * batch_norm, nn.Dropout(dropout)]
    model = nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Sequential(*middle), nn.Linear(n, 3))
    model = WRAPS[wrap](model)
    x, y = data(N).tensors
    train = TensorDataset(x, y, torch.arange(N))
    alone = {"num_replicas": 1, "rank": 0} if WORLD == 1 or wrap == "tp" else {}
    per_batch *= 2 if wrap == "tp" else 1  # ranks vote on all of the first 16
    loader = DataLoader(train, per_batch, sampler=DistributedSampler(train, **alone))
    valid = DataLoader(TensorDataset(x[:16], y[:16], torch.arange(16)), 8)
    torch.manual_seed(RANK + 7)
    return Learner(
        (loader, valid),
        model,
        lambda pred, y, i: cross_entropy(pred, y),
        torch.optim.AdamW,
        lr=0.01,
        n_inp=1,
    )


class Stops(Callback):
    def __init__(self, epoch, batch):
        super().__init__()
        self.at = epoch, batch

    def after_batch(self):
        if self.training and (self.epoch, self.iter) == self.at:
            raise CancelFitException


class Restored(Callback):
    """What was restored."""

    def before_train(self):
        learn = self.learn
        with learn.ema.applied(learn.model):
            average = weights(learn)
        self.found = {"weights": weights(learn), "moments": moments(learn), "average": average}
        self.random = torch.rand(2).tolist()


class Signals(Callback):
    """Sends Ctrl-C to the last rank in a validation."""

    def after_pred(self):
        if not self.training and self.epoch == 1 and self.iter == 0 and RANK == WORLD - 1:
            os.kill(os.getpid(), signal.SIGINT)


class Seen(Callback):
    """The samples of each epoch."""

    def before_fit(self):
        self.samples = {}

    def after_batch(self):
        if self.training:
            self.samples.setdefault(self.epoch, []).extend(self.learn.yb[1].tolist())


def fit(learn, n_epoch, *cbs, **kwargs):
    with learn.no_logging(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*random numbers")
        learn.fit(n_epoch, cbs=list(cbs), **kwargs)
    return learn


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def digest(tensors):
    parts = [full(x.detach()).cpu().double().contiguous() for x in tensors]
    return hashlib.sha1(b"".join(x.numpy().tobytes() for x in parts)).hexdigest()[:8]


def weights(learn):
    return digest(learn.model.parameters())


def moments(learn):
    params = learn.model.parameters()
    return digest([learn.opt.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq")])


def own(name):
    """A folder of this launch."""
    return Path(sys.argv[1]) / name


def names_in(folder):
    return sorted(name for name in os.listdir(folder) if name != "in-use.lock")


# ---- writing


def write(wrap):
    folder = SHARED / wrap
    learn = fit(learner(wrap), 1, Checkpoint(folder), EMA(0.5))
    seen = Seen()
    middle = fit(learner(wrap), 2, Checkpoint(SHARED / f"{wrap}-middle"), seen, Stops(1, 2))
    learn.save(SHARED / f"{wrap}.pt")
    with learn.ema.applied(learn.model):
        average = weights(learn)
    return {
        "weights": weights(learn),
        "moments": moments(learn),
        "average": average,
        "names": names_in(folder),
        "files": sorted(os.listdir(folder / "epoch-0001")) if WORLD > 1 else [],
        "seen": seen.samples,
        "middle": weights(middle),
    }


# ---- reading


def read(name, wrap, file):
    """Reads at the end of the first epoch, without training on."""
    learn = learner(wrap)
    learn.load(SHARED / name / file)
    validated = weights(learn)
    learn.load(SHARED / f"{name}.pt")
    saved = weights(learn)
    restored = Restored(name="found_by_test")
    fit(learner(wrap), 2, EMA(0.5), restored, resume=SHARED / name / file)
    return {
        "validated": validated,
        "saved": saved,
        "saved_moments": moments(learn),
        "restored": restored.found,
        "random": restored.random,
    }


def go_on(name, wrap, per_batch=4):
    """Goes on in the middle of an epoch with other ranks, twice."""
    (file,) = (file for file in (SHARED / f"{name}-middle").iterdir() if "batch" in file.name)
    folder, first = own(f"go-on-{name}-{wrap}-{WORLD}"), Seen()
    learn = fit(
        learner(wrap, per_batch), 2, Checkpoint(folder, every=1, keep=9), first, Stops(1, 8), resume=file
    )
    n = learn.train_iter
    second = Seen()
    (own_file, *_) = (file for file in sorted(folder.iterdir()) if "batch" in file.name)
    n_first = per_batch  # of one batch
    again = fit(learner(wrap, per_batch), 2, Checkpoint(folder), second, resume=own_file)
    return {
        "left": first.samples,
        "n_first": n_first,
        "iters": (n, again.train_iter, len(again.recorder.losses)),
        "after_one": second.samples,
        "own_file": own_file.name,
        "rows": len(again.recorder.rows),
        "weights": weights(again),
    }


def chain(wrap, *stops):
    """Goes on with the newest of a folder to which each launch writes."""
    seen = Seen()
    saving = Checkpoint(SHARED / "chain", monitor="train_loss")
    learn = fit(learner(wrap), 1, saving, seen, *stops, resume="latest")
    bests = [name for name in ("best", "best.pt") if (SHARED / "chain" / name).exists()]
    return {"seen": seen.samples[0], "n": learn.train_iter, "bests": bests}


# ---- as one that never ended


def resumed(wrap, batch_norm=False, health=False, n=0):
    """A fit ended in the second epoch and resumed, beside one that never ended; dropout differs by rank."""
    folder = own(f"resumed-{wrap}{n or ''}")

    def make():
        return learner(wrap, dropout=0.5, batch_norm=batch_norm)

    def cbs():
        return [EMA(0.5), *[GradientHealth()] * health, *([GradientAccumulation(n)] if n else [])]

    whole = fit(make(), 3, *cbs())
    fit(make(), 3, Checkpoint(folder, monitor="valid_loss"), Stops(1, 2), *cbs())
    names = names_in(folder)
    learn = make()
    torch.manual_seed(99)
    fit(learn, 3, Checkpoint(folder, monitor="valid_loss"), *cbs(), resume="latest")
    with learn.ema.applied(learn.model), whole.ema.applied(whole.model):
        average = weights(learn) == weights(whole)
    return {
        "names": names,
        "at_end": names_in(folder),
        "same": weights(learn) == weights(whole),
        "same_moments": moments(learn) == moments(whole),
        "same_average": average,
        "same_losses": list(learn.recorder.losses) == list(whole.recorder.losses),
        "same_health": not health or same_health(learn, whole),
        "same_buffers": digest(learn.model.buffers()) == digest(whole.model.buffers()),
        "files": [file.name for file in learn.checkpoint.files],
    }


def signaled(wrap):
    """Ctrl-C in a validation, for which the parameters are gathered; then resumed."""
    folder = own(f"signaled-{wrap}")
    whole = fit(learner(wrap, dropout=0.5), 3, EMA(0.5))
    try:
        fit(learner(wrap, dropout=0.5), 3, Checkpoint(folder), Signals(), EMA(0.5))
    except KeyboardInterrupt:
        names = names_in(folder)
    learn = fit(learner(wrap, dropout=0.5), 3, Checkpoint(folder), EMA(0.5), resume="latest")
    same = weights(learn) == weights(whole) and moments(learn) == moments(whole)
    return {"names": names, "same": same}


class OfShards(torch.optim.SGD):
    """Keeps plain tensors of this rank's shards."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["seen"] = torch.zeros_like(p.detach().to_local())
        return super().step(closure)


def plain_state():
    learn = learner("fsdp2")
    learn.opt_func = OfShards
    fit(learn, 1, Checkpoint(own("plain-state")))


def same_health(learn, whole):
    """Whether the records of the gradients are the same, those that compare with the first weights too."""
    ours, theirs = (x.gradient_health.records.state() for x in (learn, whole))
    return str(ours) == str(theirs)


def health_on_four():
    """Goes on after the second epoch of `resumed`."""
    file = SHARED.parent / "2" / "resumed-fsdp2" / "epoch-0002"
    learn = fit(learner("fsdp2", batch_norm=True), 3, EMA(0.5), GradientHealth(every=1), resume=file)
    return {"n_steps": learn.train_iter, "n_norms": len(learn.gradient_health.step_series("total_norm"))}


def others_sums(name, wrap):
    """Goes on where others have accumulated gradients."""
    folder = SHARED.parent / "2" / f"resumed-{name}3"
    fit(learner(wrap), 3, EMA(0.5), GradientAccumulation(3), resume=folder / "epoch-0002-batch-000004")


def flat():
    from torch.distributed.fsdp import FullyShardedDataParallel

    learn = learner("plain")
    learn.model = FullyShardedDataParallel(learn.model, device_id=torch.device("cpu"), use_orig_params=True)
    fit(learn, 1, Checkpoint(own("flat")))


def without_sampler():
    (file,) = (file for file in (SHARED / "plain-middle").iterdir() if "batch" in file.name)
    learn = learner("ddp")
    learn.dls = type(learn.dls)(DataLoader(learn.dls.train.dataset, 4), None)
    fit(learn, 2, resume=file)


def damaged():
    folder = own("damaged")
    fit(learner("ddp"), 2, Checkpoint(folder))
    if RANK == 0:
        (part,) = (folder / "epoch-0002").glob("__0_*.distcp")
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    distributed.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn = fit(learner("ddp"), 2, Checkpoint(folder), resume="latest")
    return {"n": len(learn.recorder.losses), "warned": [str(x.message) for x in caught]}


CASES = {
    "write_ddp": lambda: write("ddp"),
    "write_fsdp2": lambda: write("fsdp2"),
    "write_plain": lambda: write("plain"),
    "resumed_ddp": lambda: resumed("ddp", batch_norm=True),
    "resumed_fsdp2": lambda: resumed("fsdp2", batch_norm=True, health=True),
    "resumed_tp": lambda: resumed("tp"),
    "resumed_ddp_sums": lambda: resumed("ddp", n=3),
    "resumed_fsdp2_sums": lambda: resumed("fsdp2", n=3),
    "others_sums_ddp": lambda: others_sums("ddp", "fsdp2"),
    "others_sums_fsdp2": lambda: others_sums("fsdp2", "ddp"),
    "chain_ddp": lambda: chain("ddp", Stops(0, 2)),
    "chain_plain": lambda: chain("plain", Stops(0, 9)),
    "chain_fsdp2": lambda: chain("fsdp2"),
    "signaled_fsdp2": lambda: signaled("fsdp2"),
    "plain_state": plain_state,
    "damaged": damaged,
    "flat": flat,
    "health_on_four": health_on_four,
    "without_sampler": without_sampler,
}
for name in ("ddp", "fsdp2", "plain"):
    for wrap in ("ddp", "fsdp2", "plain"):
        file = "epoch-0001.pt" if name == "plain" else "epoch-0001"
        CASES[f"read_{name}_{wrap}"] = lambda name=name, wrap=wrap, file=file: read(name, wrap, file)
        CASES[f"go_on_{name}_{wrap}"] = lambda name=name, wrap=wrap: go_on(name, wrap)


def main():
    global RANK, WORLD, SHARED
    SHARED = Path(sys.argv[1]).parent / "shared"
    RANK, WORLD = join_group()
    run_cases({name: CASES[name] for name in sys.argv[2].split(",")}, sys.argv[1])


if __name__ == "__main__":
    main()
