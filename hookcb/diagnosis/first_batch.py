"""Reads the first batch of a loader and leaves the loader as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hookcb.core.randomness import parts_of, saves_itself
from hookcb.core.restore import preserve_contents, preserve_random


def why_not_readable(loader: Any) -> str:
    """Reason why reading a batch would change the loader, "" if it can be restored."""
    if any(hasattr(part, "__next__") for part in parts_of(loader)):
        return "the training data is an iterator, or reads from one, which can be read only once"
    if saves_itself(loader) or (not _is_plain(loader) and getattr(loader, "persistent_workers", False)):
        return f"{type(loader).__name__} continues from its position, so reading a batch changes the training"
    return ""


@contextmanager
def preserve_loader(loader: Any) -> Iterator[None]:
    """Restores a loader after the block, so that it yields the batches it would have yielded.

    That covers the global random state, and the generators and attributes of the loader, its samplers and
    datasets.
    """
    attributes = [vars(part) for part in parts_of(loader) if hasattr(part, "__dict__")]
    with preserve_random(loader), preserve_contents(*attributes):
        yield


def first_batch(loader: Any) -> Any:
    """First batch of a pass over a loader, read without worker processes from a plain DataLoader.

    Raises:
        ValueError: If the loader has no batch.
    """
    if _is_plain(loader):  # persistent workers would advance their random state
        how: dict[str, Any] = {"collate_fn": loader.collate_fn, "generator": loader.generator}
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            how |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        else:
            how["batch_sampler"] = loader.batch_sampler
        loader = DataLoader(loader.dataset, **how)
    for batch in loader:
        return batch
    raise ValueError("the training loader has no batch")


def _is_plain(loader: Any) -> bool:
    """Whether it is a DataLoader with torch's own `__iter__`."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
