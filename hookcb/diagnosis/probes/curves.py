"""Numbers that Diagnose records of each batch, as curves in bounded memory."""

import math
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookcb.core.optim import largest_lr
from hookcb.diagnosis.run import Series

STATM = Path("/proc/self/statm")  # in pages
MAX_POINTS = 8_192
MAX_MEMORY = 128  # points of memory in use, which is read in fewer batches then
MANY_READINGS, MEMORY_EVERY = 64, 4  # batches in which it is read at first, and distance of the later ones


class Curve:
    """A number per batch, in bounded memory; tensors stay on their device until `series()` is read.

    Args:
        max_points: number of points above which every second one is dropped.
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._steps: list[int] = []
        self._values: list[float | Tensor] = []
        self._stride = 1
        self._n = 0

    def is_due(self) -> bool:
        """Whether the next number is kept; if not, it counts as added."""
        is_due = self._n % self._stride == 0
        self._n += not is_due
        return is_due

    def add(self, step: int, value: float | Tensor) -> None:
        """Appends the number of a batch."""
        if self._n % self._stride == 0:
            if len(self._steps) == self._max_points:
                self._steps, self._values = self._steps[::2], self._values[::2]
                self._stride *= 2
            self._steps.append(step)
            self._values.append(value)
        self._n += 1

    def series(self) -> Series:
        """All kept points; waits for the device."""
        waiting = [x for x in self._values if isinstance(x, Tensor)]
        if waiting:
            read: Iterator[float] = iter(torch.stack([x.float().reshape(()) for x in waiting]).tolist())
            self._values = [next(read) if isinstance(x, Tensor) else x for x in self._values]
        return Series(list(self._steps), [float(x) for x in self._values])


class ResidentMemory:
    """Memory in use: allocated on the GPU if one is in use, else resident in the process (Linux only)."""

    def __init__(self) -> None:
        self._file = STATM.open("rb", buffering=0) if STATM.exists() else None

    def bytes_in_use(self) -> float | None:
        """Bytes in use, without memory-mapped files; None if unknown."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return float(torch.cuda.memory_allocated())
        if self._file is None:
            return None
        _, resident, shared, *_ = os.pread(self._file.fileno(), 256, 0).split()
        return float((int(resident) - int(shared)) * mmap.PAGESIZE)

    def close(self) -> None:
        """Closes the file it reads from."""
        if self._file is not None:
            self._file.close()


class BatchCurves:
    """Numbers of each batch: loss, learning rate, time and memory.

    Attributes:
        losses: by id of the optimizer whose step followed.
        wait: seconds for which the batch was fetched.
        length: seconds from the end of one backward to that of the next.
        n_losses: number of losses that were recorded.
    """

    def __init__(self) -> None:
        self.loss, self.lr, self.wait, self.length = (Curve() for _ in range(4))
        self.losses: defaultdict[int, Curve] = defaultdict(Curve)
        self.memory = Curve(MAX_MEMORY)
        self.n_losses = 0
        self._last_loss: float | Tensor | None = None
        self._ended = math.nan  # time at which the last backward had ended, NaN where an epoch begins
        self._resident, self._memory_due = ResidentMemory(), 0

    def close(self) -> None:
        """Closes the file from which memory is read."""
        self._resident.close()

    def begin_epoch(self) -> None:
        """Leaves out the time until the first batch."""
        self._ended = math.nan

    def begin_batch(self, step: int, waited: float) -> None:
        """Adds the time for which a batch was fetched, unless the fetch started the loader."""
        if step and not math.isnan(self._ended):
            self.wait.add(step, waited)

    def add_loss(self, step: int, loss: float | Tensor) -> None:
        """Adds the loss of a batch."""
        self._last_loss, self.n_losses = loss, self.n_losses + 1
        self.loss.add(step, loss)

    def end_backward(self, step: int, now: float) -> None:
        """Adds the time of a batch; `now` is that at which its first backward had ended."""
        if not math.isnan(self._ended):
            self.length.add(step, now - self._ended)
        self._ended = now

    def end_step(self, step: int, opt: Optimizer) -> None:
        """Adds the rate of a step, and the loss before it."""
        if self._last_loss is not None:
            self.losses[id(opt)].add(step, self._last_loss)
        self.lr.add(step, largest_lr(opt))

    def end_batch(self, step: int, n_batches: int) -> None:
        """Adds memory in use if it is due; `n_batches` have ended."""
        is_due = n_batches <= MANY_READINGS or n_batches >= self._memory_due
        if is_due and self.memory.is_due() and (used := self._resident.bytes_in_use()) is not None:
            self.memory.add(step, used)
            self._memory_due = n_batches + MEMORY_EVERY
