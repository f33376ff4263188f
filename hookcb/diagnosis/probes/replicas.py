"""Compares the parameters of DistributedDataParallel replicas."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.ranks import name_ranks
from hookcb.diagnosis.evidence import Observation

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
CHUNK = 1 << 20  # elements that are read at a time
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that each bit changes the product
HALF = 0xFFFFFFFF  # of 64 bits; a float64 holds that exactly


def can_compare(loop: Any) -> bool:
    """Whether the model has replicas on ranks that meet at the end of an epoch."""
    ranks = loop.ranks
    is_replica = isinstance(loop.model, nn.parallel.DistributedDataParallel)
    return bool(ranks.world > 1 and is_replica)


def observe_replicas(loop: Any) -> Iterator[Observation]:
    """Compares all parameters and learning rates between ranks, by hashes; called on all of them."""
    if not can_compare(loop):
        return
    names, own = _hashes(loop.model)
    for group in loop.opt.param_groups if loop.opt is not None else ():
        names.append("")
        own.append(float(group["lr"]))
    extremes = loop.ranks.max([*own, *(-x for x in own)])
    differs = [high != -low for high, low in zip(extremes[: len(own)], extremes[len(own) :], strict=True)]
    if not any(differs):
        return
    by_rank = loop.ranks.gather(own)
    apart = [rank for rank, x in enumerate(by_rank) if x != by_rank[0]]
    name = names[differs.index(True)]
    what = f"Parameter {name}" if name else "The learning rate"
    yield Observation(
        "replica.diverged",
        param=name,
        step=loop.train_iter,
        value=float(len(apart)),
        text=f"{what} differs on {name_ranks(apart)} from that of rank 0; replicas must be identical.",
        causes=("parameters that are changed outside the optimizer, or on one rank only",)
        if name
        else ("a schedule that follows a number of its rank only",),
        next_steps=(
            "Look for code that runs on one rank only, and for parameters that DDP does not manage"
            if name
            else "Have the schedule follow numbers that are the same on all ranks, such as learn.recorder's",
        ),
    )


@torch.no_grad()
def _hashes(model: nn.Module) -> tuple[list[str], list[float]]:
    """Names of the parameters, each twice, and the halves of a 64-bit hash of its bits."""
    named = [(name, p.detach()) for name, p in model.named_parameters() if p.layout is torch.strided]
    if not named:
        return [], []
    hashes = torch.stack([_hash(p).cpu() for _, p in named]).tolist()
    halves = [float(half) for x in hashes for half in ((x >> 32) & HALF, x & HALF)]
    names = [name.removeprefix("module.") for name, _ in named]
    return [name for name in names for _ in range(2)], halves


def _hash(p: Tensor) -> Tensor:
    """Sum of the elements' bits, each multiplied by a number that depends on its place; it wraps around."""
    bits = p.contiguous().view(INTEGERS[p.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=p.device)
    for begin in range(0, len(bits), CHUNK):
        part = bits[begin : begin + CHUNK].long() + 1
        places = torch.arange(begin + 1, begin + len(part) + 1, device=p.device)
        total += (part * (places * FACTOR)).sum()
    return total
