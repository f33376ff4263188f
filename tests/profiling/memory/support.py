"""Nets whose memory can be computed by hand, and a fit that watches it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookcb import Learner
from hookcb.profiling.memory.callback import MemoryStats

FLOAT, LONG = 4, 8  # bytes of an element


class Block(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(d), nn.Linear(d, 2 * d)
        self.act, self.out = nn.GELU(), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.out(self.act(self.fc(self.norm(x))))


class Blocks(nn.Module):
    """Repeated blocks in a list; `use_reentrant` checkpoints them."""

    def __init__(self, n=4, use_reentrant=None):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(n))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = (
                block(x)
                if self.use_reentrant is None
                else checkpoint(block, x, use_reentrant=self.use_reentrant)
            )
        return self.head(x)


def mlp(d=6, hidden=5, out=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, out))


def batches_for(n=4, bs=8, shape=(6,), n_classes=3):
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(bs, *shape, generator=g) for _ in range(n)]
    return [(b, torch.randint(0, n_classes, (bs,), generator=g)) for b in x]


def learner_for(
    model, batches=None, loss_func=F.cross_entropy, opt_func=torch.optim.SGD, valid=None, **options
):
    batches = batches_for() if batches is None else batches
    return Learner((batches, valid), model, loss_func, opt_func, lr=0.01, **options)


def watch(model, batches=None, cbs=(), every=1, modules=None, n_epoch=1, **options):
    """The `MemoryStats` of a fit of the model."""
    stats = MemoryStats(modules, every)
    learn = learner_for(model, batches, **options)
    with learn.no_logging():
        learn.fit(n_epoch, cbs=[stats, *cbs])
    return stats


def kept_by_hand(model, x, loss_of):
    """Bytes of what torch saves that is neither parameter nor buffer nor input, asked of torch anew."""
    sizes, given = {}, {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), x]}

    def pack(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = loss_of(model(x))  # alive, so that no address comes twice
    kept = sum(size for ptr, size in sizes.items() if ptr not in given)
    loss.sum().backward()
    return kept
