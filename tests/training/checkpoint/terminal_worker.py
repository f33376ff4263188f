"""Fits that get Ctrl-C as a terminal sends it, to the workers of their loaders too.

Run as `python -m tests.training.checkpoint.terminal_worker FOLDER MOMENT`, or forked with `strike`. The fit
writes its checkpoints to `FOLDER/MOMENT`, and to `FOLDER/MOMENT.txt` the exception it ended with.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from hookcb.training.checkpoint.callback import Checkpoint
from tests.training.checkpoint.support import acting, dataset, learner, seed_all


class Slow(Dataset):
    """Is still asked for the third batch when Ctrl-C comes, or, one of validation, for the second."""

    def __init__(self, at=8):
        self.at = at

    def __len__(self):
        return 18

    def __getitem__(self, i):
        if i == self.at:
            time.sleep(0.5)
            os.killpg(0, signal.SIGINT)
            time.sleep(0.5)
        return dataset()[i]


def all_of_us(cb):
    os.killpg(0, signal.SIGINT)
    time.sleep(0.3)


def mortal(worker):
    """Ctrl-C ends it, as it does one that was spawned."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


DIES = {"num_workers": 2, "worker_init_fn": mortal}
MOMENTS = {  # the data of the training and of the validation, and options of the loaders
    "batch": (dataset(), None, {}),
    "wait": (Slow(), None, {}),
    "batch, workers die": (dataset(), None, DIES),
    "wait, workers die": (Slow(), None, DIES),
    "validation, workers die": (dataset(8), Slow(4), DIES),
    "spawned": (dataset(), None, {"multiprocessing_context": "spawn"}),
}


def strike(folder, moment):
    """Fits in a session of its own, as a process begun in a terminal has."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    seed_all(0)
    data, valid, options = MOMENTS[moment]
    options = {"num_workers": 1} | options
    loaders = {"valid": DataLoader(valid, 4, **options)} if valid else {}
    learn = learner(DataLoader(data, 4, **options), **loaders)
    cbs = [Checkpoint(folder / moment)]
    if not any(isinstance(each, Slow) for each in (data, valid)):  # which send it themselves
        cbs.append(acting("after_pred", all_of_us, k=1))
    try:
        with learn.no_logging():
            learn.fit(2, cbs=cbs)
    except BaseException as error:
        (folder / f"{moment}.txt").write_text(type(error).__name__)


if __name__ == "__main__":
    strike(Path(sys.argv[1]), sys.argv[2])
