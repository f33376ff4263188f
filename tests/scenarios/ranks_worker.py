"""One of two processes; writes what it saw to a file. Run by test_ranks.py."""

import os
import sys
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hookcb import GradientHealth, HookCallback, Learner
from hookcb.hooks.hook import Hook, Hooks, hook_output, hook_outputs
from tests.gradients.support import assert_matches, batches, by_hand, learner, mlp


def batch(rank):
    """Two samples on rank 0, three on rank 1."""
    return torch.arange((2 + rank) * 2.0).view(2 + rank, 2) + 10 * rank


def gathered(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    x = batch(rank)
    result = {"expected": [m(torch.cat([batch(0), batch(1)])).detach() for m in (model[:1], model)]}
    with Hooks(list(model), lambda m, i, o: o, gather=True) as hooks:
        model(x)
        result["hooks"] = list(hooks.stored)
        result["again"] = list(hooks.stored)
    with Hook(model[0], lambda m, i, o: (o, {"n": i[0]}, None, "text", 3), gather=True, cpu=True) as h:
        model(x)
        result["nested"] = h.stored
    with Hook(model[0], lambda m, i, o: o.sum(), gather=True) as h:
        model(x)
        result["zero_d"] = h.stored
    with Hook(model[0], lambda m, gi, go: go[0], is_forward=False, gather=True) as h:
        model(x).sum().backward()
        result["grad"] = h.stored
    with Hook(model[0], lambda m, i, o: o, gather=True) as h:
        result["before_any_call"] = h.stored
    with Hook(model[0], lambda m, i, o: o.bfloat16(), gather=True) as h, torch.no_grad():
        model(x)
        model(x * 0)
        result["bfloat16"] = h.stored
    with Hook(model[0], lambda m, i, o: o) as h:
        model(x)
        result["own"] = h.stored
    if rank == 0:  # no collective in a forward: this would hang otherwise
        with Hook(model[0], lambda m, i, o: o, gather=True):
            model(x)
    return result


def with_dtensors(rank):
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(2, 3)
    for name, p in list(model.named_parameters()):
        model.register_parameter(
            name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)] if p.dim() > 1 else None))
        )
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    with (
        hook_output(model) as out,
        hook_outputs([model], grad=True) as grads,
        Hook(model, lambda m, gi, go: go, is_forward=False) as both,
    ):
        y = model(x)
        y.sum().backward()
    return {
        "is_dtensor": isinstance(out.stored, DTensor),
        "out": torch.equal(out.stored.full_tensor(), y.detach().full_tensor()),
        "grad": torch.equal(
            grads.stored[0][0].full_tensor()
            if isinstance(grads.stored[0][0], DTensor)
            else grads.stored[0][0],
            torch.ones(4, 3),
        ),
        "both": both.stored[0] is not None,
    }


def under_ddp(rank):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    model = nn.parallel.DistributedDataParallel(net)
    data = [(batch(rank), torch.ones(2 + rank, 1))] * 3
    forward = HookCallback(hook=lambda m, i, o: o.mean(), name="forward")
    back = HookCallback(is_forward=False, hook=lambda m, gi, go: go[0].mean(), name="back")
    learn = Learner((data, None), model, nn.functional.mse_loss, torch.optim.SGD, lr=0.01)
    with learn.no_logging():
        learn.fit(1, cbs=[forward, back])
    return {
        "forward": sorted(forward.results),
        "back": sorted(back.results),
        "weights": [p.detach() for p in net.parameters()],
        "left": sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in net.modules()
        ),
    }


class Sharded(nn.Module):
    """A net whose parameters lie on both ranks, in parts."""

    def __init__(self):
        super().__init__()
        self.net, mesh = mlp(hidden=7), init_device_mesh("cpu", (2,))
        for m in (self.net[0], self.net[2]):
            for name, p in list(m.named_parameters()):
                setattr(m, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))

    def forward(self, x):
        first, last = self.net[0], self.net[2]
        x = F.linear(x, first.weight.full_tensor(), first.bias.full_tensor()).relu()
        return F.linear(x, last.weight.full_tensor(), last.bias.full_tensor())


def gradients_of_dtensors(rank):
    health = GradientHealth()
    learn = learner(Sharded(), batches(), health)
    steps = by_hand(mlp(hidden=7), batches())
    for step in steps:
        for kind in ("grads", "clipped", "before", "after", "start"):
            setattr(step, kind, {f"net.{name}": x for name, x in getattr(step, kind).items()})
    assert_matches(health, steps, rel=1e-3)
    return not learn.diagnose().findings


def main():
    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for part in (gathered, with_dtensors, under_ddp, gradients_of_dtensors):
        try:
            results[part.__name__] = part(rank)
        except Exception:
            results[part.__name__] = traceback.format_exc()
            break
    torch.save(results, f"{folder}/{rank}.pt")
    if not any(isinstance(r, str) for r in results.values()):
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # with gloo the process may abort at a normal exit


if __name__ == "__main__":
    main()
