"""One of two ranks whose losses spike, or whose tokens differ: `spikes_worker.py FOLDER`."""

import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hookcb import Diagnose, Learner, watch
from tests.ranks.support import join_group, run_cases

RANK, WORLD, AT, N_STEP = 0, 1, 60, 100


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def batches(bad_rank, stream, change=None):
    """Batches of a stream; in one, two samples of a rank are far away, with wrong labels.

    Or all batches of that rank from this one on, and their labels, are what `change(x, y)` makes of them.
    """
    generator = torch.Generator().manual_seed(stream)
    found = []
    for i in range(N_STEP):
        y = torch.randint(3, (16,), generator=generator)
        x = nn.functional.one_hot(y, 4).float() * 2 + torch.randn(16, 4, generator=generator) / 2
        if change is not None:
            x, y = change(x, y) if i >= AT and bad_rank == RANK else (x, y)
        elif i == AT and bad_rank in (RANK, None):
            x[[3, 7]] *= 60
            y[[3, 7]] = (y[[3, 7]] + 1) % 3
        found.append((x, y))
    return found


def shifted(x, y):
    return x + 3, (y + 1) % 3


def relabeled(x, y):
    return x, (y + 1) % 3


def told(verdict):
    return [
        [f.severity, f.step, list(f.ranks), f.message] for f in verdict.findings if f.code == "loss.spike"
    ]


def watched(net, data):
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    with watch(net, opt, Diagnose(show=False)) as w:
        for x, y in data:
            opt.zero_grad()
            cross_entropy(net(x), y).backward()
            opt.step()
    return told(w.diagnose())


def one_rank_has_the_batch_in_ddp():
    return watched(DistributedDataParallel(model()), batches(1, RANK))


def one_rank_has_the_batch_in_a_learner():
    learn = Learner(
        batches(1, RANK), DistributedDataParallel(model()), cross_entropy, torch.optim.Adam, lr=0.01
    )
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose(show=False))
    return told(learn.diagnose())


def sharded():
    net = model()
    fully_shard(net[0])
    fully_shard(net)
    return net


def one_rank_has_the_batch_in_fsdp2():
    return watched(sharded(), batches(1, RANK))


def one_rank_has_other_data_in_ddp():
    return watched(DistributedDataParallel(model()), batches(1, RANK, shifted))


def one_rank_has_other_data_in_fsdp2():
    return watched(sharded(), batches(1, RANK, shifted))


def one_rank_has_other_labels_in_a_learner():
    learn = Learner(batches(1, RANK, relabeled), DistributedDataParallel(model()), cross_entropy, lr=0.01)
    with learn.no_logging():
        learn.fit(1, cbs=Diagnose(show=False))
    return told(learn.diagnose())


def all_ranks_share_the_batch_in_tensor_parallelism():
    net = model()
    parallelize_module(
        net, init_device_mesh("cpu", (WORLD,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    return watched(net, batches(None, 0))


class Mixture(nn.Module):
    """Five experts and a router that sends a token to the one of its largest feature."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.router.weight.data = torch.eye(5)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(5))

    def forward(self, x):
        weights, places = self.router(x).softmax(-1).topk(1)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        return weights * every.gather(1, places[..., None].expand(-1, 1, 3)).squeeze(1)


def each_rank_uses_two_of_five_experts():
    torch.manual_seed(0)
    net = DistributedDataParallel(Mixture())
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(RANK)
    with watch(net, opt, Diagnose(show=False)) as w:
        for _ in range(2 * N_STEP):
            place = torch.randint(2, (256,), generator=generator) + 2 * RANK
            x = torch.randn(256, 5, generator=generator) / 8 + nn.functional.one_hot(place, 5)
            opt.zero_grad()
            cross_entropy(net(x), place % 3).backward()
            opt.step()
    return [[f.code, f.layer, list(f.ranks), f.message] for f in w.diagnose().findings]


CASES = (
    each_rank_uses_two_of_five_experts,
    one_rank_has_the_batch_in_ddp,
    one_rank_has_the_batch_in_a_learner,
    one_rank_has_the_batch_in_fsdp2,
    all_ranks_share_the_batch_in_tensor_parallelism,
    one_rank_has_other_data_in_ddp,
    one_rank_has_other_data_in_fsdp2,
    one_rank_has_other_labels_in_a_learner,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    RANK, WORLD = join_group()
    run_cases({function.__name__: function for function in CASES}, sys.argv[1])
