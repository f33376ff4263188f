"""One of two ranks that train blocks compiled one by one, more than torch compiles anew: FOLDER."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hookcb import Diagnose, watch
from hookcb.diagnosis.faults.model.attention_logits import GrowingLogits
from tests.ranks.support import join_group, run_cases

N_BLOCKS, D = 9, 8  # one more than torch compiles a function


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(D, 3 * D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        q, k, v = (y.view(*x.shape[:2], 2, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.down(self.up(x).relu())


def trained(prepare):
    """Number of graphs, names of the layers and of attention that were seen, and what was not checked."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, counter = nn.Sequential(*(Block() for _ in range(N_BLOCKS))), CompileCounter()
    mesh = init_device_mesh("cpu", (2,))
    prepare(model, mesh, lambda block: block.compile(backend=counter, fullgraph=True))
    opt, diagnose = torch.optim.SGD(model.parameters(), lr=0.01), Diagnose(show=False)
    with watch(model, opt, diagnose):
        for _ in range(4):
            model(torch.randn(2, 6, D, requires_grad=True)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    run = diagnose.evidence()
    seen = [name for name, layer in run.layers.items() if len(layer.series("std"))]
    return counter.frame_count, seen, [*run.measured(GrowingLogits).numbers], str(diagnose.verdict.gaps)


def fsdp2():
    def prepare(model, mesh, compiles):
        for block in model:
            compiles(block)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    return trained(prepare)


def tensor_parallel():
    def prepare(model, mesh, compiles):
        for block in model:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            compiles(block)

    return trained(prepare)


if __name__ == "__main__":
    join_group()
    run_cases({x.__name__: x for x in (fsdp2, tensor_parallel)}, sys.argv[1])
