"""Shards: tensors of which each rank has a part, as under FSDP and tensor parallelism."""

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from hookcb.core.torch_private import is_flattened, is_fully_sharded, place_in, reshard_flat


def is_dtensor(x: Tensor) -> bool:
    """Whether a tensor is a DTensor; checks an attribute, as importing its class takes time."""
    return hasattr(x, "full_tensor")


def is_shard(p: Tensor) -> bool:
    """Whether a parameter is a DTensor, or one that FullyShardedDataParallel has flattened."""
    return is_dtensor(p) or is_flattened(p)


def is_divided(p: Tensor) -> bool:
    """Whether other ranks take part in a parameter."""
    return bool(p.device_mesh.size() > 1) if is_dtensor(p) else is_flattened(p)  # type: ignore[attr-defined]


def has_no_part(p: Tensor) -> bool:
    """Whether a flattened parameter is on other ranks only; it never has a gradient here."""
    return is_flattened(p) and not p.numel()


def local_part(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, which takes no communication; any other tensor as it is."""
    if not is_dtensor(x):
        return x
    with torch.no_grad():  # else it is a view
        part: Tensor = x.to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "wait") else part  # of a collective that was begun


def local_parts(xs: Iterable[Tensor]) -> list[Tensor]:
    """`local_part` of each tensor, with no call for plain ones, as there are many."""
    return [x if type(x) is Tensor or type(x) is nn.Parameter else local_part(x) for x in xs]


def is_in_memory(p: Tensor) -> bool:
    """Whether a parameter has its elements, which FullyShardedDataParallel frees in between."""
    part = local_part(p.detach())
    return not part.numel() or part.untyped_storage().nbytes() > 0


def gathered(value: Any) -> Any:
    """A copy with DTensors gathered from all ranks, on the CPU, a collective which all must reach."""
    if isinstance(value, Tensor) and is_dtensor(value):
        return value.detach().full_tensor().cpu()  # type: ignore[attr-defined]
    if isinstance(value, dict):
        same = copy.copy(value)
        for key, x in value.items():
            same[key] = gathered(x)
        return same
    return type(value)(map(gathered, value)) if type(value) in (list, tuple) else value


def divided_like(x: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which all ranks have, divided as the DTensor `like` is; does not communicate."""
    shape, first = place_in(like.shape, like.device_mesh, like.placements)  # type: ignore[attr-defined]
    part = x[tuple(slice(begin, begin + n) for begin, n in zip(first, shape, strict=True))]
    return joined_like(part.to(local_part(like).device).clone(), like)


def joined_like(part: Tensor, like: Tensor) -> Tensor:
    """This rank's part as a DTensor that is divided as `like` is; does not communicate."""
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    stride = like.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=stride)


class Part(NamedTuple):
    """This rank's part of a tensor.

    Attributes:
        x: the part.
        shape: shape of the whole tensor, as far as it is known.
        copies: number of ranks that have the same part; 0 if that is unknown.
        is_slice: whether other ranks have other parts.
    """

    x: Tensor
    shape: tuple[int, ...]
    copies: int = 0
    is_slice: bool = False


def part_of(x: Tensor) -> Part | None:
    """This rank's part of a tensor, for which nothing is awaited; None if ranks have summands of it."""
    if not is_dtensor(x):
        return Part(x, tuple(x.shape))
    if is_partial(x):
        return None
    mesh = x.device_mesh  # type: ignore[attr-defined]
    placements = enumerate(x.placements)  # type: ignore[attr-defined]
    copies = math.prod(mesh.size(i) for i, placed in placements if placed.is_replicate())
    with torch.no_grad():
        return Part(x.to_local(), tuple(x.shape), copies, copies < mesh.size())  # type: ignore[attr-defined]


def mesh_of(m: nn.Module, inputs: Iterable[Any]) -> Any:
    """Mesh of the ranks that compute a layer's output together, as in tensor parallelism; None if one does.

    Args:
        m: the layer, in or after its forward.
        inputs: what it was called with; in tensor parallelism DTensors, if it has not parameters that are.
    """
    parts = [x for x in inputs if isinstance(x, Tensor) and is_dtensor(x)]
    if not parts and not is_fully_sharded(m):  # which has its own shards back after its forward
        parts = [p for p in m.parameters(recurse=False) if is_dtensor(p)]
    mesh: Any = parts[0].device_mesh if parts else None  # type: ignore[attr-defined]
    return None if mesh is None or mesh.size() == 1 else mesh


def output_part(x: Tensor, m: nn.Module, inputs: Iterable[Any], mesh: Any) -> Part | None:
    """This rank's part of an output that several ranks compute together, also if it is a plain tensor.

    Whether such a tensor is a slice follows from its shape; it is told as a slice if that is unknown.

    Args:
        x: the output.
        m: the layer.
        inputs: what it was called with.
        mesh: see `mesh_of`.
    """
    part = part_of(x)
    if part is None or is_dtensor(x):
        return part
    given = next((i for i in inputs if isinstance(i, Tensor) and is_dtensor(i)), None)
    whole = None if given is None or mesh.ndim > 1 else _output_shape(m, tuple(given.shape))
    if whole is None or len(whole) != x.ndim:
        return part._replace(is_slice=True)
    if part.shape == whole:
        return part._replace(copies=mesh.size())
    return part._replace(shape=whole, copies=1, is_slice=True)


def _output_shape(m: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of a layer's whole output for an input of `shape`; None if it is unknown."""
    if isinstance(n := getattr(m, "out_features", None), int):
        return (*shape[:-1], n)
    if isinstance(n := getattr(m, "embedding_dim", None), int):
        return (*shape, n)
    return shape if hasattr(m, "normalized_shape") or not any(True for _ in m.parameters()) else None


def is_awaited(x: Tensor) -> bool:
    """Whether a tensor is the result of a collective that may still run."""
    return hasattr(x, "trigger_wait")


def is_partial(x: Tensor) -> bool:
    """Whether the ranks have summands of a DTensor, and not parts of it."""
    return any(placement.is_partial() for placement in getattr(x, "placements", ()))


def drop_gathered(model: nn.Module) -> None:
    """Drops the parameters that a sharded model has gathered in a forward without a backward.

    While it has them, they stand in for its shards: an optimizer would get them, and writes would be lost.
    All ranks must call it, as the next forward gathers them again.
    """
    if distributed.is_available() and distributed.is_initialized():
        for m in model.modules():
            if is_fully_sharded(m):
                m.reshard()  # type: ignore[operator]
        reshard_flat(model)


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """Drops at the end of a `with` block what a sharded model has gathered in it; see `drop_gathered`."""
    try:
        yield
    finally:
        drop_gathered(model)


def first_row(x: Tensor) -> int | None:
    """Index of the first of this rank's rows in a DTensor; None if they are not adjacent."""
    begin, n = 0, x.shape[0]
    for i, placed in enumerate(x.placements):  # type: ignore[attr-defined]
        if getattr(placed, "dim", None) != 0:
            continue
        if not placed.is_shard(0):  # as if an outer mesh were inside, for tensor parallelism under FSDP
            return None
        mesh = x.device_mesh  # type: ignore[attr-defined]
        size, at = -(-n // mesh.size(i)), mesh.get_local_rank(i)  # as torch.chunk divides
        first = min(size * at, n)
        begin, n = begin + first, min(size, n - first)
    return begin


def has_whole_rows(x: Tensor) -> bool:
    """Whether a DTensor is divided along its first dimension only."""
    return all(getattr(placed, "dim", 0) == 0 for placed in x.placements)  # type: ignore[attr-defined]
