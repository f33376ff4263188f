"""One launch of Triton that writes the sums of an output to a row, in one pass over its memory.

Source: sums around a pivot: T. Chan, G. Golub, R. LeVeque, "Algorithms for computing the sample variance",
1983. Pivot and scale are mean and extent of the first block, which each program reads, so that the sums of
all can be added, and powers of z stay in the range of float32.
"""

from __future__ import annotations  # annotations stay text, as tl is not imported yet

from typing import TYPE_CHECKING

from hookcb.core.triton_kernel import TritonKernel

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]  # no types

BLOCK = 1024  # elements that a program reads at a time
PARTS = 9  # sums that a program hands on: those of `COLUMNS` but for the number, pivot and scale


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
    tl.store(part + most * 2, tl.sum(near).to(tl.float64))
    tl.store(part + most * 3, tl.sum(zeros).to(tl.float64))
    tl.store(part + most * 4, tl.sum(others).to(tl.float64))
    tl.store(part + most * 5, tl.sum(sum3.to(tl.float64)))
    tl.store(part + most * 6, tl.sum(sum4.to(tl.float64)))
    tl.store(part + most * 7, tl.min(low).to(tl.float64))
    tl.store(part + most * 8, tl.max(high).to(tl.float64))
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
    kind, index = tl.arange(0, 8), tl.arange(0, 256)  # of 8 columns of sums 7 are there
    total = tl.zeros((8, 256), tl.float64)
    low = tl.full((256,), inf, tl.float64)
    high = tl.full((256,), -inf, tl.float64)
    for i in range(0, programs, 256):
        column, is_there = parts + i + index, i + index < programs
        sums, are_there = column[None, :] + kind[:, None] * most, is_there[None, :] & (kind < 7)[:, None]
        total += tl.load(sums, mask=are_there, other=0.0, cache_modifier=".cg")  # of others, so not from L1
        low = tl.minimum(low, tl.load(column + most * 7, mask=is_there, other=inf, cache_modifier=".cg"))
        high = tl.maximum(high, tl.load(column + most * 8, mask=is_there, other=-inf, cache_modifier=".cg"))
    row = rows + record.to(tl.int64) * stride + place
    tl.store(row, tl.cast(n, tl.float64))
    tl.store(row + 1 + kind, tl.sum(total, 1), mask=kind < 7)
    tl.store(row + 8, pivot.to(tl.float64))
    tl.store(row + 9, scale.to(tl.float64))
    tl.store(row + 10, tl.min(low))
    tl.store(row + 11, tl.max(high))
    if n_slots > 0:
        index = tl.arange(0, n_slots)
        is_used = index < bins + 2
        found = tl.load(totals + 1 + index, mask=is_used, other=0, cache_modifier=".cg")
        tl.store(row + 12 + index, found.to(tl.float64), mask=is_used)
        tl.store(totals + 1 + index, tl.zeros((n_slots,), tl.int64), mask=is_used)
    tl.store(totals, 0)  # for the next launch


KERNEL = TritonKernel(_take, ("stride", "place", "n", "blocks", "passes", "most"), [_add], num_warps=4)
