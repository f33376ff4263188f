"""One of several ranks; does one case after another: `cases_worker.py FOLDER CASE,CASE`."""

import contextlib
import io
import os
import shutil
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from hookcb import (
    Callback,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelTrainException,
    Checkpoint,
    EarlyStopping,
    GradientAccumulation,
    Log,
    MaxTime,
    Progress,
    ReduceLROnPlateau,
    SaveModelCallback,
    TerminateOnNaN,
)
from hookcb.processes import exchange, failures, ranks, votes
from tests.ranks.support import data, digest, join_group, make_learner, run_cases

RANK, WORLD = 0, 1
FOLDER = Path()
LAST = 1  # the rank on which something happens


def is_culprit():
    return RANK == WORLD - 1


def quiet_fit(learn, *args, **kwargs):
    with learn.no_logging():
        learn.fit(*args, **kwargs)
    return learn


def results(learn):
    return {
        "n": len(learn.recorder.losses),
        "rows": [{k: v for k, v in row.items() if k != "time"} for row in learn.recorder.rows],
        "weights": digest(learn.model),
    }


# ---- numbers


def fit_two_epochs():
    orders = []

    class Order(Callback):
        def before_epoch(self):
            orders.append(list(self.learn.dls.train.sampler))

    learn = quiet_fit(make_learner(), 2, cbs=Order())
    return results(learn) | {"orders": orders, "ranks": repr(learn.ranks)}


def set_epoch_of_batch_samplers_and_datasets():
    seen = []

    class Sampler(DistributedSampler):
        def set_epoch(self, epoch):
            seen.append(("sampler", epoch))
            super().set_epoch(epoch)

    class Shuffled(torch.utils.data.TensorDataset):
        def set_epoch(self, epoch):
            seen.append(("dataset", epoch))

    learn, train = make_learner(), Shuffled(*data(24 * WORLD).tensors)
    loader = DataLoader(train, batch_sampler=BatchSampler(Sampler(train), 4, drop_last=False))
    learn.dls = type(learn.dls)(loader, None)
    quiet_fit(learn, 2)
    return sorted(seen)


def numbers():
    """Loss, metric and predictions, beside those of one process on all samples."""
    learn = make_learner()
    preds, targets = learn.get_preds()
    x, y = learn.dls.valid.dataset.tensors
    learn.model.eval()
    with torch.no_grad():
        whole = learn.model.module(x)
    loss, acc = learn.validate()
    return {
        "shape": list(preds.shape),
        "same_preds": torch.allclose(preds, whole, atol=1e-6),
        "same_targets": torch.equal(targets, y),
        "loss": loss - float(cross_entropy(whole, y)),
        "accuracy": acc - float((whole.argmax(1) == y).float().mean()),
    }


def validation_of_few():
    """Fewer samples than ranks, so that some have none but padding."""
    learn = make_learner(n_valid=1)
    quiet_fit(learn, 1)
    preds, _ = learn.get_preds()
    return {
        "shape": list(preds.shape),
        "loss": learn.validate()[0],
        "rows": learn.recorder.rows[0]["valid_loss"],
    }


def accumulation():
    """Uneven batches in groups of three; weights beside those of one process."""
    x, y = data(36, seed=3).tensors
    sizes = [[2, 5, 1, 3, 4], [3, 1, 7, 6, 4]]
    n_reduced = []

    class Count(Callback):
        order = 999

        def after_pred(self):
            if self.training:
                n_reduced.append(bool(self.learn.model.require_backward_grad_sync))

    def part(rank, first, last):
        begin = 15 * rank + sum(sizes[rank][:first])
        return list(range(begin, begin + sum(sizes[rank][first:last])))

    learn = make_learner()
    mine = [part(RANK, i, i + 1) for i in range(5)]
    learn.dls = type(learn.dls)([(x[i], y[i]) for i in mine], None)
    quiet_fit(learn, 1, cbs=[GradientAccumulation(3), Count()])
    alone = make_learner().model.module
    opt = torch.optim.SGD(alone.parameters(), lr=0.1)
    for first, last in ((0, 3), (3, 5)):
        group = part(0, first, last) + part(1, first, last)
        opt.zero_grad()
        cross_entropy(alone(x[group]), y[group]).backward()
        opt.step()
    apart = max(
        float((a - b).abs().max()) for a, b in zip(learn.model.parameters(), alone.parameters(), strict=True)
    )
    return {"reduced": n_reduced, "apart": apart, "weights": digest(learn.model)}


def lr_find():
    learn = make_learner()
    before = digest(learn.model)
    with learn.no_logging():
        found = learn.lr_find(num_it=30)
    return {
        "suggestion": found.suggestion,
        "losses": [round(x, 12) for x in found.losses],
        "restored": digest(learn.model) == before,
    }


def lr_find_that_diverges():
    """A rank's loss explodes first; all stop there."""
    learn = make_learner(lr=0.1)
    if is_culprit():
        train = data(24 * WORLD)
        train.tensors[0].mul_(50)
        learn.dls = type(learn.dls)(DataLoader(train, 4, sampler=DistributedSampler(train)), None)
    with learn.no_logging(), warnings.catch_warnings(action="ignore"):
        found = learn.lr_find(num_it=60, end_lr=1e4)
    return {"n": len(found.losses), "suggestion": found.suggestion}


# ---- decisions


def early_stopping():
    return results(quiet_fit(make_learner(lr=0.0), 6, cbs=EarlyStopping(patience=2)))


def best_model():
    seen = []

    def note(cb):
        seen.append(digest(cb.learn.model))
        cb.learn.row["score"] = -abs(cb.epoch - 1.0)

    learn, noted = make_learner(), Callback(after_epoch=note, name="note")
    quiet_fit(learn, 3, cbs=[noted, SaveModelCallback("score", fname=FOLDER / "best")])
    return {"epochs": seen, "weights": digest(learn.model)}


def max_time():
    learn = quiet_fit(make_learner(), 10**6, cbs=MaxTime(0.2 + RANK))
    return {"n": len(learn.recorder.losses), "weights": digest(learn.model)}


def nan_on_one_rank():
    class Spoil(Callback):
        order = -10

        def before_batch(self):
            if self.training and self.iter == 3 and is_culprit():
                self.learn.xb = (self.x * float("nan"),)

    with warnings.catch_warnings(action="ignore"):
        learn = quiet_fit(make_learner(), 3, cbs=[Spoil(), TerminateOnNaN()])
    return {"n": len(learn.recorder.losses), "weights": digest(learn.model)}


def plateau():
    learn = quiet_fit(make_learner(), 4, cbs=ReduceLROnPlateau(min_delta=0.2, patience=0))
    return {"lrs": learn.recorder.lrs, "weights": digest(learn.model)}


class CancelsIn(Callback):
    """Raises a cancel in one event of one batch, on some ranks only."""

    def __init__(self, event, cancel, everywhere=False, declares=()):
        super().__init__()
        self.may_cancel = frozenset(declares)

        def handler():
            if self.training and self.iter == 3 and self.epoch == 0 and (everywhere or is_culprit()):
                raise cancel

        setattr(self, event, handler)


def declared_cancel():
    cancel = CancelsIn("after_loss", CancelBatchException, declares={"batch"})
    return results(quiet_fit(make_learner(), 2, cbs=cancel))


def cancel_of_all():
    return results(quiet_fit(make_learner(), 2, cbs=CancelsIn("before_batch", CancelTrainException, True)))


def cancels_between_batches():
    """Of the fit, the epoch and the training, by one rank at after_batch: one batch later, on all."""
    return [
        len(quiet_fit(make_learner(), 2, cbs=CancelsIn("after_batch", cancel)).recorder.losses)
        for cancel in (CancelFitException, CancelEpochException, CancelTrainException)
    ]


def cancel_outside_of_batches():
    """By one rank, at an event at which all wait for each other."""

    class Ends(Callback):
        def after_epoch(self):
            if is_culprit() and self.epoch == 1:
                raise CancelFitException("one rank has seen enough")

    learn = quiet_fit(make_learner(), 5, cbs=Ends())
    return results(learn) | {"ended_by": learn.ended_by}


# ---- data that differs


class Stream:
    """Batches without a length."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter([(torch.randn(4, 4), torch.ones(4).long())] * self.n)


def streams():
    learn = make_learner()
    learn.dls = type(learn.dls)(Stream(6 - RANK), None)
    return len(quiet_fit(learn, 2).recorder.losses)


def uneven_lists():
    learn = make_learner()
    learn.dls = type(learn.dls)(list(learn.dls.train)[: 6 - RANK], None)
    quiet_fit(learn, 1)


def empty_shard():
    learn = make_learner()
    learn.dls = type(learn.dls)(list(learn.dls.train)[: 0 if is_culprit() else 6], None)
    quiet_fit(learn, 1)


def uneven_in_join():
    learn = make_learner()
    learn.dls = type(learn.dls)(list(learn.dls.train)[: 6 - RANK], None)
    with learn.model.join():
        quiet_fit(learn, 1)
    return {"n": len(learn.recorder.losses), "weights": digest(learn.model)}


# ---- what is said once, or must be said by all


def callbacks_that_differ():
    quiet_fit(make_learner(), 1, cbs=[EarlyStopping()] if RANK else [])


def epochs_that_differ():
    quiet_fit(make_learner(), 1 + RANK)


def shown_once():
    """Progress and Log are on all ranks, or on some; what one prints is counted."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        make_learner().fit(1)
    logs = [Log(str(FOLDER / "log.jsonl"))] if RANK == 0 else []
    quiet_fit(make_learner(), 1, cbs=[*logs, *([Progress(name="second")] if RANK else [])])
    return {"printed": len(out.getvalue())}


def validate_on_main_only():
    learn = quiet_fit(make_learner(), 1)
    if RANK == 0:
        learn.validate()
    time.sleep(0.1)


# ---- files


def dropout_learner():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    # which keeps the order in which gradients are summed; else it changes after the first step of a fit
    wrap = partial(DistributedDataParallel, find_unused_parameters=True)
    learn = make_learner(model=model, opt=torch.optim.Adam, wrap=wrap)
    torch.manual_seed(RANK + 5)
    return learn


def folder_of(name):
    folder = FOLDER / name
    if RANK == 0:
        shutil.rmtree(folder, ignore_errors=True)
    distributed.barrier()
    return folder


def resumed():
    """A fit ended in the second epoch and resumed, beside one that never ended; dropout differs by rank."""
    folder = folder_of("resumed")
    whole = quiet_fit(dropout_learner(), 3)
    quiet_fit(dropout_learner(), 3, cbs=[Checkpoint(folder), StopsInSecondEpoch()])
    files = sorted(file.name for file in folder.glob("epoch-*"))
    distributed.barrier()
    learn = dropout_learner()
    torch.manual_seed(99)
    quiet_fit(learn, 3, cbs=Checkpoint(folder), resume="latest")
    return {
        "files": files,
        "same_weights": digest(learn.model) == digest(whole.model),
        "same_losses": list(learn.recorder.losses) == list(whole.recorder.losses),
        "losses": list(whole.recorder.losses),
        "weights": digest(learn.model),
    }


class StopsInSecondEpoch(Callback):
    def after_batch(self):
        if self.training and self.epoch == 1 and self.iter == 2:
            raise CancelFitException


def resume_on_some():
    folder = folder_of("some")
    quiet_fit(make_learner(), 1, cbs=Checkpoint(folder))
    quiet_fit(make_learner(), 2, cbs=Checkpoint(folder), resume="latest" if RANK == 0 else None)


def checkpoint_on_main_only():
    folder = folder_of("main")
    quiet_fit(make_learner(), 1, cbs=[Checkpoint(folder)] if RANK == 0 else [])


def saved():
    folder = folder_of("saved")
    learn = quiet_fit(make_learner(), 1)
    if RANK == 0:
        folder.mkdir()
        learn.save(folder / "main.pt")
    learn.save(folder / "all.pt")
    distributed.barrier()
    other = make_learner(lr=0.5)
    other.load(folder / "all.pt")
    return {"files": sorted(os.listdir(folder)), "same": digest(other.model) == digest(learn.model)}


class Signals(Callback):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def after_pred(self):
        if self.training and self.epoch == 1 and self.iter == 2 and is_culprit():
            os.kill(os.getpid(), self.number)


def ended_by(number):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    folder, learn, ending = folder_of(f"signal-{number}"), make_learner(), "none"
    try:
        quiet_fit(learn, 3, cbs=[Checkpoint(folder), Signals(number)])
    except (KeyboardInterrupt, SystemExit) as error:
        ending = repr(error)
    files = sorted(file.name for file in folder.glob("epoch-*"))
    return {"ending": ending, "n": len(learn.recorder.losses), "files": files}


def sigint():
    return ended_by(signal.SIGINT)


def sigterm():
    return ended_by(signal.SIGTERM)


# ---- cases after which the group is of no use


class Raises(Callback):
    """Raises on one rank as soon as the others wait for it in their backward."""

    def __init__(self, culprit, lingers=False):
        super().__init__()
        self.culprit, self.lingers = culprit, lingers

    def after_pred(self):
        if self.iter == 2 and self.culprit == RANK:
            while len(list(FOLDER.glob("*.waits"))) < WORLD - 1:
                time.sleep(0.05)
            time.sleep(0.3)
            raise ValueError("my error")

    def after_loss(self):
        if self.iter == 2:  # the loss has its gradient once the backward has begun
            self.learn.loss.register_hook(lambda grad: (FOLDER / f"{RANK}.waits").touch())

    def after_fit(self):
        if self.culprit == RANK and self.lingers:
            time.sleep(60)


def raises():
    quiet_fit(make_learner(), 2, cbs=Raises(culprit=1))


def main_raises():
    quiet_fit(make_learner(), 2, cbs=Raises(culprit=0))


def raises_and_lingers():
    failures.GRACE, failures.POLL = 0.5, 0.1
    quiet_fit(make_learner(), 2, cbs=Raises(culprit=1, lingers=True))


def undeclared_cancel():
    votes.MAX_APART = 1.0
    quiet_fit(make_learner(), 2, cbs=CancelsIn("after_loss", CancelBatchException))


def another_level_than_declared():
    votes.MAX_APART = 1.0
    cancel = CancelsIn("after_loss", CancelTrainException, declares={"batch"})
    quiet_fit(make_learner(), 2, cbs=cancel)


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    def wrap(model):
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        return model

    learn = make_learner(n_valid=9, wrap=wrap)
    quiet_fit(learn, 2, cbs=EarlyStopping(patience=1, min_delta=10.0))
    alone = make_learner(n_valid=9)
    quiet_fit(alone, 2)
    preds, targets = learn.get_preds()
    wanted, _ = alone.get_preds()
    return {
        "n": len(learn.recorder.losses),
        "same": torch.allclose(preds, wanted, atol=1e-5),
        "shape": list(targets.shape),
        "losses": [
            float(row["valid_loss"]) - float(other["valid_loss"])
            for row, other in zip(learn.recorder.rows, alone.recorder.rows, strict=False)
        ],
    }


def main():
    global RANK, WORLD, FOLDER
    FOLDER, exchange.GRACE = Path(sys.argv[1]), 0.5
    RANK, WORLD = join_group()
    ranks.MAX_WAIT = ranks.MAX_WAIT / 60
    run_cases({name: globals()[name] for name in sys.argv[2].split(",")}, FOLDER)


if __name__ == "__main__":
    main()
