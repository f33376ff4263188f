"""Memory: memory on a CPU for what waits to be reduced, used again and again."""

from typing import Any

import torch
from torch import Tensor

BLOCK = 2**18  # elements that are allocated together: 1 MB
MAX_ALIKE = 64  # tensors of one shape that are allocated together
MAX_KEPT = 8 * BLOCK  # elements that are kept for next time


class Memory:
    """Memory on a CPU for what a callback keeps of several batches; lent, taken back, and lent again.

    A tensor that is allocated in a step and kept splits a hole that tensors of a training would fill. So the
    heap gets pages from the system and returns them at each step, which can take a fifth of a step.

    >>> memory = Memory()
    >>> kept = memory.keep(torch.ones(3))
    >>> memory.take_back()
    >>> memory.keep(torch.zeros(3)) is kept
    True
    """

    def __init__(self) -> None:
        self._free: dict[torch.Size, list[Tensor]] = {}
        self._lent: list[tuple[list[Tensor], Tensor]] = []
        self._n_elements = 0

    def lend(self, shape: torch.Size) -> Tensor:
        """A tensor to fill, float32."""
        free = self._free.get(shape) or self._enlarge(shape)
        x = free.pop()
        self._lent.append((free, x))
        return x

    def keep(self, x: Tensor) -> Tensor:
        """A copy in this memory; `x` itself if it is on another device, empty, or not float32."""
        if not x.is_cpu or x.dtype is not torch.float32 or not x.numel():
            return x
        return self.lend(x.shape).copy_(x)

    @property
    def n_lent(self) -> int:
        """Number of tensors that are lent."""
        return len(self._lent)

    def take_back(self, which: slice = slice(None)) -> None:
        """Takes back tensors, in the order in which they were lent; by default all. They are overwritten."""
        for free, x in self._lent[which]:
            free.append(x)
        del self._lent[which]
        if self._n_elements > MAX_KEPT:  # as for large batches, or shapes that differ from batch to batch
            self._free, self._n_elements = {}, 0

    def _enlarge(self, shape: torch.Size) -> list[Tensor]:
        free, n = self._free.setdefault(shape, []), max(1, shape.numel())
        k = max(1, min(MAX_ALIKE, BLOCK // n))
        with torch.inference_mode(False):
            free += torch.empty(k, *shape, dtype=torch.float32, device="cpu").unbind()
        self._n_elements += k * n
        return free

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, ()  # a copy is empty
