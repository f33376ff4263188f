"""What the allocator of CUDA tells, and the record it writes when memory has run out."""

import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookcb.core.files import write_whole
from hookcb.core.torch_private import (
    is_memory_history_on,
    memory_history,
    start_memory_history,
    stop_memory_history,
)

MOST_EVENTS = 100_000  # of the allocator's history, as in torch's own tutorial on it


class Allocator:
    """Bytes that torch has allocated on some devices; its peak statistics stay as they are.

    Reading waits for nothing: the allocator counts on the host.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = list(devices)
        self.most = 0

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> "Allocator | None":
        """For the CUDA devices that tensors are on, None where they are on none."""
        on = {x.device for x in tensors if x.is_cuda}
        return cls(sorted(on, key=str)) if on else None

    def counts(self) -> tuple[int, int]:
        """Bytes allocated now, and the most since the statistics were last reset, by whoever did."""
        of = [torch.cuda.memory_stats_as_nested_dict(device) for device in self.devices]
        counts = [stats["allocated_bytes"]["all"] for stats in of if stats]
        return sum(x["current"] for x in counts), sum(x["peak"] for x in counts)

    def begin(self) -> tuple[int, int, int]:
        """What `end` needs to tell what happens from now on."""
        now, peak = self.counts()
        mark = now, peak, self.most
        self.most = now
        return mark

    def end(self, mark: tuple[int, int, int]) -> tuple[int, int]:
        """Bytes allocated now, and the most there were, less those there were at `begin`.

        The most is exact where the allocator's own peak has risen, else the most at any `begin` or `end`.
        """
        before, peak_before, most_outside = mark
        now, peak = self.counts()
        most = max(self.most, now, peak if peak > peak_before else 0)
        self.most = max(most, most_outside)
        return now - before, most - before


def check_snapshot(snapshot: Any) -> Path | None:
    """The path of a file to write, or None.

    Raises:
        TypeError: where it is neither.
    """
    if snapshot is not None and not isinstance(snapshot, str | Path):
        raise TypeError(f"snapshot is {snapshot!r}; give the path of a file to write, or None")
    return None if snapshot is None else Path(snapshot)


class AllocatorHistory:
    """Has CUDA's allocator remember what it does, from `start` to `stop`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._outer: BaseException | None = None
        self._is_ours = False

    def start(self) -> None:
        """Begins; a history that someone else has begun goes on as it is.

        Raises:
            ValueError: where the path is a folder.
        """
        if self.path.is_dir():
            raise ValueError(f"snapshot is {str(self.path)!r}, a folder; give the path of a file to write")
        self._outer = sys.exception()  # as where a fit is tried again after one that ran out of memory
        self._is_ours = not is_memory_history_on()
        if self._is_ours:
            start_memory_history(MOST_EVENTS)

    def stop(self) -> None:
        """Ends, and writes the history where memory has run out, which the error then says."""
        error, outer, self._outer = sys.exception(), self._outer, None
        try:
            if error is not outer and isinstance(error, torch.OutOfMemoryError):
                self._write()
                error.add_note(f"what the allocator did until then is in {self.path}")
        finally:
            if self._is_ours:
                stop_memory_history()
            self._is_ours = False

    def _write(self) -> None:
        history = memory_history()
        write_whole(self.path, lambda opened: pickle.dump(history, opened))
