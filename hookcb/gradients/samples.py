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
RUN = 2  # adjacent elements that are tracked together, as each run is a line to fetch into the CPU's cache
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


def sketch_stride(n: int) -> int:
    """Stride of the tracked runs among n: about n / 512, and coprime to n.

    A stride with a divisor in common with a dimension would track only some channels.
    """
    stride = n * RUN // SKETCH
    while math.gcd(stride, n) != 1:
        stride -= 1
    return stride


def sketch(x: Tensor) -> Tensor | None:
    """A view of up to 1,024 elements of a dense tensor, the same at each call, spread evenly over it.

    `(n,)` if it has that few, else 512 pairs, `(512, 2)`. None if there is no such view: up to 16,384
    elements, as a stride would leave out too many at the ends, and if `x` is not a dense real tensor with
    adjacent elements.
    """
    flat = _flat(x)
    return None if flat is None or SKETCH < len(flat) <= 16 * SKETCH else _tracked(flat)


def _flat(x: Tensor) -> Tensor | None:
    """A flat view of a dense real tensor in the order of its memory; None if there is none."""
    x = x.detach()
    native = is_native(x) and x.layout is torch.strided and x.is_floating_point()
    if not native or x.is_nested or x.is_meta or x.dtype.itemsize < 2:
        return None
    if not x.is_contiguous():
        x = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))
        if not x.is_contiguous():
            return None
    return x.view(-1)


def _tracked(x: Tensor) -> Tensor:
    n = len(x)
    if n <= SKETCH:
        return x
    if n <= 16 * SKETCH:
        return x.index_select(0, _places(n, x.device))
    runs = x[: n // RUN * RUN].view(-1, RUN)
    stride, k = sketch_stride(len(runs)), SKETCH // RUN
    return runs[(len(runs) - stride * (k - 1)) // 2 :: stride][:k]


@lru_cache(maxsize=256)
def _places(n: int, device: torch.device) -> Tensor:
    """1,024 of n indices: multiples of the golden ratio, spread evenly over all parts and channels."""
    step = round(n * 0.6180339887)
    while math.gcd(step, n) != 1:
        step += 1
    return (torch.arange(SKETCH, device="cpu") * step % n).sort().values.to(device, non_blocking=True)


def sketch_places(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """A flat view of a tensor and indices of its tracked elements, to copy them in one operation.

    None if it has `sketch`, or no such view.
    """
    flat = _flat(x) if x.layout is torch.strided and x.is_contiguous() else None
    is_picked = flat is not None and SKETCH < len(flat) <= 16 * SKETCH
    return (flat, _places(len(flat), x.device)) if flat is not None and is_picked else None


@lru_cache(maxsize=256)
def tracked_places(n: int) -> Tensor:
    """Indices of the tracked elements among n."""
    return _tracked(torch.arange(n, device="cpu")).reshape(-1)


def sketch_copy(x: Tensor) -> Tensor:
    """Copy of up to 1,024 elements, in one dimension, at least float32; those of `sketch` if it has one.

    Complex elements become real and imaginary parts in turn; of a DTensor, it has some of this rank's part.
    """
    x = local_part(x.detach())
    view = sketch(x)
    if view is None:
        view = _tracked((x if x.layout is torch.strided else x.to_dense()).reshape(-1))
    if view.is_complex():
        view = torch.view_as_real(view)
    return at_least_float32(view.clone(memory_format=torch.contiguous_format)).view(-1)


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
    found, dims = torch.zeros_like(places), list(zip(stride, shape, strict=True))[::-1]
    # as `sketch_copy`, which takes elements of these sizes in the order of indices
    is_picked = rule is tracked_places and SKETCH < shape.numel() <= 16 * SKETCH
    for step, size in dims if is_picked else sorted(dims):
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
