"""Hashes of tensors, by which it is seen whether ranks or batches have the same."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
CHUNK = 1 << 20  # elements that are read at a time
N_ELEMENTS = 4_096  # of a tensor of a batch that are hashed
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that each bit changes the product
SHIFT = 29  # brings the upper bits, which depend on most of an element, to the lower ones


def hash_bits(x: Tensor) -> Tensor:
    """Sum of numbers that each depend on the bits of an element and on its place; it wraps around."""
    bits = x.contiguous().view(INTEGERS[x.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for begin in range(0, len(bits), CHUNK):
        part = bits[begin : begin + CHUNK].long() + 1
        total += mix(part, torch.arange(begin + 1, begin + len(part) + 1, device=x.device)).sum()
    return total


def mix(part: Tensor, places: Tensor) -> Tensor:
    """Numbers that each depend on one of a `part`, int64, which is overwritten, and on its place."""
    part ^= places * FACTOR
    part *= FACTOR
    part ^= part >> SHIFT  # else small numbers in another order would often have the same sum
    return part * FACTOR


def hash_of(item: Any) -> Tensor | None:
    """Hash of all real tensors in a batch, those on the device of the first."""
    tensors = [x.detach() for _, x in parts(item) if isinstance(x, Tensor) and has_stats(x) and x.numel()]
    total: Tensor | None = None
    for x in tensors:
        if x.element_size() in INTEGERS and (total is None or x.device == total.device):
            flat = x.reshape(-1)  # of which at most `N_ELEMENTS` are hashed, evenly spread
            own = hash_bits(flat[:: max(1, -(-len(flat) // N_ELEMENTS))])
            total = own if total is None else total * 31 + own
    return total


def apart_from_most(ranks: Sequence[int], own: Sequence[Any]) -> tuple[int, ...]:
    """Ranks that do not have what most have, or what the first has if there is no majority."""
    usual = max(own, key=lambda x: (own.count(x), x == own[0]))
    return tuple(rank for rank, x in zip(ranks, own, strict=True) if x != usual)


def name_others(first: int, apart: Sequence[int]) -> str:
    """Words for the ranks that are not apart: "most ranks", or the first one."""
    return "most ranks" if first in apart else f"rank {first}"
