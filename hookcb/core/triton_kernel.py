"""TritonKernel: a kernel that is compiled at its first launch, then launched with little work of the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hookcb.core.console import warn
from hookcb.core.randomness import random_kept
from hookcb.core.torch_private import raw_stream


class TritonKernel:
    """A function for Triton; nothing is imported before its first launch.

    The module of the function gets `tl`, which is triton.language: the interpreter finds names there only.

    Args:
        function: the function.
        varying: its parameters for whose values nothing is compiled anew.
        helpers: functions of its module that it calls.
        **options: what is passed to each launch, as `num_warps`.
    """

    def __init__(
        self,
        function: Callable[..., None],
        varying: Sequence[str] = (),
        helpers: Sequence[Callable[..., Any]] = (),
        **options: Any,
    ) -> None:
        # Triton 3.9 warns if the fusion of products and sums, which is the default, is not given
        self._function, self.options = function, {"enable_fp_fusion": True} | options
        if torch.version.hip:
            self.options.pop("maxnreg", None)  # which Triton knows for NVIDIA only
        self._varying, self._helpers, self._jit = list(varying), helpers, None
        self._launchers: dict[Hashable, Callable[[int, Sequence[Any]], None]] = {}

    def launch(
        self,
        key: Hashable,
        device: torch.device,
        programs: int,
        args: Sequence[Any],
        numbers: Sequence[Any] | None = None,
        stream: int | None = None,
    ) -> None:
        """Launches programs on a device, and waits for nothing.

        Args:
            key: equal keys tell that constants, dtypes and divisibility of all arguments are the same.
            device: the device.
            programs: number of programs, 1 or more.
            args: all arguments in order, constants included; tensors begin at a multiple of 16 bytes.
            numbers: the same with the addresses of tensors, if they are known.
            stream: number of the device's current stream, if that is known.
        """
        known = key, device, programs
        launcher = self._launchers.get(known)
        if launcher is not None and torch.cuda.current_device() == device.index:
            # of numbers, as Triton would ask the driver about each tensor
            launcher(raw_stream(device) if stream is None else stream, numbers or addressed(args))
        elif device.type != "cuda":  # the interpreter, which compiles nothing
            self.jit[(programs,)](*args, **self.options)
        else:
            with torch.cuda.device(device):  # on which Triton launches, wherever tensors are
                self._launchers[known] = _launcher(self.jit[(programs,)](*args, **self.options), programs)

    @property
    def jit(self) -> Any:
        """The function as `triton.jit` returns it."""
        if self._jit is None:
            with random_kept():
                import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]  # no types
                import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
            names = self._function.__globals__
            names["tl"] = tl
            for helper in self._helpers:
                names[helper.__name__] = triton.jit(helper)
            self._jit = triton.jit(self._function, do_not_specialize=self._varying)
        return self._jit


def _launcher(kernel: Any, programs: int) -> Callable[[int, Sequence[Any]], None]:
    """Launches a compiled kernel on a stream: what `kernel[programs, 1, 1]` does, without its hooks."""
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    return lambda stream, args: run(programs, 1, 1, stream, function, metadata, None, None, None, *args)


def addressed(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with the addresses of tensors in their place."""
    return tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in args)


class Addresses:
    """Addresses of tensors in a table on their device, which is sent only if one has changed.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._known = device, list[int]()
        self._table = torch.empty(0, dtype=torch.int64, device=device)

    def of(self, xs: Sequence[Tensor]) -> Tensor:
        """The table, `(len(xs),)` of int64; the transfer to it is queued, and not awaited."""
        now = [x.data_ptr() for x in xs]
        if now != self._known:
            self._known, self._table = now, table_on(self._device, torch.tensor(now, device="cpu"))
        return self._table


def table_on(device: torch.device, table: Tensor) -> Tensor:
    """A table of the CPU on a device, from pinned memory if it is a card, so that nothing waits."""
    pinned = table.pin_memory() if device.type == "cuda" else table
    return pinned.to(device, non_blocking=True)


def can_run(device: torch.device, attempt: Callable[[], object]) -> bool:
    """Whether kernels work on a device, by an attempt; warns if Triton is installed and they do not."""
    if device.type != "cuda" or not find_spec("triton"):
        return False
    try:
        for _ in range(2):  # the first compiles, the second launches what was compiled
            attempt()
    except Exception as error:  # no C compiler, too old a GPU: must not be raised in the user's step
        warn(f"no kernels on {device}, plain operations are slower: {error!r}", stacklevel=3, is_of_rank=True)
        return False
    return True
