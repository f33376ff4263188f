"""One of two processes; writes what it saw of their replicas to a file. Run by test_diverged.py."""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from hookcb.diagnosis.faults.ranks.copies import DivergedReplicas, OwnBuffers
from hookcb.diagnosis.run import Run
from hookcb.processes.ranks import ranks_of


def replica():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return nn.parallel.DistributedDataParallel(net)


def seen(kind, loop):
    fault = kind()
    fault.on_epoch(Run(loop=loop))
    return fault.seen


def look(model, lr=0.1):
    ranks = ranks_of(model)
    if ranks.world > 1:
        ranks.join("look")
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    loop = SimpleNamespace(model=model, ranks=ranks, opt=opt, train_iter=7)
    return [(s.code, s.step, s.value, s.param, s.message) for s in seen(DivergedReplicas, loop)]


def train(model, rank, n=3):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(n):
        x = torch.full((4, 3), 1.0 + rank + i)
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()


def alike(rank):
    model = replica()
    before = look(model)
    train(model, rank)
    return before + look(model)


def one_differs(rank, which, change):
    model = replica()
    train(model, rank)
    if rank == which:
        with torch.no_grad():
            change(model.module[2].weight)
    return look(model)


def bit(w):
    w[1, 2] = torch.nextafter(w[1, 2], torch.tensor(9.0))


def swap(w):
    w.copy_(w.flip(0))  # the same sum and norm


def to_nan(w):
    w[0, 0] = float("nan")


def all_nan(rank):
    model = replica()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    return look(model)


def low_precision(rank):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2).bfloat16())
    return look(model)


def buffers_differ(rank):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    model.module[1].running_mean += rank
    return look(model)


def left_out(rank):
    net = nn.Linear(3, 2)
    net.own = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["own"])
    return look(nn.parallel.DistributedDataParallel(net))


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def buffers(rank, sends=False, change=None):
    """What is observed of the buffers, once `change` was made on rank 1; without the step."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its successor is new
        model = nn.parallel.DistributedDataParallel(Buffered(), broadcast_buffers=sends)
    if rank == 1 and change is not None:
        change(model.module)
    loop = SimpleNamespace(model=model, ranks=ranks_of(model), train_iter=7)
    loop.ranks.join("look")
    found = seen(OwnBuffers, loop)
    return [(x.code, x.layer or x.param, round(x.value, 2), x.severity, x.ranks) for x in found]


def no_replica(rank):
    torch.manual_seed(rank)
    return look(nn.Linear(3, 2))


def main():
    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        results = {
            "alike": alike(rank),
            "rank 1 differs": one_differs(rank, 1, lambda w: w.add_(1.0)),
            "rank 0 differs": one_differs(rank, 0, lambda w: w.mul_(2.0)),
            "a bit": one_differs(rank, 1, bit),
            "in another order": one_differs(rank, 1, swap),
            "rates differ": look(replica(), lr=0.1 * (1 + rank)),
            "rank 1 is NaN": one_differs(rank, 1, to_nan),
            "all are NaN": all_nan(rank),
            "low precision": low_precision(rank),
            "buffers differ": buffers_differ(rank),
            "no replica": no_replica(rank),
            "left out": left_out(rank),
            "equal buffers": buffers(rank),
            "sent buffers": buffers(rank, True, lambda m: m.scale.add_(1)),
            "a buffer": buffers(rank, change=lambda m: m.scale.add_(1)),
            "a cache": buffers(rank, change=lambda m: m.cache.resize_(5)),
            "a buffer more": buffers(rank, change=lambda m: m.register_buffer("new", torch.ones(1))),
            "near statistics": buffers(rank, change=lambda m: m.norm.running_mean.add_(0.1)),
            "a far mean": buffers(rank, change=lambda m: m.norm.running_mean.add_(0.6)),
            "a far variance": buffers(rank, change=lambda m: m.norm.running_var.mul_(9)),
            "one channel": buffers(rank, change=lambda m: m.norm.running_mean[:1].add_(100)),
        }
    except Exception:
        results = {"error": traceback.format_exc()}
    Path(folder, f"{rank}.pt").write_text(json.dumps(results))
    if "error" not in results:
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # with gloo the process may abort at a normal exit


if __name__ == "__main__":
    main()
