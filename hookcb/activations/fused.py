"""All statistics of a CUDA tensor in one pass over its memory, by Triton if it is installed."""

from __future__ import annotations  # annotations stay text, as tl is not imported yet

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookcb.core.console import warn
from hookcb.core.randomness import random_kept

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]  # no types

BLOCK = 1024  # elements a program reads at a time
PROGRAMS = 1024  # maximum that run; equal on every GPU, so that results are too
THRESHOLD = 2**14  # elements; a guess until measured, see benchmarks/fused.py
FUSABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool} | {
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
}


def can_fuse(x: Tensor) -> bool:
    """Whether `fused_layer_stats` takes `x` and is likely faster (a compiler fuses by itself)."""
    wanted = x.is_cuda and x.dtype in FUSABLE and x.numel() >= THRESHOLD
    return wanted and not torch.compiler.is_compiling() and _runs_on(x.device)


def fused_layer_stats(x: Tensor, eps: float, wide: bool = False) -> Tensor:
    """Mean, std, min, max, abs_max, near_zero, zeros and nonfinite over every element of `x`.

    Never waits for the GPU. Needs Triton, which compiles at the first call for a dtype and an `eps`, in about
    a second. Memory without gaps is read in its own order (channels-last, transposed); else it is copied.

    Args:
        x: a dense real tensor of any shape, layout and dtype; widened to float32 first, float64 stays.
        eps: magnitude up to which an element counts as near zero, in the unit of `x`.
        wide: whether to keep the results in float64.

    Returns:
        A tensor `(8,)` on the device of `x`, float64 if `x` is or if `wide`, else float32: mean and unbiased
        std in float64 arithmetic (not finite if `x` is not), extremes of finite elements, shares 0..1, a
        count. NaN for too few elements.

    Source: float64 sums of d and d², d = x - pivot: T. Chan, G. Golub, R. LeVeque, "Algorithms for computing
    the sample variance", 1983. The pivot is an element, so within √(n-1) standard deviations of the mean
    (P. Samuelson, "How deviant can you be?", 1968): the variance is off by at most about n · 1e-16 of it.
    """
    reduce, merge = _kernels()
    x = _in_memory_order(x.detach())
    programs = max(1, min(PROGRAMS, -(-x.numel() // BLOCK)))
    real = tl.float64 if x.dtype is torch.float64 else tl.float32
    parts = torch.empty(8, programs, dtype=torch.float64, device=x.device)
    least = torch.float64 if wide else torch.float32
    stats = torch.empty(8, dtype=torch.promote_types(x.dtype, least), device=x.device)
    with torch.cuda.device(x.get_device()):  # Triton launches on the current device, not on that of `x`
        fusion = {"enable_fp_fusion": True}  # the default, but Triton 3.9 warns if it is not given
        reduce[(programs,)](x, parts, x.numel(), float(eps), real, BLOCK, **fusion)
        merge[(1,)](parts, stats, x.numel(), programs, PROGRAMS, **fusion)
    return stats


def _in_memory_order(x: Tensor) -> Tensor:
    """The elements of `x`, contiguous: a view if `x` is dense, else a copy."""
    x = x if x.dtype in FUSABLE else x.float()  # float8, which few GPUs support, and other types
    x = x.view(torch.uint8) if x.dtype is torch.bool else x.resolve_neg()  # a Triton bool is one bit
    return x.permute(sorted(range(x.ndim), key=x.stride, reverse=True)).contiguous()


@cache
def _runs_on(device: torch.device) -> bool:
    """Whether Triton works on the device; warns if it is installed and does not."""
    try:
        fused_layer_stats(torch.zeros(1, device=device), 0.0)
    except Exception as error:  # no C compiler, too old a GPU: must not be raised in the user's forward
        if find_spec("triton"):
            slower = f"no fused statistics on {device}, plain ones are slower: {error!r}"
            warn(slower, stacklevel=2, is_of_rank=True)
        return False
    return True


@cache
def _kernels() -> tuple[Any, Any]:
    """The two kernels; Triton compiles them when they are launched."""
    global tl  # Triton's interpreter finds names in the kernel's module only, not in an enclosing function
    with random_kept():
        import triton
        import triton.language as tl

    return triton.jit(_reduce), triton.jit(_merge, do_not_specialize=["n", "programs"])


def _reduce(
    x: tl.tensor, parts: tl.tensor, n: tl.tensor, eps: tl.constexpr, real: tl.constexpr, block: tl.constexpr
) -> None:
    """Writes sums, extremes and counts of this program's blocks of `x` to its column of `parts`."""
    programs = tl.num_programs(0)
    lane = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)  # a GPU can hold over 2**31 elements
    pivot = tl.load(x, mask=n > 0, other=0).to(real).to(tl.float64)
    pivot = tl.where(tl.abs(pivot) < float("inf"), pivot, 0.0)  # else inf - inf would hide an infinite mean
    sums = tl.zeros((block,), tl.float64)
    squares = tl.zeros((block,), tl.float64)
    low = tl.full((block,), float("inf"), real)
    high = tl.full((block,), -float("inf"), real)
    near = tl.zeros((block,), tl.int32)
    zeros = tl.zeros((block,), tl.int32)
    finites = tl.zeros((block,), tl.int32)
    for first in range(0, n, programs.to(tl.int64) * block):
        inside = first + lane < n
        value = tl.load(x + first + lane, mask=inside, other=0).to(real)
        value = tl.where(inside, value, float("nan"))  # compares as false: counts nowhere
        shifted = tl.where(inside, value.to(tl.float64) - pivot, 0.0)
        sums += shifted
        squares += shifted * shifted
        finite = tl.abs(value) < float("inf")
        low = tl.minimum(low, tl.where(finite, value, float("inf")))
        high = tl.maximum(high, tl.where(finite, value, -float("inf")))
        near += (tl.abs(value) <= tl.full((), eps, real)).to(tl.int32)
        zeros += (value == 0).to(tl.int32)
        finites += finite.to(tl.int32)
    column = parts + tl.program_id(0)
    tl.store(column, tl.sum(sums))
    tl.store(column + programs, tl.sum(squares))
    tl.store(column + programs * 2, tl.min(low))
    tl.store(column + programs * 3, tl.max(high))
    tl.store(column + programs * 4, tl.sum(near))
    tl.store(column + programs * 5, tl.sum(zeros))
    tl.store(column + programs * 6, tl.sum(finites))
    tl.store(column + programs * 7, pivot)


def _merge(parts: tl.tensor, out: tl.tensor, n: tl.tensor, programs: tl.tensor, block: tl.constexpr) -> None:
    """Writes the statistics of all `n` elements, from the columns of `parts`."""
    lane = tl.arange(0, block)
    inside = lane < programs
    count = tl.cast(n, tl.float64)
    sums = tl.sum(tl.load(parts + lane, mask=inside, other=0.0))
    squares = tl.sum(tl.load(parts + programs + lane, mask=inside, other=0.0))
    low = tl.min(tl.load(parts + programs * 2 + lane, mask=inside, other=float("inf")))
    high = tl.max(tl.load(parts + programs * 3 + lane, mask=inside, other=-float("inf")))
    near = tl.sum(tl.load(parts + programs * 4 + lane, mask=inside, other=0.0))
    zeros = tl.sum(tl.load(parts + programs * 5 + lane, mask=inside, other=0.0))
    finites = tl.sum(tl.load(parts + programs * 6 + lane, mask=inside, other=0.0))
    var = (squares - sums * sums / count) / (count - 1)
    nan = tl.where(low > high, float("nan"), 0.0)  # no finite element
    tl.store(out, tl.load(parts + programs * 7) + sums / count)
    tl.store(out + 1, tl.sqrt(var))  # never below 0: at least squares / count², far above rounding
    tl.store(out + 2, low + nan)
    tl.store(out + 3, high + nan)
    tl.store(out + 4, tl.maximum(-low, high) + nan)
    tl.store(out + 5, near / count + nan)
    tl.store(out + 6, zeros / count + nan)
    tl.store(out + 7, count - finites)
