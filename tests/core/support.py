"""What the tests of files and of ranks share."""

import os
import resource
from contextlib import contextmanager

from torch import distributed


@contextmanager
def files_limited_to(n_bytes):
    """As on a disk that is full: no file of this process grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


FULL = r"; ([\d,]+) bytes are needed, and ([\d,]+) are free"


def in_child(act):
    """Runs `act` in a forked process; what it wrote into a pipe."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            said = act()
        except BaseException as error:
            said = repr(error)
        os.write(write, str(said).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as opened:
        return opened.read()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


LAST_GROUP = []


@contextmanager
def group_of_one(store=None):
    """A process group of this process alone.

    It is kept until the next one. A model in DistributedDataParallel that outlived it would end it while
    Python waits, and gloo's threads may need Python to drop a tensor: a deadlock of torch 2.13.
    """
    distributed.init_process_group("gloo", rank=0, world_size=1, store=store or distributed.HashStore())
    LAST_GROUP[:] = [distributed.group.WORLD]
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def fake_group(world, rank=0, store=None):
    """A process group whose other ranks do not exist, and whose collectives do nothing."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

    store = store or distributed.HashStore()
    distributed.init_process_group("fake", rank=rank, world_size=world, store=store)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def without_lines(function):
    """Has no instruction of a function belong to a line, as jumps to the begin of a loop may not."""
    n = len(function.__code__.co_code) // 2
    table = b"".join(bytes([0x80 | 15 << 3 | min(8, n - i) - 1]) for i in range(0, n, 8))
    function.__code__ = function.__code__.replace(co_linetable=table)
    return function
