"""What tensors take in memory: their bytes, and the storages they share."""

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
    """The tensors with a memory of their own that `x` is made of, here: usually `x` itself.

    Of a DTensor it is the part on this rank, of a sparse or jagged tensor its indices and values.
    """
    if type(x) in USUAL and x.layout is torch.strided:  # the usual case without a look at its kind
        return [x]
    if hasattr(x, "__tensor_flatten__"):
        inner = [getattr(x, name) for name in x.__tensor_flatten__()[0]]  # also a mesh of devices, say
        return [plain for of in inner if isinstance(of, Tensor) for plain in plain_tensors(of)]
    if x.layout is torch.sparse_coo:
        return [coo_indices(x), coo_values(x)]
    return [getattr(x, name)() for name in COMPRESSED[x.layout]] if x.layout in COMPRESSED else [x]


def storages(x: Tensor) -> list[UntypedStorage]:
    """Where the elements of `x` are, with whatever else is there; nothing for a tensor on `meta`.

    Raises:
        RuntimeError, NotImplementedError: of torch, for a kind of tensor that hides it.
    """
    found = [plain.untyped_storage() for plain in plain_tensors(x)]
    return [storage for storage in found if storage.device.type != "meta"]


def n_bytes(x: Tensor) -> int:
    """Size of the elements of `x` on this rank; of a view its own, and not those of what it is a view of.

    Raises:
        RuntimeError, NotImplementedError: of torch, for a kind of tensor that hides it.
    """
    return sum(plain.numel() * plain.element_size() for plain in plain_tensors(x) if not plain.is_meta)


def tensors_in(item: object) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses."""
    if type(item) is Tensor:  # the usual case without a walk
        return [item]
    return [x for _, x in parts(item) if isinstance(x, Tensor)]


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Size of several tensors, each counted once."""
    return sum(map(n_bytes, {id(x): x for x in tensors}.values()))
