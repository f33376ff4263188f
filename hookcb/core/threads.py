"""Which thread code runs in: that of a training, or another one."""

import threading

import torch

from hookcb.core.torch_private import in_backward, is_jit_tracing


def in_loop_thread(thread: int) -> bool:
    """Whether code runs in `thread`, as `threading.get_ident` calls it, or in a backward.

    A backward has threads of its own, one for each device, where activation checkpointing runs forwards
    again. In a graph of torch.compile, which cannot ask, it is True; while torch.jit.trace records a forward
    it is False, else the traced model would contain what hooks compute.
    """
    if torch.compiler.is_compiling():
        return True
    return (threading.get_ident() == thread or in_backward()) and not is_jit_tracing()
