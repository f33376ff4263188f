"""One launch of Triton that writes the sums of an output to a row, in one pass over its memory."""

from __future__ import annotations  # annotations stay text, as tl is not imported yet

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hookcb.activations.bins import Bins
from hookcb.activations.stats import flat
from hookcb.core.triton_kernel import TritonKernel, can_run

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]  # no types

# of a row, before the counts of a histogram; sums are of z = (x - pivot) · scale
SUMS = ("n", "pivot", "scale", "sum1", "sum2", "sum3", "sum4")
COLUMNS = (*SUMS, "min", "max", "near_zero", "zeros", "nonfinite")
BLOCK = 1024  # elements that a program reads at a time
SHARE = 8 * BLOCK  # elements of a program, at least
PER_SM = 4  # programs, as many as run at once by their registers
DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool} | {
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
}


@cache
def works_on(device: torch.device) -> bool:
    """Whether the kernel works on a device; warns if Triton is installed and it does not."""
    return can_run(device, lambda: Kernel(device, 0.0, None).take(*_example(device), 0))


def _example(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.empty(1, 1, len(COLUMNS), dtype=torch.float64, device=device)
    return torch.zeros(1, device=device), rows, torch.zeros(1, dtype=torch.int32, device=device)


class Kernel:
    """The kernel with memory that it needs on a device; launches of one must not overlap."""

    @torch.inference_mode(False)
    def __init__(self, device: torch.device, eps: float, bins: Bins | None) -> None:
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        self.device, self.most = device, PER_SM * sms
        n = 0 if bins is None else bins.n + 3
        self._n_slots = 1 << (n - 1).bit_length() if n else 0  # a power of 2, as Triton needs
        self._parts = torch.empty(6, self.most, dtype=torch.float64, device=device)
        self._counts = torch.zeros(4 + n, dtype=torch.int64, device=device)
        bins = bins or Bins(1)
        limits = eps, *bins.scale, bins.ends[1] if bins.ends else 0.0, bins.n, bins.ends is not None
        # without a transfer, which no graph may capture
        self._limits = torch.stack([torch.full((), x, dtype=torch.float64, device=device) for x in limits])

    def take(self, x: Tensor, rows: Tensor, cursor: Tensor, row: int) -> None:
        """Writes the sums of all elements to `rows[cursor, row]`, unless the cursor is negative.

        Args:
            x: a dense tensor of a type in `DTYPES`, of 1 element or more; it is copied if memory has gaps.
            rows: `(records, rows, columns)`, float64; columns are `COLUMNS`, and the counts of a histogram.
            cursor: `(1,)`, int32, so that a captured graph can be told where to write, or to rest.
            row: index of the row.

        Source: sums around a pivot: T. Chan, G. Golub, R. LeVeque, "Algorithms for computing the sample
        variance", 1983. Pivot and scale are mean and extent of the first block, which each program reads, so
        that the sums of all can be added, and powers of z stay in the range of float32.
        """
        x = flat(x.resolve_neg()).contiguous()
        x = x.view(torch.uint8) if x.dtype is torch.bool else x  # a Triton bool is one bit
        n, is_aligned = x.numel(), x.data_ptr() % 16 == 0
        blocks = max(SHARE // BLOCK, -(-n // (self.most * BLOCK)))  # of each program
        programs = -(-n // (blocks * BLOCK))
        args = (x, rows, rows.stride(0), row * rows.stride(1), cursor, self._parts, self._counts, n, blocks)
        key = x.dtype, is_aligned, n < 2**31, self._n_slots
        KERNEL.launch(key, self.device, programs, (*args, self._limits, self.most, self._n_slots, BLOCK))


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
    finites = tl.zeros((block,), tl.int32)
    if n_slots > 0:
        counts = tl.zeros((n_slots,), tl.int32)
        origin = tl.load(limits + 1).to(real)
        extent = tl.load(limits + 2).to(real)
        steps = tl.load(limits + 3).to(real)
        high_end = tl.load(limits + 4).to(real)
        bins = tl.load(limits + 5).to(tl.int32)
        is_linear = tl.load(limits + 6) > 0
    begin = tl.program_id(0).to(tl.int64) * blocks * block  # a GPU can hold over 2**31 elements
    for i in range(blocks):
        start = begin + i * block
        inside = start + lane < n
        if start + block <= n:  # a mask would keep loads from being of 16 bytes
            value = tl.load(x + start + lane).to(real)
        else:
            value = tl.load(x + start + lane, mask=inside, other=0).to(real)
        z = tl.where(inside, (value - pivot) * scale, 0.0)
        square = z * z
        sum1 += z
        sum2 += square
        sum3 += square * z
        sum4 += square * square
        magnitude = tl.where(inside, tl.abs(value), inf)
        finite = magnitude < inf
        low = tl.where(finite, tl.minimum(low, value), low)
        high = tl.where(finite, tl.maximum(high, value), high)
        near += (magnitude <= eps).to(tl.int32)
        zeros += (magnitude == 0).to(tl.int32)
        finites += finite.to(tl.int32)
        if n_slots > 0:  # as `Bins.counts_of` does it
            if is_linear:
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
    part = parts + tl.program_id(0)
    tl.store(part, tl.sum(sum1.to(tl.float64)))
    tl.store(part + most, tl.sum(sum2.to(tl.float64)))
    tl.store(part + most * 2, tl.sum(sum3.to(tl.float64)))
    tl.store(part + most * 3, tl.sum(sum4.to(tl.float64)))
    tl.store(part + most * 4, tl.min(low))
    tl.store(part + most * 5, tl.max(high))
    # whole numbers, whose sum does not depend on the order
    tl.atomic_add(totals + 1, tl.sum(near).to(tl.int64), sem="relaxed")
    tl.atomic_add(totals + 2, tl.sum(zeros).to(tl.int64), sem="relaxed")
    tl.atomic_add(totals + 3, tl.sum(finites).to(tl.int64), sem="relaxed")
    if n_slots > 0:
        index = tl.arange(0, n_slots)
        is_used = (index < bins + 2) & (counts > 0)
        tl.atomic_add(totals + 4 + index, counts.to(tl.int64), mask=is_used, sem="relaxed")
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
    for i in range(0, programs, 256):
        column, is_there = parts + i + index, i + index < programs
        sum1 += tl.load(column, mask=is_there, other=0.0, cache_modifier=".cg")  # of others, so not from L1
        sum2 += tl.load(column + most, mask=is_there, other=0.0, cache_modifier=".cg")
        sum3 += tl.load(column + most * 2, mask=is_there, other=0.0, cache_modifier=".cg")
        sum4 += tl.load(column + most * 3, mask=is_there, other=0.0, cache_modifier=".cg")
        low = tl.minimum(low, tl.load(column + most * 4, mask=is_there, other=inf, cache_modifier=".cg"))
        high = tl.maximum(high, tl.load(column + most * 5, mask=is_there, other=-inf, cache_modifier=".cg"))
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
    tl.store(row + 9, tl.atomic_xchg(totals + 1, 0).to(tl.float64))  # 0 for the next launch
    tl.store(row + 10, tl.atomic_xchg(totals + 2, 0).to(tl.float64))
    tl.store(row + 11, (n - tl.atomic_xchg(totals + 3, 0)).to(tl.float64))
    if n_slots > 0:
        index = tl.arange(0, n_slots)
        is_used = index < bins + 2
        found = tl.load(totals + 4 + index, mask=is_used, other=0, cache_modifier=".cg")
        tl.store(row + 12 + index, found.to(tl.float64), mask=is_used)
        tl.store(totals + 4 + index, tl.zeros((n_slots,), tl.int64), mask=is_used)
    tl.store(totals, 0)


KERNEL = TritonKernel(_take, ("stride", "place", "n", "blocks", "most"), num_warps=4)
