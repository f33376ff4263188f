"""Trains, logs every batch, and says of each record that it was logged, until it is killed.

Run as `python -m tests.scenarios.log_kill_worker FOLDER`.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from hookcb import GradientHealth, Learner
from hookcb.loggers import CSVLogger, JSONLLogger, Log

N_BATCHES = 1_000_000


class Told:
    """Says on standard output which step all loggers before it have taken."""

    def log(self, values, step):
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()


def train(loggers, n_batches=N_BATCHES):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 8, 4, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    learn = Learner([(x, y)] * n_batches, model, F.mse_loss, torch.optim.SGD, lr=0.1)
    with learn.no_logging():
        learn.fit(1, cbs=[GradientHealth(), Log(loggers, every=1)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    train([JSONLLogger(folder / "log.jsonl"), CSVLogger(folder / "log.csv"), Told()])
