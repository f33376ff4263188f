"""Statistics of CUDA's allocator, and its history when memory runs out."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookcb.core.torch_private import (
    is_memory_history_on,
    memory_history,
    start_memory_history,
    stop_memory_history,
)
from hookcb.core.whole import write_whole

MAX_EVENTS = 100_000  # of the allocator's history, as in torch's tutorial on it


class Meter:
    """A number of bytes, measured from `begin` to `end`, also in measurements inside one another.

    Attributes:
        most: peak since the innermost `begin`.
    """

    most = 0

    def counts(self) -> tuple[int, int]:
        """Bytes now, and their peak since an earlier time; 0 if `most` is kept up to date."""
        raise NotImplementedError

    def begin(self) -> tuple[int, int, int]:
        """Begins a measurement; returns the argument for `end`."""
        now, peak = self.counts()
        mark = now, peak, self.most
        self.most = now
        return mark

    def end(self, mark: tuple[int, int, int]) -> tuple[int, int]:
        """Change of the bytes since `begin`, and peak above those at `begin`.

        The peak is exact if that of `counts` has risen, else the largest number at a `begin` or `end`.
        """
        before, peak_before, most_outside = mark
        now, peak = self.counts()
        most = max(self.most, now, peak if peak > peak_before else 0)
        self.most = max(most, most_outside)
        return now - before, most - before


class Allocator(Meter):
    """Bytes allocated by torch on some devices; does not reset the peak statistics.

    Reading does not synchronize, because the allocator counts on the host.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = list(devices)

    @classmethod
    def for_tensors(cls, tensors: Iterable[Tensor]) -> "Allocator | None":
        """Allocator of the CUDA devices of tensors; None if there are none."""
        devices = {x.device for x in tensors if x.is_cuda}
        return cls(sorted(devices, key=str)) if devices else None

    def counts(self) -> tuple[int, int]:
        """Bytes allocated now, and the peak since the statistics were last reset, by anyone."""
        by_device = [torch.cuda.memory_stats_as_nested_dict(device) for device in self.devices]
        counts = [stats["allocated_bytes"]["all"] for stats in by_device if stats]
        return sum(x["current"] for x in counts), sum(x["peak"] for x in counts)


def check_snapshot(snapshot: Any) -> Path | None:
    """Path of the file to write, or None.

    Raises:
        TypeError: If it is not a path or None.
    """
    if snapshot is not None and not isinstance(snapshot, str | Path):
        raise TypeError(f"snapshot is {snapshot!r}; give the path of a file to write, or None")
    return None if snapshot is None else Path(snapshot)


class AllocatorHistory:
    """Records the history of CUDA's allocator from `start` to `stop`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_ours = False

    def start(self) -> None:
        """Starts recording; a history that someone else has started goes on unchanged.

        Raises:
            ValueError: If the path is a folder.
        """
        if self.path.is_dir():
            raise ValueError(f"snapshot is {str(self.path)!r}, a folder; give the path of a file to write")
        self._is_ours = not is_memory_history_on()
        if self._is_ours:
            start_memory_history(MAX_EVENTS)

    def stop(self, error: BaseException | None) -> None:
        """Stops recording; if `error` says that memory has run out, writes the history and adds a note."""
        try:
            if isinstance(error, torch.OutOfMemoryError):
                self._write()
                error.add_note(f"the allocator's history until then is in {self.path}")
        finally:
            if self._is_ours:
                stop_memory_history()
            self._is_ours = False

    def _write(self) -> None:
        history = memory_history()
        write_whole(self.path, lambda opened: pickle.dump(history, opened))
