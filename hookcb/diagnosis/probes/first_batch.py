"""The first batch of a loader, in a way that the loader does not notice."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hookcb.core.randomness import parts_of, saves_itself
from hookcb.core.restore import preserve_contents, preserve_random


def why_not_readable(loader: Any) -> str:
    """Why a loader cannot be asked for a batch without a trace, "" if it can."""
    if any(hasattr(part, "__next__") for part in parts_of(loader)):
        return "the training data is an iterator, or reads from one, which can be asked only once"
    if saves_itself(loader) or (not _is_plain(loader) and getattr(loader, "persistent_workers", False)):
        return f"{type(loader).__name__} goes on from where it is, so that it is not asked for a batch"
    return ""


@contextmanager
def preserve_loader(loader: Any) -> Iterator[None]:
    """In the block a loader may be asked; afterwards it gives the batches that it would have given.

    Random numbers, also those of its generators, samplers and datasets, and their attributes are put back.
    """
    attributes = [vars(part) for part in parts_of(loader) if hasattr(part, "__dict__")]
    with preserve_random(loader), preserve_contents(*attributes):
        yield


def first_batch(loader: Any) -> Any:
    """The first batch of a pass; of a DataLoader made here, without its worker processes.

    Raises:
        ValueError: if it gives none.
    """
    if _is_plain(loader):
        loader = _without_workers(loader)
    for batch in loader:
        return batch
    raise ValueError("the training loader gave no batch")


def _is_plain(loader: Any) -> bool:
    """Whether it is a DataLoader that iterates as torch's own."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _without_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same data in this process; workers that persist would go on from other random numbers."""
    how: dict[str, Any] = {"collate_fn": loader.collate_fn, "generator": loader.generator}
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return DataLoader(loader.dataset, loader.batch_size, drop_last=loader.drop_last, **how)
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **how)
