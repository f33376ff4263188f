"""Trains on small images in processes that are killed, at moments nobody knows, until the training is done.

What came of it is in `FOLDER/report.json`. Processes are forked, as each import of torch would take seconds.
"""

import json
import os
import random
import signal
import time
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookcb import Callback, Learner
from hookcb.training.accumulate import GradientAccumulation
from hookcb.training.amp import MixedPrecision
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.ema import EMA
from hookcb.training.schedules.one_cycle import OneCycle

EVERY, N_EPOCH = 3, 3


def images(n):
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 1, 8, 8, generator=g), torch.randint(10, (n,), generator=g))


def model():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )


def train(folder, log, seed, limit=None, n_epoch=N_EPOCH):
    """Goes on with what is in `folder`; `seed` is of what a process begins with by chance.

    Before batch `limit` it waits for its end: on a busy machine that may come late.
    """
    dls = DataLoader(images(480), 16, shuffle=True), DataLoader(images(64), 32)
    torch.manual_seed(seed)
    opt = torch.optim.AdamW
    learn = Learner(dls, model(), F.cross_entropy, opt, lr=3e-3)
    cbs = [OneCycle(), MixedPrecision(), GradientAccumulation(3), EMA(0.9), Checkpoint(folder, every=EVERY)]
    with log.open("a") as opened:

        def report(what, cb):
            if cb.training:
                opened.write(f"{what} {cb.train_iter}\n")
                opened.flush()

        def begin(cb):
            if cb.training and limit is not None and cb.train_iter >= limit:
                time.sleep(60)
            report("begins", cb)

        begins = Callback(name="begins", before_batch=begin)
        done = Callback(name="done", after_batch=lambda cb: report("done", cb))
        # of the disk's time nothing is to be learnt: what is killed here is the process
        with learn.no_logging(), mock.patch("os.fsync"):
            learn.fit(n_epoch, cbs=[*cbs, begins, done], resume="latest")
    rows = [{k: v for k, v in row.items() if k != "time"} for row in learn.recorder.rows]
    results = {"weights": learn.model.state_dict(), "average": learn.ema.model.state_dict()}
    results |= {"optimizer": learn.opt.state_dict(), "random": torch.get_rng_state()}
    losses, lrs = list(learn.recorder.losses), list(learn.recorder.lrs)
    torch.save({**results, "losses": losses, "lrs": lrs, "rows": rows}, folder / "results")


def forked(*arguments):
    """A process that trains, by its number."""
    child = os.fork()
    if child:
        return child
    try:
        train(*arguments)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(child):
    """Waits for a process; how it ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def batches_in(log, what="done"):
    lines = log.read_text().splitlines() if log.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(what + " ")]


def wait_until(log, batch, child):
    """Waits until a process says that it is done with a batch, or has ended."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while max(batches_in(log), default=-1) < batch and os.waitid(os.P_PID, child, look) is None:
        time.sleep(0.002)


def unreadable(folder):
    """Files of a final name that are not whole."""
    found = []
    for file in folder.glob("*.pt"):
        try:
            torch.load(file, weights_only=True)
        except Exception as error:
            found.append(f"{file.name}: {error!r:.200}")
    return found


def warm_up(folder):
    """Imports here, once for all processes, what is only imported on use."""
    train(folder / "warm", folder / "warm.log", 0, n_epoch=1)


def main(folder, n_kills):
    warm_up(folder)
    rng = random.Random(0)
    began = time.perf_counter()
    child = forked(folder / "whole", folder / "whole.log", 0)
    wait_until(folder / "whole.log", 0, child)
    of_start = time.perf_counter() - began
    whole = ended(child)
    n_batches = len(batches_in(folder / "whole.log"))
    assert n_batches, f"the process that is not killed did nothing, and ended with {whole}"
    of_batch = (time.perf_counter() - began - of_start) / n_batches
    run, lives = folder / "run", []
    for k in range(n_kills + 1):
        log = folder / f"life-{k}.log"
        # without a file it must begin as the uninterrupted one does, else from the file alone
        seed = 100 + k if any(run.glob("epoch-*.pt")) else 0
        limit = int(n_batches * (k + 1) / (n_kills + 1)) + EVERY if k < n_kills else None
        child = forked(run, log, seed, limit)
        if k < n_kills:
            if k % 3:
                wait_until(log, int(n_batches * 0.8 * k / n_kills), child)
            time.sleep(rng.uniform(0, 6 * of_batch if k % 3 else 1.2 * of_start))  # also in the resuming
            os.kill(child, signal.SIGKILL)
        life = {"exit": ended(child), "begins": batches_in(log, "begins"), "done": batches_in(log)}
        files = sorted(file.name for file in run.glob("*"))
        lives.append({**life, "unreadable": unreadable(run), "files": files})
    report = {"whole": whole, "n_batches": n_batches, "lives": lives}
    (folder / "report.json").write_text(json.dumps(report))
