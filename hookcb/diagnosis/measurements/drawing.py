"""Drawing: states of the random generators of a program, where it sets them, and those of its workers."""

import random
import sys
import zlib
from collections.abc import Generator
from ctypes import string_at
from mmap import mmap
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from hookcb.core.call_hook import CallHook
from hookcb.core.torch_private import ListFetcher
from hookcb.diagnosis.heard import Ear, heard

GENERATORS = ("torch", "Python's random", "numpy.random")
States = tuple[int, ...]  # hashes of the states of `GENERATORS`
ROW = Struct("<q3I3I")  # of a worker: whether it is there, and the states around its first batch


def random_states() -> States:
    """Hashes of the states of `GENERATORS`; that of NumPy is 0 unless it is imported. No device is read."""
    numpys = 0
    if numpy := sys.modules.get("numpy.random"):
        numbers = numpy.get_state(legacy=False)["state"]
        numpys = zlib.crc32(numbers["key"].tobytes(), numbers["pos"])
    state = torch.get_rng_state()
    torchs = zlib.crc32(string_at(state.data_ptr(), state.numel()))  # NumPy may be missing
    return torchs, hash(random.getstate()) & 0xFFFFFFFF, numpys


def drawn(before: States, after: States) -> tuple[bool, ...]:
    """From which generators numbers were drawn between two states."""
    return tuple(a != b for a, b in zip(before, after, strict=True))


class Seeding(Ear):
    """Counts how often the program seeds its generators; that of NumPy from `follow_numpy` on."""

    calls = ((torch, "manual_seed", "seeds"), (random, "seed", "seeds"))
    options = {"in_forks": True}  # noqa: RUF012  # as in its base

    def __init__(self) -> None:
        self.n = 0
        self._of_numpy: CallHook | None = None

    def follow_numpy(self) -> None:
        """Follows NumPy too, if the program has imported it."""
        if self._of_numpy is None and (numpy := sys.modules.get("numpy.random")):
            self._of_numpy = CallHook(numpy, "seed", self.seeds, self.failed, in_forks=True)

    def seeds(self, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        """Counts a call."""
        self.n += 1
        yield


class Around(NamedTuple):
    """States of a worker before and after its first batch."""

    worker: int
    before: States
    after: States

    def of(self, i: int) -> tuple[int, int]:
        """The states of one of `GENERATORS`; they differ if numbers were drawn from it."""
        return self.before[i], self.after[i]


class WorkerStates:
    """The states of all workers of a pass, which they write to memory that forked processes share."""

    def __init__(self, n_workers: int) -> None:
        self._n, self._memory = n_workers, mmap(-1, n_workers * ROW.size)

    def add(self, worker: int, before: States, after: States) -> None:
        """Keeps the states of a worker."""
        ROW.pack_into(self._memory, worker * ROW.size, 1, *before, *after)

    def read(self) -> list[Around]:
        """The states of those workers that have made a batch."""
        rows = enumerate(ROW.iter_unpack(self._memory[: self._n * ROW.size]))
        return [Around(i, row[1:4], row[4:7]) for i, row in rows if row[0]]


class Workers(Ear):
    """Notes in each worker of a DataLoader its random states around its first batch.

    Workers that are spawned, and not forked, are not heard; nor are streams, which workers may have to
    shuffle alike before each takes its part, and datasets that set seeds for their samples.
    """

    calls = ((ListFetcher, "fetch", "fetches"),)
    options = {"in_forks": True, "gate": lambda: _is_new_worker()}  # noqa: RUF012  # as in its base
    states: WorkerStates | None = None  # of the pass that begins, in the processes that it forks
    is_noted = False  # in a worker, whether its first batch is made

    def fetches(self, fetcher: Any, *args: Any) -> Generator[None, Any, None]:
        """Observes the first batch of a worker."""
        Workers.is_noted, states, info = True, Workers.states, get_worker_info()
        before, n_seeds = random_states(), heard(Seeding).n
        yield
        if states is not None and info is not None and heard(Seeding).n == n_seeds:
            states.add(info.id, before, random_states())


def _is_new_worker() -> bool:
    """Whether this is a worker that has made no batch."""
    return not Workers.is_noted and get_worker_info() is not None
