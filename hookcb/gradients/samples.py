"""Samples: up to 1,024 elements of each of many tensors, the same at each call, copied together."""

from __future__ import annotations  # annotations stay text, as tl is not imported yet

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookcb.core.precision import at_least_float32
from hookcb.core.triton_kernel import Addresses, TritonKernel, can_run, table_on
from hookcb.processes.shards import local_part

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]  # no types

SKETCH = 1_024  # maximum number of elements of a parameter that are tracked from step to step
FEW = 16 * SKETCH  # up to which elements are tracked one by one
PAIR = 2  # adjacent elements that are tracked together, as each pair is a line to fetch into the CPU's cache
Rule = Callable[[int], Tensor]
COPIED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # what the kernel copies


@cache
def works_on(device: torch.device) -> bool:
    """Whether the kernel that copies samples can be used on a device."""
    return can_run(device, lambda: Gather(device).of([torch.zeros(2, device=device)], tracked_places))


def is_native(x: Tensor) -> bool:
    """Whether a tensor is no subclass with operations of its own, which may hide its elements."""
    # subclasses without their own inherit it
    return type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


@lru_cache(maxsize=256)
def tracked_places(n: int, device: torch.device | str = "cpu") -> Tensor:
    """Indices of the tracked elements among n, in rising order: all up to 1,024, up to 16,384 single ones.

    Among more, 512 pairs at equal distances, which memory is fast at. Among fewer those would leave out too
    much at the ends, and a step by the golden ratio goes around. Neither step has a divisor in common with
    their number, so that they are spread over all indices of each dimension.
    """
    if n <= SKETCH:
        places = torch.arange(n, device="cpu")
    elif n <= FEW:
        step = _coprime(round(n * 0.6180339887), n, 1)
        places = (torch.arange(SKETCH, device="cpu") * step % n).sort().values
    else:
        n_pairs, k = n // PAIR, SKETCH // PAIR
        step = _coprime(n_pairs // k, n_pairs, -1)
        first = (n_pairs - step * (k - 1)) // 2
        pairs = (first + torch.arange(k, device="cpu") * step) * PAIR
        places = torch.stack([pairs, pairs + 1], 1).view(-1)
    return places.to(device, non_blocking=True)


def _coprime(step: int, n: int, way: int) -> int:
    while math.gcd(step, n) != 1:
        step += way
    return step


def _is_by_memory(n: int) -> bool:
    """Whether elements are counted in their order in memory; of those tracked one by one, as indices go."""
    return not SKETCH < n <= FEW


def flat(x: Tensor) -> Tensor:
    """All elements, `(n,)`, in the order in which they are tracked: a view if they are adjacent in memory."""
    if x.layout is not torch.strided:
        x = x.to_dense()
    elif not x.is_contiguous() and _is_by_memory(x.numel()):
        x = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))
    return x.reshape(-1)


def sketch(x: Tensor) -> Tensor:
    """Up to 1,024 elements of a tensor, the same at each call and spread evenly over it; see `flat`."""
    x = flat(x)
    return x if len(x) <= SKETCH else x.index_select(0, tracked_places(len(x), x.device))


def sketch_copy(x: Tensor) -> Tensor:
    """Copy of `sketch`, at least float32; of a DTensor, of this rank's part.

    Complex elements become real and imaginary parts in turn.
    """
    x = sketch(local_part(x.detach()))
    if x.is_complex():
        x = torch.view_as_real(x)
    return at_least_float32(x.clone(memory_format=torch.contiguous_format)).view(-1)


def sketch_copies(xs: Sequence[Tensor]) -> list[Tensor]:
    """`sketch_copy` of each tensor; on a card in one launch for each dtype."""
    parts = [local_part(x.detach()) for x in xs]
    found: dict[int, Tensor] = {}
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, x in enumerate(parts):
        if works_on(x.device) and can_gather(x):
            kinds.setdefault((x.device, torch.promote_types(x.dtype, torch.float32)), []).append(i)
        else:
            found[i] = sketch_copy(x)
    for (device, dtype), places in kinds.items():
        copies = Gather(device, dtype).of([parts[i] for i in places], tracked_places)
        found |= zip(
            places, torch.split(copies, [min(parts[i].numel(), SKETCH) for i in places]), strict=True
        )
    return [found[i] for i in range(len(parts))]


def named_sketches(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`sketch_copies` of tensors, by their names."""
    return dict(zip(named, sketch_copies(list(named.values())), strict=True))


def unchanged(named: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> set[str]:
    """Names of the tensors that still have the elements of `named_sketches`; waits for devices, once each."""
    same = are_same(sketch_copies(list(named.values())), [before[name] for name in named])
    return {name for name, is_same in zip(named, same, strict=True) if is_same}


def are_same(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[bool]:
    """Whether pairs of tensors are equal; waits for devices, once for all tensors on one."""
    both = zip(on_cpu(xs), on_cpu(ys), strict=True)
    return [torch.equal(x, y) for x, y in both]


def on_cpu(xs: Sequence[Tensor]) -> list[Tensor]:
    """Flat tensors on the CPU, moved together; waits for their devices."""
    found = dict(enumerate(xs))
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, x in found.items():
        if not x.is_cpu:
            kinds.setdefault((x.device, x.dtype), []).append(i)
    for places in kinds.values():
        whole = torch.cat([xs[i] for i in places]).cpu()
        found |= zip(places, torch.split(whole, [len(xs[i]) for i in places]), strict=True)
    return [found[i] for i in range(len(xs))]


# ---- on a card


def can_gather(x: Tensor) -> bool:
    """Whether the elements of a tensor are numbers in memory that the kernel can read."""
    is_plain = (
        x.layout is torch.strided and x.dtype in COPIED and not (x.is_nested or x.is_meta or x.is_neg())
    )
    return is_plain and is_native(x)


class Gather:
    """Copies elements of many tensors on one card, in one launch for each dtype.

    Args:
        device: the card.
        dtype: that of the copies.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._device, self._dtype, self._addresses = device, dtype, Addresses(device)
        self._known: tuple[Tensor, Rule] | None = None

    def of(self, xs: Sequence[Tensor], rule: Rule) -> Tensor:
        """A concatenated copy of some elements of tensors that `can_gather`.

        Args:
            xs: the tensors.
            rule: gives the indices of these elements, in the order of memory, among a number of them.
        """
        table = self._addresses.of(xs)
        if self._known is None or self._known[0] is not table or self._known[1] is not rule:
            kinds = tuple((x.dtype, x.shape, x.stride()) for x in xs)
            self._known, self._index = (table, rule), _index_of(kinds, rule, self._device)
        offsets, of_dtype = self._index
        out = torch.empty(len(offsets), dtype=self._dtype, device=self._device)
        for dtype, rows in of_dtype.items():
            args = table, rows, offsets, out, str(dtype).removeprefix("torch."), SKETCH
            _GATHER.launch((dtype, self._dtype), self._device, len(rows), args)
        return out


@lru_cache(maxsize=32)
def _index_of(
    kinds: tuple[tuple[torch.dtype, Any, Any], ...], rule: Rule, device: torch.device
) -> tuple[Tensor, dict[torch.dtype, Tensor]]:
    # offsets from the first element of each tensor; by dtype, index, first and end of each in the sample
    offsets, rows, n = [torch.empty(0, dtype=torch.int64, device="cpu")], dict[torch.dtype, list[Any]](), 0
    for i, (dtype, shape, stride) in enumerate(kinds):
        offsets.append(_offsets(shape, stride, rule))
        if len(offsets[-1]):
            rows.setdefault(dtype, []).append((i, n, n := n + len(offsets[-1])))
    tables = {dtype: table_on(device, torch.tensor(own, device="cpu")) for dtype, own in rows.items()}
    return table_on(device, torch.cat(offsets)), tables


@lru_cache(maxsize=256)  # as many parameters have the same shape
def _offsets(shape: torch.Size, stride: tuple[int, ...], rule: Rule) -> Tensor:
    places = rule(shape.numel())
    found, dims = torch.zeros_like(places), list(zip(stride, shape, strict=True))
    by_memory = rule is not tracked_places or _is_by_memory(shape.numel())
    for step, size in sorted(dims) if by_memory else dims[::-1]:
        found += places % size * step
        places = places // size
    return found


def _gather(
    addresses: tl.tensor,
    rows: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    kind: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Copies the elements of one tensor."""
    rows += tl.program_id(0) * 3
    address = tl.load(addresses + tl.load(rows))
    x = address.to(tl.pointer_type(getattr(tl, kind)))
    end = tl.load(rows + 2)
    known = tl.where(address == 0, 0, end)  # its memory was freed
    for first in range(tl.load(rows + 1), end, block):
        lane = first + tl.arange(0, block)
        place = tl.load(offsets + lane, mask=lane < end, other=0)
        value = tl.load(x + place, mask=lane < known, other=0)
        tl.store(out + lane, value.to(out.dtype.element_ty), mask=lane < end)


_GATHER = TritonKernel(_gather, num_warps=4)
