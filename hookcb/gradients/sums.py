"""Sums: what is known of many tensors on a card, in two launches for each dtype, however many there are."""

from __future__ import annotations  # annotations stay text, as tl is not imported yet

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hookcb.core.triton_kernel import Addresses, TritonKernel, can_run, table_on

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]  # no types

COLUMNS = ("norm", "size", "largest", "nonfinite", "rows", "total")
CHUNK = 32_768  # elements that a program reads, about
BLOCK = 2_048  # of these at a time
MERGED = 256  # chunks that are merged at a time
READ = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@cache
def works_on(device: torch.device) -> bool:
    """Whether `Sums` can be used on a device."""
    return can_run(device, lambda: Sums(device).of([torch.zeros(2, 2, device=device)], [2]))


class Sums:
    """Reads tensors on a card: norm, Σ|x|, largest finite |x|, numbers of NaN and inf, of rows not zero, Σx.

    A tensor is divided into chunks of about 32,768 elements, whatever its size, and a chunk has whole rows or
    a part of one. Sums of chunks are in float32, those over chunks in float64 and in a fixed order: results
    are the same in each run. Squares are scaled where they would leave the range of their dtype.

    Args:
        device: the card.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._key = device, list[tuple[torch.dtype, int, int]]()
        # by dtype: places of its tensors, their addresses, chunks, and which chunks a tensor has
        self._tables: dict[torch.dtype, tuple[list[int], Addresses, Tensor, Tensor]] = {}

    def of(self, xs: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
        """Sums of tensors without gaps, `(len(xs), 6)` of float64 in the order of `COLUMNS`.

        Args:
            xs: tensors of a dtype of `READ`, in memory without gaps.
            widths: number of elements in a row of each; 0 if rows do not matter.
        """
        key = [(x.dtype, x.numel(), width) for x, width in zip(xs, widths, strict=True)]
        if key != self._key:
            self._key, self._tables = key, {}
            for dtype in dict.fromkeys(dtype for dtype, *_ in key):
                places = [i for i, (own, *_) in enumerate(key) if own is dtype]
                chunks, spans = _divided([key[i][1:] for i in places], places)
                tables = table_on(self._device, chunks), table_on(self._device, spans)
                self._tables[dtype] = places, Addresses(self._device), *tables
        n_columns, wide = len(COLUMNS), torch.float64
        out = torch.empty(len(xs), n_columns, dtype=wide, device=self._device)
        for dtype, (places, addresses, chunks, spans) in self._tables.items():
            parts = torch.empty(max(1, len(chunks)), n_columns, dtype=wide, device=self._device)
            if len(chunks):
                kind = str(dtype).removeprefix("torch.")
                args = addresses.of([xs[i] for i in places]), chunks, parts, kind, BLOCK
                _SUM.launch(dtype, self._device, len(chunks), args)
            _MERGE.launch("", self._device, len(places), (parts, spans, out, MERGED))
        return out


def _divided(sizes: Sequence[tuple[int, int]], places: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Chunks, and by tensor which of them it has.

    Returns:
        `(n_chunks, 4)`: index of the tensor, first element, number of elements, and of those in a row;
        `(n_tensors, 4)`: first chunk, number of chunks, and of those in a row, and place of the result.
    """
    n, width = torch.tensor(sizes, dtype=torch.int64, device="cpu").reshape(-1, 2).unbind(1)
    in_row = (-(-width // CHUNK)).clamp(1, MERGED)  # 1 if a chunk has whole rows
    whole = CHUNK // width.clamp(1, CHUNK) * width
    length = torch.where(in_row > 1, -(-width // in_row), whole).masked_fill_(width == 0, CHUNK)
    count = torch.where(in_row > 1, n // width.clamp(min=1) * in_row, -(-n // length))
    first = count.cumsum(0) - count
    which = torch.repeat_interleave(torch.arange(len(n), device="cpu"), count)
    at = torch.arange(len(which), device="cpu") - first[which]
    own, part, row = length[which], at % in_row[which], at // in_row[which]
    begin = torch.where(in_row[which] > 1, row * width[which] + part * own, at * own)
    end = torch.where(in_row[which] > 1, (row + 1) * width[which], n[which])
    size = torch.minimum(begin + own, end) - begin  # below 0 where the parts of a row are more than it needs
    of_row = torch.where(in_row[which] > 1, own, width[which])
    chunks = torch.stack([which, begin, size.clamp(min=0), of_row], 1)
    return chunks, torch.stack([first, count, in_row, torch.tensor(places, device="cpu")], 1)


def _sum(
    addresses: tl.tensor, chunks: tl.tensor, parts: tl.tensor, kind: tl.constexpr, block: tl.constexpr
) -> None:
    """Writes the sums of one chunk to its row of `parts`.

    It begins to read at a multiple of 16 bytes, and ends at one, so that 16 are read at a time: a few bytes
    before and after the chunk are in the same piece of memory, and are left out of the sums.
    """
    chunk = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = getattr(tl, kind)
    real: tl.constexpr = tl.float64 if kind == "float64" else tl.float32
    itemsize: tl.constexpr = dtype.primitive_bitwidth // 8
    in_16: tl.constexpr = 16 // itemsize
    memory = tl.load(addresses + tl.load(chunks + chunk * 4))
    address = memory + tl.load(chunks + chunk * 4 + 1) * itemsize
    n = tl.where(memory == 0, 0, tl.load(chunks + chunk * 4 + 2)).to(tl.int32)  # 0: its memory was freed
    width = tl.load(chunks + chunk * 4 + 3).to(tl.int32)
    x = tl.multiple_of((address // 16 * 16).to(tl.pointer_type(dtype)), 16)
    begin = (address % 16 // itemsize).to(tl.int32)
    end = begin + n
    stop = tl.multiple_of((end + in_16 - 1) // in_16 * in_16, in_16)
    squares = tl.zeros((block,), real)
    size = tl.zeros((block,), real)
    total = tl.zeros((block,), real)
    largest = tl.full((block,), -1.0, real)
    bad = tl.zeros((block,), tl.int32)
    filled = tl.zeros((block,), tl.int32)
    for first in range(0, end, block):
        lane = first + tl.arange(0, block)
        inside = (lane >= begin) & (lane < end)
        value = tl.where(inside, tl.load(x + lane, mask=lane < stop, other=0).to(real), 0.0)
        of_value = tl.abs(value)
        is_finite = of_value < float("inf")
        squares += value * value
        size += of_value
        total += value
        largest = tl.maximum(largest, tl.where(is_finite & inside, of_value, -1.0))
        bad += (is_finite == 0).to(tl.int32)
        filled += (value != 0).to(tl.int32)
    top = tl.max(largest)
    norm = tl.sqrt(tl.sum(squares).to(tl.float64))
    if (top > 0) & ((top < 1e-15) | (top > 1e15)):  # squares may leave the range of the dtype
        squares = tl.zeros((block,), real)
        for first in range(0, end, block):
            lane = first + tl.arange(0, block)
            inside = (lane >= begin) & (lane < end)
            value = tl.where(inside, tl.load(x + lane, mask=lane < stop, other=0).to(real), 0.0) / top
            squares += value * value
        norm = tl.sqrt(tl.sum(squares).to(tl.float64)) * top
    n_filled = tl.sum(filled)
    rows = tl.where(n_filled == n, (n + width - 1) // tl.maximum(width, 1), 0)
    if (n_filled > 0) & (n_filled < n) & (width > 0):  # rows are counted only where some elements are zero
        latest = tl.full((), -1, tl.int32)
        for first in range(0, end, block):
            lane = first + tl.arange(0, block)
            value = tl.load(x + lane, mask=lane < stop, other=0)
            is_filled = (value != 0) & (lane >= begin) & (lane < end)
            row = (lane - begin) // width
            counts = tl.histogram(
                tl.where(is_filled, row - tl.maximum(first - begin, 0) // width, 0), block, is_filled
            )
            low = tl.min(tl.where(is_filled, row, n))
            rows += tl.sum((counts > 0).to(tl.int32)) - (low == latest).to(tl.int32)
            latest = tl.maximum(latest, tl.max(tl.where(is_filled, row, -1)))
    out = parts + chunk * 6
    tl.store(out, norm)
    tl.store(out + 1, tl.sum(size).to(tl.float64))
    tl.store(out + 2, top.to(tl.float64))
    tl.store(out + 3, tl.sum(bad).to(tl.float64))
    tl.store(out + 4, rows.to(tl.float64))
    tl.store(out + 5, tl.sum(total).to(tl.float64))


def _merge(parts: tl.tensor, spans: tl.tensor, out: tl.tensor, block: tl.constexpr) -> None:
    """Writes the sums of one tensor, from those of its chunks in their order."""
    spans += tl.program_id(0) * 4
    first, n, in_row = tl.load(spans), tl.load(spans + 1), tl.load(spans + 2)
    scale = tl.zeros((block,), tl.float64)  # the largest norm of a chunk, so that no square is out of range
    for at in range(0, n, block):
        lane = at + tl.arange(0, block)
        norm = tl.load(parts + (first + lane) * 6, mask=lane < n, other=0.0)
        scale = tl.maximum(scale, tl.where(norm < float("inf"), norm, 0.0))
    most = tl.max(scale)
    most = tl.where(most > 0, most, 1.0)
    squares = tl.zeros((block,), tl.float64)
    size = tl.zeros((block,), tl.float64)
    total = tl.zeros((block,), tl.float64)
    largest = tl.full((block,), -1.0, tl.float64)
    bad = tl.zeros((block,), tl.float64)
    rows = tl.zeros((), tl.float64)
    step = block // in_row * in_row  # whole rows
    for at in range(0, n, step):
        lane = tl.arange(0, block)
        inside = (lane < step) & (at + lane < n)
        part = parts + (first + at + lane) * 6
        norm = tl.load(part, mask=inside, other=0.0) / most
        squares += norm * norm
        size += tl.load(part + 1, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.load(part + 2, mask=inside, other=-1.0))
        bad += tl.load(part + 3, mask=inside, other=0.0)
        found = tl.load(part + 4, mask=inside, other=0.0)
        total += tl.load(part + 5, mask=inside, other=0.0)
        if in_row == 1:
            rows += tl.sum(found)
        else:
            counts = tl.histogram((lane // in_row).to(tl.int32), block, found > 0)
            rows += tl.sum((counts > 0).to(tl.float64))
    out += tl.load(spans + 3) * 6
    tl.store(out, tl.sqrt(tl.sum(squares)) * most)
    tl.store(out + 1, tl.sum(size))
    tl.store(out + 2, tl.max(largest))
    tl.store(out + 3, tl.sum(bad))
    tl.store(out + 4, rows)
    tl.store(out + 5, tl.sum(total))


_SUM = TritonKernel(_sum, num_warps=8, maxnreg=64)
_MERGE = TritonKernel(_merge, num_warps=4)
