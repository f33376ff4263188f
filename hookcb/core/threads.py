"""Threads: which one code runs in, also after a fork, and how many can run at once."""

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from hookcb.core.torch_private import in_backward, is_jit_tracing

_process = 0  # added to identifiers of threads, which are the same in a forked process
NEXT = 1 << 64  # above all of them


_lock = threading.RLock()


def _note_fork() -> None:
    global _process, _lock
    _process += NEXT
    _lock = threading.RLock()  # nobody would release that of another thread


def in_each_fork(act: Callable[[], object]) -> None:
    """Has a function called in each process that is forked from this one, before anything else there."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=act)


in_each_fork(_note_fork)


def locked() -> AbstractContextManager[object]:
    """The lock for what all threads of the process share, to be held for moments only."""
    return _lock


def this_thread() -> int:
    """Identifier of the current thread; in a forked process another one than in the process it is from."""
    return threading.get_ident() + _process


def known_to_python(thread: int) -> int:
    """Identifier by which Python knows the thread, which is the same in a forked process."""
    return thread % NEXT


def in_loop_thread(thread: int) -> bool:
    """Whether code runs in the thread with identifier `thread`, or in a backward of its process.

    A backward has its own threads, one for each device, in which activation checkpointing runs forwards
    again. It is True in a graph of torch.compile, which cannot check, and False while torch.jit.trace records
    a forward, as the traced model would contain the hooks' operations.
    """
    if torch.compiler.is_compiling():
        return True
    is_here = threading.get_ident() + _process == thread or (in_backward() and in_same_process(thread))
    return is_here and not is_jit_tracing()


def in_same_process(thread: int) -> bool:
    """Whether the thread with identifier `thread` is one of the current process."""
    return thread - thread % NEXT == _process


def n_cores() -> int:
    """Number of processors that this process may use, which may be fewer than the machine has."""
    if count := getattr(os, "process_cpu_count", None):  # from Python 3.13 on
        return count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
