"""Collating: tensors of a batch that are those of one sample, though each sample has its own."""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from hookcb.core.batch import parts
from hookcb.core.torch_private import ListFetcher
from hookcb.diagnosis.heard import Ear


class Collating(Ear):
    """Compares samples with the batch that `collate_fn` makes of them, in the process of the training.

    Attributes:
        n: number of samples of the last batch.
        shapes: shapes of the tensors of that batch that are those of one sample.
    """

    calls = ((ListFetcher, "fetch", "fetches"),)

    def __init__(self) -> None:
        self.n, self.shapes = 0, frozenset[tuple[int, ...]]()

    def fetches(self, fetcher: Any, *args: Any) -> Generator[None, Any, None]:
        collate = fetcher.collate_fn

        def observed(samples: Any) -> Any:
            batch = collate(samples)
            try:
                self.n = len(samples) if isinstance(samples, list) else 0
                self.shapes = shapes_of_one(samples, batch) if self.n > 1 else frozenset()
            except Exception as error:  # a sample may be of any kind
                self.failed(error)
            return batch

        fetcher.collate_fn = observed
        try:
            yield
        finally:
            fetcher.collate_fn = collate


def shapes_of_one(samples: list[Any], batch: Any) -> frozenset[tuple[int, ...]]:
    """Shapes `(1, …)` of tensors with the floats of one sample, if the batch lacks all others."""
    leaves = [x for _, x in parts(batch) if isinstance(x, Tensor) and x.is_cpu and x.ndim > 1]
    single = [x for x in leaves if len(x) == 1 and x.numel() > 1 and x.is_floating_point()]
    if not single:
        return frozenset()
    by_sample = [list(dict(parts(x)).values()) for x in samples]
    if len(set(map(len, by_sample))) > 1:
        return frozenset()
    fields = list(filter(_is_alike, zip(*by_sample, strict=True)))
    rows = [torch.stack([_flat(x) for x in field]) for field in fields]
    found = [
        tuple(x.shape)
        for x in single
        for field in rows
        if field.shape[1] == x.numel() and bool((field != field[:1]).any())
        if bool((field.to(x.dtype) == x.detach().reshape(1, -1)).all(1).any())
        if not any(y.numel() == field.numel() and torch.equal(y.reshape(field.shape), field) for y in leaves)
    ]
    return frozenset(found)


def _is_alike(field: tuple[Any, ...]) -> bool:
    """Whether all samples have an array of the same shape there."""
    are_floats = all(
        x.is_floating_point()
        if isinstance(x, Tensor)
        else type(x).__module__ == "numpy" and x.dtype.kind == "f"
        for x in field
    )
    return are_floats and len({tuple(x.shape) for x in field}) == 1


def _flat(x: Any) -> Tensor:
    return (x.detach() if isinstance(x, Tensor) else torch.tensor(x, device="cpu")).flatten()
