"""One of two ranks; watches plain loops with faults of replicas: `replica_worker.py FOLDER [[but] CASES]`."""

import contextlib
import sys
import warnings
from unittest import mock

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hookcb import Diagnose, watch
from tests.ranks.hanging_worker import Gate
from tests.ranks.support import OwnTime, join_group, run_cases

RANK, WORLD = 0, 1
CASES = {}
OWN = OwnTime()
N = 40


def case(function):
    CASES[function.__name__] = function
    return function


def net(seed=0, norm=False):
    torch.manual_seed(seed)
    inside = nn.BatchNorm1d(16) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(4, 16), inside, nn.ReLU(), nn.Linear(16, 2))


def batch(i, rank=None, n=8):
    rank = RANK if rank is None else rank
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1_000 * rank + i))
    return x, (x.sum(1) > 0).long()


def average(tensors):
    for x in tensors:
        distributed.all_reduce(x)
        x /= WORLD


def train(
    model,
    n=N,
    opt=None,
    watched=None,
    call=None,
    data=batch,
    after_backward=lambda i, opt: None,
    after_step=lambda i, opt: None,
    accumulate=1,
    around=contextlib.nullcontext,
):
    """The verdict on a loop of one's own: its alarms with ranks, layer and text, and what was passed."""
    opt = opt or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    diagnose = Diagnose(show=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with watch(watched or model, cbs=diagnose), around():
            for i in range(n):
                with contextlib.ExitStack() as stack:
                    if accumulate > 1 and (i + 1) % accumulate:
                        stack.enter_context(model.no_sync())
                    x, y = data(i)
                    cross_entropy((call or (lambda i, x: model(x)))(i, x), y).backward()
                if (i + 1) % accumulate == 0:
                    after_backward(i, opt)
                    opt.step()
                    after_step(i, opt)
                    opt.zero_grad()
    return told(diagnose.verdict)


def told(verdict):
    return {
        "status": verdict.status,
        "alarms": [
            [f.code, f.severity, f.layer, f.param, list(f.ranks), f.step, f.message, list(f.causes)]
            for f in verdict.findings
            if f.severity != "info" and not f.consequence_of
        ],
        "notes": [[f.code, f.message] for f in verdict.findings if f.severity == "info"],
        "gaps": {code: gap.reason for gap in verdict.gaps for code in gap.codes},
        "passed": list(verdict.passed) if hasattr(verdict, "passed") else [],
        "text": str(verdict),
    }


def clip(model, ranks=(0, 1)):
    return lambda i, opt: nn.utils.clip_grad_norm_(model.parameters(), 0.1) if RANK in ranks else None


# ---- faults


@case
def clip_on_one_rank():
    model = DDP(net())
    return train(model, after_backward=clip(model, (1,)))


@case
def all_reduce_that_loses_data():
    model = DDP(net())

    def hook(state, bucket):
        whole = bucket.buffer() / WORLD
        if RANK == 1:
            bucket.gradients()[0].mul_(0.5)  # of rank 1, after its part was sent
        return (
            distributed.all_reduce(whole, async_op=True)
            .get_future()
            .then(lambda future: future.value()[0] * (1.0 if RANK == 0 else 1.001))
        )

    model.register_comm_hook(None, hook)
    return train(model)


@case
def broadcast_that_loses_data():
    model = DDP(net())
    if RANK == 1:
        with torch.no_grad():
            model.module[3].weight[0, 0] += 0.1
    return train(model)


@case
def no_init_sync():
    return train(DDP(net(seed=RANK), init_sync=False))


@case
def hooks_lost():
    model = DDP(net(), find_unused_parameters=True)
    model.module[3].weight = nn.Parameter(model.module[3].weight.detach().clone())
    return train(model)


@case
def raw_module_every_second_step():
    model = DDP(net())
    return train(model, call=lambda i, x: model(x) if i % 2 else model.module(x))


@case
def raw_module_watched_inside():
    model = DDP(net())
    return train(model, watched=model.module, call=lambda i, x: model(x) if i % 2 else model.module(x))


@case
def raw_module_always():
    model = DDP(net())
    return train(model, watched=model.module, call=lambda i, x: model.module(x))


@case
def rate_of_one_rank():
    model = DDP(net())

    def change(i, opt):
        if i == 9 and RANK == 1:
            opt.param_groups[0]["lr"] *= 0.5

    return train(model, after_step=change)


@case
def step_in_no_sync():
    model = DDP(net())

    def call(i, x):
        with model.no_sync():
            return model(x)

    return train(model, call=call)


@case
def alone():
    return train(net())


@case
def alone_with_logging():
    return train(net(), after_step=lambda i, opt: distributed.all_reduce(torch.ones(1)))


@case
def alone_on_the_same_batches():
    return train(net(), data=lambda i: batch(i, 0))


@case
def all_reduce_by_hand_that_stops():
    model = net()

    def reduce(i, opt):
        if i < 12:
            average([p.grad for p in model.parameters()])
        else:
            distributed.all_reduce(torch.ones(1))

    return train(model, after_backward=reduce)


class Halves(nn.Module):
    """Tensor parallelism by plain tensors: columns, then rows, and a bias that ranks share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        up, down = torch.randn(16, 4), torch.randn(2, 16) / 4
        self.up = nn.Parameter(up.chunk(WORLD)[RANK].clone())
        self.down = nn.Parameter(down.chunk(WORLD, 1)[RANK].clone())
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        from torch.distributed.nn.functional import all_reduce

        return all_reduce((x @ self.up.T).relu() @ self.down.T) / WORLD + self.bias


@case
def clip_of_halves_on_one_rank():
    model = Halves()
    return train(model, data=lambda i: batch(i, 0), after_backward=clip(model, (1,)))


def in_parallel():
    """Tensor parallelism by DTensor; ranks share the last bias."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,))
    return parallelize_module(net(), mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})


@case
def clip_of_dtensors_on_one_rank():
    model = in_parallel()

    def scale(i, opt):
        for p in model.parameters():
            p.grad.to_local().mul_(0.1 if RANK == 1 else 1.0)

    return train(model, data=lambda i: batch(i, 0), after_backward=scale)


# ---- what only a Learner saw before


@case
def inputs_of_one_rank():
    def data(i):
        x, y = batch(i)
        return (x * 255 if RANK == 1 else x), y

    return train(DDP(net()), data=data)


@case
def the_same_batches():
    return train(DDP(net()), data=lambda i: batch(i, 0))


@case
def the_same_batches_watched_inside():
    model = net()
    outer = DDP(model)
    return train(outer, watched=model, data=lambda i: batch(i, 0))


@case
def a_buffer_of_one_rank():
    inner = net(norm=True)
    inner.register_buffer("temperature", torch.ones(3))
    model = DDP(inner, broadcast_buffers=False)
    return train(model, after_step=lambda i, opt: inner.temperature.add_(0.1 * RANK))


@case
def the_same_dropout():
    torch.manual_seed(0)
    return train(DDP(nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))))


def epochs(set_epoch=lambda sampler, epoch: None):
    """Four epochs of a DataLoader with a DistributedSampler."""
    dataset = TensorDataset(*batch(0, 0, 160))
    sampler = DistributedSampler(dataset, WORLD, RANK)
    loader = DataLoader(dataset, 8, sampler=sampler)

    def batches():
        for epoch in range(4):
            set_epoch(sampler, epoch)
            yield from loader

    each = batches()
    return train(DDP(net()), 4 * len(loader), data=lambda i: next(each))


@case
def the_same_order():
    return epochs()


@case
def batches_that_repeat():
    return train(DDP(net()), data=lambda i: batch(i % 3 if RANK else i))


@case
def averaged_twice():
    model = DDP(net())
    return train(model, after_backward=lambda i, opt: [p.grad.div_(WORLD) for p in model.parameters()])


class Slow(TensorDataset):
    """Samples that take long to read on rank 1."""

    def __getitem__(self, i):
        OWN.lag(1e-3 * RANK)
        return super().__getitem__(i)


def many(dataset, forward=lambda: None, n=90):
    """Batches of a DataLoader, in blocks of 10."""
    loader = DataLoader(dataset(*batch(0, n=8 * n)), 8)
    samples = iter(loader)
    model = DDP(nn.Sequential(nn.Linear(4, 16), Gate(forward), nn.ReLU(), nn.Linear(16, 2)))
    with mock.patch("hookcb.diagnosis.faults.ranks.straggler.BLOCK", 10), OWN.patched():
        return train(model, n, data=lambda i: next(samples))


@case
def slow_to_read():
    return many(Slow)


@case
def slow_forward():
    return many(TensorDataset, lambda: OWN.lag(8e-3 * RANK))


@case
def as_fast_as_the_other():
    return many(TensorDataset)


@case
def slow_with_a_collective_in_the_forward():
    return many(TensorDataset, lambda: (OWN.lag(8e-3 * RANK), distributed.barrier()))


def labels(of):
    """Batches in which each rank has labels of its own, of three classes."""

    def data(i):
        x, _ = batch(i)
        return x, of[RANK][torch.arange(len(x)) % len(of[RANK])]

    torch.manual_seed(0)
    return train(DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))), data=data)


@case
def a_class_on_no_rank():
    return labels((torch.tensor([0, 1]), torch.tensor([1, 0])))


# ---- controls


@case
def a_class_on_each_rank():
    return labels((torch.tensor([0, 1]), torch.tensor([2, 1])))


@case
def another_order():
    return epochs(lambda sampler, epoch: sampler.set_epoch(epoch))


@case
def healthy():
    return train(DDP(net(norm=True)))


@case
def clipped_on_all():
    model = DDP(net())
    return train(model, after_backward=clip(model))


@case
def wrapped_later():
    """The model is watched before it is wrapped, as frameworks do."""
    inner, diagnose = net(), Diagnose(show=False)
    with watch(inner, cbs=diagnose):
        model = DDP(inner)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i in range(N):
            x, y = batch(i)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return told(diagnose.verdict)


@case
def accumulating():
    return train(DDP(net()), accumulate=4, n=2 * N)


@case
def zero_optimizer():
    model = DDP(net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return train(model, opt=opt)


@case
def own_statistics():
    return train(DDP(net(norm=True), broadcast_buffers=False))


@case
def unused_parameters():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = net(), net(1)

        def forward(self, x):
            return self.a(x) if torch.rand(()) < 0.5 else self.b(x)

    torch.manual_seed(RANK)
    return train(DDP(Two(), find_unused_parameters=True))


@case
def half_precision_hook():
    model = DDP(net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model)


@case
def power_sgd_hook():
    model = DDP(net())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=10)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model)


@case
def joining():
    model = DDP(net())
    return train(model, n=N - 10 * RANK, around=model.join)


@case
def average_on_rank_0():
    model = DDP(net())
    copies = [p.detach().clone() for p in model.parameters()]

    def follow(i, opt):
        for copy, p in zip(copies, model.parameters(), strict=True):
            copy.lerp_(p.detach(), 0.1)

    return train(model, after_step=follow if RANK == 0 else lambda i, opt: None)


@case
def best_weights_on_rank_0():
    """The loop ends; then rank 0 loads its best weights, while it is still watched."""
    model = DDP(net())
    best = {}

    def restore(i, opt):
        if i == 20:
            best.update({name: x.clone() for name, x in model.state_dict().items()})
        if i == N - 1 and RANK == 0:
            model.load_state_dict(best)

    return train(model, after_step=restore)


@case
def reduced_by_hand():
    model = net()
    return train(model, after_backward=lambda i, opt: average([p.grad for p in model.parameters()]))


@case
def local_sgd_by_hand():
    model = net()
    return train(
        model, after_step=lambda i, opt: average([p.data for p in model.parameters()]) if i % 7 == 6 else None
    )


@case
def local_sgd_of_torch():
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=10, warmup_steps=10))
    return train(model, opt=opt)


@case
def post_local_sgd_hook():
    model = DDP(net())
    one, _ = distributed.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, one, start_localSGD_iter=10)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    return train(model, opt=PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=10)))


@case
def diloco():
    model = net()
    slow = [p.detach().clone() for p in model.parameters()]
    outer = torch.optim.SGD(slow, lr=0.7, momentum=0.9, nesterov=True)

    def step(i, opt):
        if i % 12 == 11:
            for x, p in zip(slow, model.parameters(), strict=True):
                x.grad = x - p.detach()
            average([x.grad for x in slow])
            outer.step()
            for x, p in zip(slow, model.parameters(), strict=True):
                p.data.copy_(x)

    return train(model, after_step=step)


@case
def halves():
    return train(Halves(), data=lambda i: batch(i, 0))


@case
def sweep():
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + RANK))
    return train(model, data=lambda i: batch(i, 0), opt=opt)


@case
def ensemble():
    return train(net(seed=RANK))


@case
def stages():
    """A pipeline of two stages of the same structure and seed."""
    torch.manual_seed(0)
    model, diagnose = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Diagnose(show=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, cbs=diagnose):
        for i in range(N):
            x, y = batch(i, 0)
            if RANK == 0:
                out = model(x)
                distributed.send(out.detach(), 1)
                grad = torch.empty_like(out)
                distributed.recv(grad, 1)
                out.backward(grad)
            else:
                x = torch.empty(8, 4)
                distributed.recv(x, 0)
                x.requires_grad_()
                cross_entropy(model(x), y).backward()
                distributed.send(x.grad, 0)
            opt.step()
            opt.zero_grad()
    return told(diagnose.verdict)


@case
def experts():
    """Experts that begin alike on both ranks, beside layers whose gradients are averaged."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"shared": nn.Linear(4, 8), "expert": nn.Linear(8, 8), "head": nn.Linear(8, 2)})
    shared = [*model["shared"].parameters(), *model["head"].parameters()]

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return model["head"](model["expert"](model["shared"](x).relu()).relu())

    return train(Whole(), after_backward=lambda i, opt: average([p.grad for p in shared]))


def in_shards():
    from torch.distributed.fsdp import fully_shard

    model = net()
    for m in (model[0], model[3], model):
        fully_shard(m)
    return model


@case
def fully_sharded():
    return train(in_shards())


@case
def momentum_of_one_rank_of_shards():
    def change(i, opt):
        if i == 9 and RANK == 1:
            opt.param_groups[0]["momentum"] = 0.5

    return train(in_shards(), after_step=change)


@case
def tensor_parallel():
    return train(in_parallel(), data=lambda i: batch(i, 0))


def main():
    global RANK, WORLD
    RANK, WORLD = join_group()
    folder, *named = sys.argv[1:]
    is_wanted = named[:1] in ([], ["but"])  # unless it is named
    run_cases({name: f for name, f in CASES.items() if (name in named) != is_wanted}, folder)
    distributed.barrier()


if __name__ == "__main__":
    main()
