"""A plain training on several ranks that goes wrong, or does not: `hanging_worker.py CASE SECONDS`."""

import io
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


class Gate(nn.Module):
    """Does what `act` does, in a forward."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        self.act()
        return x


class Slow:
    """Takes long to be saved."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        time.sleep(self.seconds)
        return Slow, (0,)


def sleep(seconds):
    print("stuck", flush=True)  # noqa: T201  # for the test that waits for it
    time.sleep(seconds)  # here it hangs


def in_batch(i, case, rank, seconds, model):
    """What a case does at the end of batch `i`."""
    if case == "sleeps" and i == 2 and rank == 1:
        sleep(1000)
    if case == "sleeps early" and i == 0 and rank == 1:
        sleep(1000)
    if case == "other collectives" and i == 2:
        if rank == 1:
            distributed.barrier()
        else:
            distributed.broadcast(torch.zeros(3), 1)
    if case == "raises" and i == 3 and rank == 1:
        raise ValueError("planted")
    if case == "waits for both" and i == 2:
        if rank == 1:
            sleep(1000)
        distributed.all_reduce(torch.zeros(1))
    if case == "validates" and i == 2:
        model.eval()
        with torch.no_grad():
            until = time.monotonic() + 0.9 * seconds
            while rank == 0 and time.monotonic() < until:
                model.module(torch.randn(4, 4))
                time.sleep(0.05)
        model.train()
        distributed.barrier()
    if case == "saves" and i == 2:
        if rank == 0:
            torch.save(Slow(0.9 * seconds), io.BytesIO())
        distributed.barrier()
    if case == "slow" and rank == 1:
        time.sleep(0.2)


def main(case, seconds, wrap=None):
    torch.set_num_threads(1)
    rank, world, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 0
    group = {"timeout": timedelta(seconds=seconds)}
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # so that slow starts are no timeout
        port = int(os.environ["MASTER_PORT"])
        group["store"] = distributed.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=60))
    distributed.init_process_group("gloo", rank=rank, world_size=world, **group)
    torch.manual_seed(0)

    def act():
        if case == "in a layer" and n == 2 and rank == 1:
            sleep(1000)

    net = nn.Sequential(nn.Linear(4, 8), nn.Sequential(Gate(act), nn.ReLU()), nn.Linear(8, 2))
    model = DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrap(model, opt) if wrap else nullcontext():
        for n in range(6 if case == "ends early" and rank else 12):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * n + rank))
            cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            opt.step()
            opt.zero_grad()
            in_batch(n, case, rank, seconds, model)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
