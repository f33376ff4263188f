"""Numbers that Diagnose records at each batch."""

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hookcb.diagnosis.evidence import Series

STATM = Path("/proc/self/statm")  # in pages
MAX_POINTS = 8_192


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

    def extend(self, steps: Sequence[int], values: Sequence[float | Tensor]) -> None:
        """Appends the numbers of several batches."""
        if self._stride == 1 and len(self._steps) + len(steps) <= self._max_points:
            self._steps += steps
            self._values += values
            self._n += len(steps)
        else:
            for step, value in zip(steps, values, strict=True):
                self.add(step, value)

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
