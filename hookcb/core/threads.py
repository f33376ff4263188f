"""Threads: which one code runs in, and how many can run at once."""

import os
import threading

import torch

from hookcb.core.torch_private import in_backward, is_jit_tracing


def in_loop_thread(thread: int) -> bool:
    """Whether code runs in the thread with identifier `thread`, or in a backward.

    A backward has its own threads, one for each device, in which activation checkpointing runs forwards
    again. It is True in a graph of torch.compile, which cannot check, and False while torch.jit.trace records
    a forward, as the traced model would contain the hooks' operations.
    """
    if torch.compiler.is_compiling():
        return True
    return (threading.get_ident() == thread or in_backward()) and not is_jit_tracing()


def n_cores() -> int:
    """Number of processors that this process may use, which may be fewer than the machine has."""
    if count := getattr(os, "process_cpu_count", None):  # from Python 3.13 on
        return count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
