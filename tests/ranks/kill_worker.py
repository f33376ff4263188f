"""One of several ranks that trains for long, or resumes: `kill_worker.py FOLDER CHECKPOINTS EPOCHS`."""

import sys
import time
from pathlib import Path

import torch
from torch import nn

from hookcb import Callback, Checkpoint
from hookcb.processes import exchange, failures
from tests.ranks.support import answer, digest, join_group, make_learner


class Begun(Callback):
    """Says by a file that training has begun."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def after_batch(self):
        if self.train_iter == 1:
            self.file.touch()


def main():
    folder, checkpoints, n_epoch = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    rank, _ = join_group()
    exchange.GRACE = failures.GRACE = 2.0
    torch.manual_seed(1)
    learn = make_learner(model=nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    torch.manual_seed(rank)
    began, facts = time.monotonic(), {}
    try:
        with learn.no_logging():
            cbs = [Checkpoint(checkpoints, every=1), Begun(folder / f"{rank}.begun")]
            learn.fit(n_epoch, cbs=cbs, resume="latest")
        facts = {"n": len(learn.recorder.losses), "weights": digest(learn.model)}
    except Exception as error:
        facts = {"error": type(error).__name__, "text": str(error)}
    facts["ended_at"], facts["seconds"] = time.time(), time.monotonic() - began
    answer(folder, facts)


if __name__ == "__main__":
    main()
