"""One launch of Triton that writes the sums of an output to a row, in one pass over its memory."""

from __future__ import annotations  # annotations stay text, as tl is not imported yet

from collections.abc import Hashable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hookcb.activations.bins import Bins
from hookcb.activations.stats import SAMPLED, WHOLE, flat
from hookcb.core.triton_kernel import TritonKernel, addressed, can_run

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]  # no types

# of a row, before the counts of a histogram; sums are of z = (x - pivot) · scale
SUMS = ("n", "pivot", "scale", "sum1", "sum2", "sum3", "sum4")
COLUMNS = (*SUMS, "min", "max", "near_zero", "zeros", "nonfinite")
BLOCK = 1024  # elements that a program reads at a time
SHARE = 8 * BLOCK  # elements of a program, at least
PER_SM = 4  # programs, as many as run at once by their registers
PARTS = 9  # sums that a program hands on
DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool} | {
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
}


@cache
def works_on(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernel works with a type on a device; warns if Triton is installed and it does not."""
    return dtype in DTYPES and can_run(device, lambda: _try(device, dtype))


def _try(device: torch.device, dtype: torch.dtype) -> None:
    kernel, x = Kernel(device, 0.0, None), torch.zeros(2, dtype=dtype, device=device)
    rows = torch.empty(1, 1, len(COLUMNS), dtype=torch.float64, device=device)
    cursor = torch.zeros(1, dtype=torch.int32, device=device)
    kernel.launch(x, kernel.prepared(x, rows, cursor, 0))


class Launch(NamedTuple):
    """A launch of the kernel for tensors of one size and dtype.

    Attributes:
        key: see `TritonKernel.launch`.
        programs: number of programs.
        args: all arguments after the tensor.
        numbers: the same with addresses in place of tensors.
        n_counted: about how many elements a histogram has; 0 without one.
    """

    key: tuple[Hashable, ...]
    programs: int
    args: tuple[Any, ...]
    numbers: tuple[Any, ...]
    n_counted: float


class Kernel:
    """The kernel with memory that it needs on a device; launches of one must not overlap."""

    @torch.inference_mode(False)
    def __init__(self, device: torch.device, eps: float, bins: Bins | None) -> None:
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        self.device, self.most = device, PER_SM * sms
        n = 0 if bins is None else bins.n + 3
        self._n_slots = 1 << (n - 1).bit_length() if n else 0  # a power of 2, as Triton needs
        self._parts = torch.empty(PARTS, self.most, dtype=torch.float64, device=device)
        self._counts = torch.zeros(1 + n, dtype=torch.int64, device=device)
        bins = bins or Bins(1)
        limits = eps, *bins.scale, bins.ends[1] if bins.ends else 0.0, bins.n, bins.ends is not None
        # without a transfer, which no graph may capture
        self._limits = torch.stack([torch.full((), x, dtype=torch.float64, device=device) for x in limits])

    def prepared(self, x: Tensor, rows: Tensor, cursor: Tensor, row: int, counts_all: bool = False) -> Launch:
        """Arguments of `launch`, by which it writes the sums of tensors like one to `rows[cursor, row]`.

        Args:
            x: a dense tensor of a type in `DTYPES`, of 1 element or more.
            rows: `(records, rows, columns)`, float64; columns are `COLUMNS`, and the counts of a histogram.
            cursor: `(1,)`, int32, so that a captured graph can be told where to write; if it is negative,
                nothing is written.
            row: index of the row.
            counts_all: whether the histogram is of all elements, also if they are over 8,192; else it is of
                4,096 or more that are spread evenly, the same ones of each tensor of this size.
        """
        n = x.numel()
        blocks = max(SHARE // BLOCK, -(-n // (self.most * BLOCK)))  # of each program
        programs = -(-n // (blocks * BLOCK))
        passes = blocks if counts_all or n <= WHOLE else -(-SAMPLED * blocks // n)
        own = rows, rows.stride(0), row * rows.stride(1), cursor, self._parts, self._counts
        args = *own, n, blocks, passes, self._limits, self.most, self._n_slots, BLOCK
        n_counted = n * passes / blocks if self._n_slots else 0.0
        return Launch((x.dtype, n < 2**31, self._n_slots), programs, args, addressed(args), n_counted)

    def launch(self, x: Tensor, launch: Launch, stream: int | None = None) -> None:
        """Writes the sums of all elements of a tensor, in one launch; it is copied if its memory has gaps.

        Source: sums around a pivot: T. Chan, G. Golub, R. LeVeque, "Algorithms for computing the sample
        variance", 1983. Pivot and scale are mean and extent of the first block, which each program reads, so
        that the sums of all can be added, and powers of z stay in the range of float32.
        """
        if not x.is_contiguous() or x.is_neg():
            x = flat(x.detach().resolve_neg()).contiguous()
        if x.dtype is torch.bool:
            x = x.view(torch.uint8)  # a Triton bool is one bit
        address = x.data_ptr()
        args, numbers = (x, *launch.args), (address, *launch.numbers)
        KERNEL.launch((launch.key, address % 16 == 0), self.device, launch.programs, args, numbers, stream)


def _add(
    value: tl.tensor,
    z: tl.tensor,
    eps: tl.tensor,
    sum1: tl.tensor,
    sum2: tl.tensor,
    sum3: tl.tensor,
    sum4: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    near: tl.tensor,
    zeros: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """Sums of each lane with those of one more block; NaN changes neither ends nor counts."""
    square, size = z * z, tl.abs(value)
    sum1, sum2, sum3, sum4 = sum1 + z, sum2 + square, sum3 + square * z, sum4 + square * square
    low, high = tl.minimum(low, value), tl.maximum(high, value)
    near, zeros = near + (size <= eps).to(tl.int32), zeros + (size == 0).to(tl.int32)
    return sum1, sum2, sum3, sum4, low, high, near, zeros


def _take(
    x: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    place: tl.tensor,
    cursor: tl.tensor,
    parts: tl.tensor,
    totals: tl.tensor,
    n: tl.tensor,
    blocks: tl.tensor,
    passes: tl.tensor,
    limits: tl.tensor,
    most: tl.tensor,
    n_slots: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Adds up a share of the elements; the last program to finish merges the sums of all, in their order."""
    record = tl.load(cursor)
    if record < 0:
        return
    real = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    inf = float("inf")
    eps = tl.load(limits).to(real)
    lane = tl.arange(0, block)
    first = tl.load(x + lane, mask=lane < n, other=0).to(real)
    known = (tl.abs(first) < inf) & (lane < n)
    first = tl.where(known, first, 0.0)
    pivot = tl.sum(first / tl.maximum(tl.sum(known.to(tl.int32)), 1).to(real))
    size = tl.max(tl.where(known, tl.abs(first * 0.5 - pivot * 0.5), 0.0)) * 2
    size = tl.where(size > 0, size, tl.abs(pivot))
    scale = 1 / tl.minimum(tl.maximum(tl.where(size > 0, size, 1.0), 1e-37), 1e37)
    sum1 = tl.zeros((block,), real)
    sum2 = tl.zeros((block,), real)
    sum3 = tl.zeros((block,), real)
    sum4 = tl.zeros((block,), real)
    low = tl.full((block,), inf, real)
    high = tl.full((block,), -inf, real)
    near = tl.zeros((block,), tl.int32)
    zeros = tl.zeros((block,), tl.int32)
    others = tl.zeros((block,), tl.int32)
    share = blocks.to(tl.int64) * block  # a GPU can hold over 2**31 elements
    begin = tl.program_id(0) * share
    x += begin
    left = tl.minimum(n - begin, share).to(tl.int32)
    paired = left // (2 * block) * 2
    for i in range(0, paired, 2):  # without a mask, so that loads are of 16 bytes; two are on their way
        a = tl.load(x + i * block + lane).to(real)
        b = tl.load(x + (i + 1) * block + lane).to(real)
        sum1, sum2, sum3, sum4, low, high, near, zeros = _add(
            a, (a - pivot) * scale, eps, sum1, sum2, sum3, sum4, low, high, near, zeros
        )
        sum1, sum2, sum3, sum4, low, high, near, zeros = _add(
            b, (b - pivot) * scale, eps, sum1, sum2, sum3, sum4, low, high, near, zeros
        )
    for i in range(paired, tl.cdiv(left, block)):
        inside = i * block + lane < left
        a = tl.load(x + i * block + lane, mask=inside, other=0).to(real)
        z = tl.where(inside, (a - pivot) * scale, 0.0)
        a = tl.where(inside, a, float("nan"))
        sum1, sum2, sum3, sum4, low, high, near, zeros = _add(
            a, z, eps, sum1, sum2, sum3, sum4, low, high, near, zeros
        )
    if tl.min((sum2 < inf).to(tl.int32)) == 0:  # not all are finite, which is rare: they are read again
        low = tl.full((block,), inf, real)
        high = tl.full((block,), -inf, real)
        for i in range(tl.cdiv(left, block)):
            inside = i * block + lane < left
            a = tl.load(x + i * block + lane, mask=inside, other=0).to(real)
            finite = tl.abs(a) < inf
            low = tl.minimum(low, tl.where(finite & inside, a, inf))
            high = tl.maximum(high, tl.where(finite & inside, a, -inf))
            others += tl.where(finite, 0, 1)
    part = parts + tl.program_id(0)
    tl.store(part, tl.sum(sum1.to(tl.float64)))
    tl.store(part + most, tl.sum(sum2.to(tl.float64)))
    tl.store(part + most * 2, tl.sum(sum3.to(tl.float64)))
    tl.store(part + most * 3, tl.sum(sum4.to(tl.float64)))
    tl.store(part + most * 4, tl.min(low))
    tl.store(part + most * 5, tl.max(high))
    tl.store(part + most * 6, tl.sum(near).to(tl.float64))
    tl.store(part + most * 7, tl.sum(zeros).to(tl.float64))
    tl.store(part + most * 8, tl.sum(others).to(tl.float64))
    if n_slots > 0:
        counts = tl.zeros((n_slots,), tl.int32)
        origin = tl.load(limits + 1).to(real)
        extent = tl.load(limits + 2).to(real)
        steps = tl.load(limits + 3).to(real)
        high_end = tl.load(limits + 4).to(real)
        bins = tl.load(limits + 5).to(tl.int32)
        is_linear = tl.load(limits + 6) > 0
        shift = (tl.rand(0, tl.program_id(0) * block + lane) * blocks).to(tl.int32)
        for i in range(passes):  # one of `blocks` neighbors in each lane; in as many passes each of them
            at = lane * blocks + (shift + i) % blocks
            inside = at < left
            value = tl.load(x + at, mask=inside, other=0).to(real)
            if is_linear:  # as `Bins.counts_of` does it
                slot = (
                    tl.floor(tl.minimum(tl.maximum((value - origin) / extent * steps, -1.0), bins - 1.0)) + 1
                )
                slot += (value > high_end).to(slot.dtype)
            else:
                level = (tl.log2(tl.abs(value)) - origin) / extent * steps
                level = tl.floor(tl.minimum(tl.maximum(level, -1.0), (bins + 1) // 2 - 1.0))
                level += tl.where(bins % 2 == 1, 1.0, 1.5)
                slot = tl.where(value < 0, -level, level) + (bins + 1) * 0.5
            slot = tl.where(inside & (value == value), slot.to(tl.int32), bins + 2)
            counts += tl.histogram(slot, n_slots)
        index = tl.arange(0, n_slots)
        is_used = (index < bins + 2) & (counts > 0)
        # whole numbers, whose sum does not depend on the order
        tl.atomic_add(totals + 1 + index, counts.to(tl.int64), mask=is_used, sem="relaxed")
    tl.debug_barrier()  # all of this program comes before it counts as finished
    programs = tl.num_programs(0)
    if tl.atomic_add(totals, 1, sem="acq_rel") < programs - 1:
        return
    index = tl.arange(0, 256)
    sum1 = tl.zeros((256,), tl.float64)
    sum2 = tl.zeros((256,), tl.float64)
    sum3 = tl.zeros((256,), tl.float64)
    sum4 = tl.zeros((256,), tl.float64)
    low = tl.full((256,), inf, tl.float64)
    high = tl.full((256,), -inf, tl.float64)
    near = tl.zeros((256,), tl.float64)
    zeros = tl.zeros((256,), tl.float64)
    others = tl.zeros((256,), tl.float64)
    for i in range(0, programs, 256):
        column, is_there = parts + i + index, i + index < programs
        sum1 += tl.load(column, mask=is_there, other=0.0, cache_modifier=".cg")  # of others, so not from L1
        sum2 += tl.load(column + most, mask=is_there, other=0.0, cache_modifier=".cg")
        sum3 += tl.load(column + most * 2, mask=is_there, other=0.0, cache_modifier=".cg")
        sum4 += tl.load(column + most * 3, mask=is_there, other=0.0, cache_modifier=".cg")
        low = tl.minimum(low, tl.load(column + most * 4, mask=is_there, other=inf, cache_modifier=".cg"))
        high = tl.maximum(high, tl.load(column + most * 5, mask=is_there, other=-inf, cache_modifier=".cg"))
        near += tl.load(column + most * 6, mask=is_there, other=0.0, cache_modifier=".cg")
        zeros += tl.load(column + most * 7, mask=is_there, other=0.0, cache_modifier=".cg")
        others += tl.load(column + most * 8, mask=is_there, other=0.0, cache_modifier=".cg")
    row = rows + record.to(tl.int64) * stride + place
    tl.store(row, tl.cast(n, tl.float64))
    tl.store(row + 1, pivot.to(tl.float64))
    tl.store(row + 2, scale.to(tl.float64))
    tl.store(row + 3, tl.sum(sum1))
    tl.store(row + 4, tl.sum(sum2))
    tl.store(row + 5, tl.sum(sum3))
    tl.store(row + 6, tl.sum(sum4))
    tl.store(row + 7, tl.min(low))
    tl.store(row + 8, tl.max(high))
    tl.store(row + 9, tl.sum(near))
    tl.store(row + 10, tl.sum(zeros))
    tl.store(row + 11, tl.sum(others))
    if n_slots > 0:
        index = tl.arange(0, n_slots)
        is_used = index < bins + 2
        found = tl.load(totals + 1 + index, mask=is_used, other=0, cache_modifier=".cg")
        tl.store(row + 12 + index, found.to(tl.float64), mask=is_used)
        tl.store(totals + 1 + index, tl.zeros((n_slots,), tl.int64), mask=is_used)
    tl.store(totals, 0)  # for the next launch


KERNEL = TritonKernel(_take, ("stride", "place", "n", "blocks", "passes", "most"), [_add], num_warps=4)
