"""What the tests of checkpoints share: small learners, what a fit came to, and fits that go on."""

import os
import random
import signal
import warnings
from contextlib import contextmanager
from functools import cache
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookcb import Callback, Learner
from hookcb.training.checkpoint.callback import Checkpoint
from tests.support import make_batches

RESULTS = ("stats", "valid_stats", "norms", "coefs", "best", "best_epoch", "reason", "skipped")

VALID = make_batches(2, seed=1)


class Net(nn.Module):
    """Batch norm, dropout, and a buffer that is not saved but changes what comes out."""

    def __init__(self, d=2):
        super().__init__()
        self.stem = nn.Linear(d, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += self.training
        return self.head(self.drop(self.norm(self.stem(x)).relu())) * (1 + 0.01 * self.calls)


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def dataset(n=18, d=2):
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, d, generator=g), torch.randn(n, 1, generator=g))


def shuffled(n=18, **options):
    return DataLoader(dataset(n), 4, shuffle=True, **options)


def error(pred, y):
    return (pred - y).abs().mean()


def learner(train=None, cbs=(), opt_func=torch.optim.SGD, lr=0.05, model=None, valid=VALID, **options):
    """For a fit in which everything takes part that could come back wrongly."""
    return Learner(
        (shuffled() if train is None else train, valid),
        model or Net(),
        options.pop("loss_func", F.mse_loss),
        opt_func,
        lr,
        metrics=error,
        cbs=cbs,
        **options,
    )


def train(make, n_epoch, *cbs, resume=None, seed=0):
    """Makes a learner and fits it; `seed` is of its weights and of all random numbers after."""
    seed_all(seed)
    learn = make()
    with learn.no_logging(), mock.patch("os.fsync"):  # of the disk's time nothing is to be learnt
        learn.fit(n_epoch, cbs=cbs, resume=resume)
    return learn


def go_on(make, n_epoch, *cbs, resume):
    """Resumes as another process would: with a new learner, other weights, other random numbers."""
    if not any(isinstance(cb, Checkpoint) for cb in cbs):
        cbs = (*cbs, Callback(name="checkpoint"))  # in place of one, whose writing takes time
    return train(make, n_epoch, *cbs, resume=resume, seed=99)


def outcome(learn):
    """All that a fit came to, as copies, by what it is."""
    recorder = learn.recorder
    results = {
        f"{cb.name}.{attribute}": getattr(cb, attribute)
        for cb in learn.cbs
        for attribute in RESULTS
        if hasattr(cb, attribute)
    }
    if hasattr(learn, "ema"):
        results["averaged weights"] = learn.ema.model.state_dict()
    here = {
        "weights": learn.model.state_dict(),
        "buffers": dict(learn.model.named_buffers()),
        "optimizer": learn.opt.state_dict(),
        "losses": recorder.losses,
        "rates": recorder.lrs,
        "rows": [{k: v for k, v in row.items() if k != "time"} for row in recorder.rows],
        "batches": learn.train_iter,
        "random state of torch": torch.get_rng_state(),
        "random state of Python": random.getstate(),
        "random state of NumPy": np.random.get_state(),
        **results,
    }
    return copied(here)


@cache
def uninterrupted(make, n_epoch):
    """What a fit comes to that never stops, for all who compare with it."""
    return outcome(train(make, n_epoch))


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [copied(v) for v in value]
    return value


def alike(a, b):
    """Equality to the bit, where NaN equals NaN."""
    if isinstance(a, torch.Tensor):
        return torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


def differing(a, b):
    return [what for what in {**a, **b} if not alike(a.get(what), b.get(what))]


def check_resumes(make, folder, n_epoch=2, every=4, files=slice(0, -1)):
    """A fit that goes on from some batch, or the end of an epoch, ends as if it had never stopped.

    It goes on from `files` of its checkpoints, one after `every` batches and one after each epoch: of five
    batches, from inside the first epoch, from its end, and from inside the next.
    """
    whole = outcome(train(make, n_epoch))
    saving = Checkpoint(folder, every=every, keep=10_000)
    changed = differing(whole, outcome(train(make, n_epoch, saving)))
    assert changed == [], f"writing has changed {changed}"
    assert len(saving.files) == whole["batches"] // every + n_epoch
    for file in saving.files[files]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "nothing left to train")  # the last file is of a complete fit
            changed = differing(whole, outcome(go_on(make, n_epoch, resume=file)))
        assert changed == [], f"resumed from {file.name} there are other {changed}"


class Stop(Exception):
    """The end of a fit that nobody planned."""


def acting(event, act, k=0, order=0, name="actor"):
    """A callback that calls `act(callback)` the k-th time it sees `event`, from 0."""
    seen = []

    def at(cb):
        seen.append(event)
        if len(seen) == k + 1:
            act(cb)

    cb = Callback(name=name, **{event: at})
    cb.order = order
    return cb


def raising(error):
    def act(cb):
        raise error

    return act


def sending(number):
    """What sends a signal to this process, as Ctrl-C or a cluster's manager would."""
    return lambda cb: os.kill(os.getpid(), number)


@contextmanager
def handler(number, handle):
    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)
