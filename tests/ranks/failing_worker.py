"""One of several ranks, of which the last one fails: `failing_worker.py FOLDER MODE PLACE`."""

import sys
import warnings
from datetime import timedelta

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hookcb import Callback, Distributed, Learner
from tests.ranks.support import TIMEOUT, data, small_model


class Fails(Callback):
    """Raises an error at an event."""

    def __init__(self, event, error):
        super().__init__()
        setattr(self, event, self._fail)
        self.event, self.error = event, error

    def _fail(self):
        if self.event != "after_batch" or self.iter == 2:
            fail(self.error)


class Data(torch.utils.data.Dataset):
    """The 22nd sample cannot be read."""

    def __getitem__(self, i):
        if i == 21:
            fail(ValueError("planted"))
        return data(48)[i]

    def __len__(self):
        return 48


def fail(error):
    info = torch.utils.data.get_worker_info()
    if info is not None or distributed.get_rank() == distributed.get_world_size() - 1:
        raise error


def loss_func(pred, y):
    fail(ValueError("planted"))
    return cross_entropy(pred, y)


def in_validation(pred, y):
    if not pred.requires_grad:
        fail(ValueError("planted"))
    return cross_entropy(pred, y)


def main():
    _, _, mode, place = sys.argv
    distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    cbs = {
        "interrupt": [Fails("after_batch", KeyboardInterrupt())],
        "exit": [Fails("after_batch", SystemExit(0))],
        "exit between epochs": [Fails("after_epoch", SystemExit(0))],
        "before_fit": [Fails("before_fit", ValueError("planted"))],
        "after_fit": [Fails("after_fit", ValueError("planted"))],
    }
    dataset = Data() if place in ("dataset", "worker") else data(48)
    train = DataLoader(dataset, 4, num_workers=int(place == "worker"))
    losses = {"loss": loss_func, "validation": in_validation}
    engine = Distributed("fsdp2", shard=nn.Linear) if mode == "fsdp2" else Distributed()
    learn = Learner(
        (train, DataLoader(data(20, 1), 10)),
        small_model(),
        losses.get(place, cross_entropy),
        torch.optim.SGD,
        cbs=[engine, *cbs.get(place, [])],
    )
    with learn.no_logging(), warnings.catch_warnings():
        learn.fit(2)


if __name__ == "__main__":
    main()
