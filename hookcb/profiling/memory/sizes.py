"""Memory of tensors: bytes and storages."""

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage, nn

from hookcb.core.batch import parts
from hookcb.core.torch_private import coo_indices, coo_values

USUAL = (Tensor, nn.Parameter)
COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def plain_tensors(x: Tensor) -> list[Tensor]:
    """The plain tensors that hold the elements of `x` on this rank: usually `x` itself.

    For a DTensor this is the local part; for a sparse or jagged tensor, its indices and values.
    """
    if type(x) in USUAL and x.layout is torch.strided:  # fast path
        return [x]
    if hasattr(x, "__tensor_flatten__"):
        # not only tensors: a DTensor has a device mesh, too
        inner = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
        return [plain for x in inner if isinstance(x, Tensor) for plain in plain_tensors(x)]
    if x.layout is torch.sparse_coo:
        return [coo_indices(x), coo_values(x)]
    return [getattr(x, name)() for name in COMPRESSED[x.layout]] if x.layout in COMPRESSED else [x]


def storages(x: Tensor) -> list[UntypedStorage]:
    """Storages that hold the elements of `x`; empty for a tensor on `meta`.

    Raises:
        RuntimeError, NotImplementedError: If the tensor subclass hides its memory.
    """
    all_storages = [plain.untyped_storage() for plain in plain_tensors(x)]
    return [storage for storage in all_storages if storage.device.type != "meta"]


def n_bytes(x: Tensor) -> int:
    """Bytes of the elements of `x` on this rank; for a view, of its own elements only.

    Raises:
        RuntimeError, NotImplementedError: If the tensor subclass hides its memory.
    """
    return sum(plain.numel() * plain.element_size() for plain in plain_tensors(x) if not plain.is_meta)


def tensors_in(item: object) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses."""
    if type(item) is Tensor:  # fast path
        return [item]
    return [x for _, x in parts(item) if isinstance(x, Tensor)]


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of several tensors, each counted once."""
    return sum(map(n_bytes, {id(x): x for x in tensors}.values()))
