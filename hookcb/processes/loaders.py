"""The part of a loader's samples that belongs to one of several processes."""

import inspect
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

OURS = ("shuffle", "sampler", "batch_sampler")  # settings of a DataLoader that a sampler of ours replaces


class Share(NamedTuple):
    """Number of equal parts of all samples, and the one that a process has."""

    n_parts: int
    own: int


def divided(loader: Any, share: Share, training: bool) -> tuple[Any, str]:
    """A DataLoader like this one that yields a share of its samples; and why there is none, or "".

    Training shuffles if the loader does, by the epoch's number, the same way in each run. Validation keeps
    the order of the data; so that all processes have as many batches, samples are repeated at the end, which
    the Learner leaves out.

    Args:
        loader: the loader, with all samples.
        share: the share.
        training: whether it is to train on.

    Returns:
        The loader itself if it has a DistributedSampler, or cannot be divided.
    """
    if not isinstance(loader, DataLoader):
        return loader, f"it is a {type(loader).__name__}"
    batch_sampler: Any = loader.batch_sampler
    sampler: Any = getattr(batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) or isinstance(loader.sampler, DistributedSampler):
        return loader, ""
    if why := _obstacle(loader, sampler):
        return loader, why
    shuffle = training and isinstance(sampler, RandomSampler)
    part: Any = DistributedSampler(loader.dataset, *share, shuffle=shuffle)
    names = [name for name in inspect.signature(type(loader)).parameters if name not in OURS]
    settings = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    for name in (
        "batch_size",
        "drop_last",
    ):  # of a batch sampler that was given, the loader does not have them
        settings[name] = getattr(batch_sampler, name)
    try:
        return type(loader)(**settings, sampler=part), ""
    except (TypeError, ValueError) as error:  # a class with arguments of its own
        return loader, f"a {type(loader).__name__} cannot be made with a DistributedSampler: {error}"


def _obstacle(loader: Any, sampler: Any) -> str:
    """Why the samples of a DataLoader cannot be divided; "" if they can be."""
    if isinstance(loader.dataset, IterableDataset):
        return f"its dataset {type(loader.dataset).__name__} is iterable"
    if type(loader.batch_sampler) is not BatchSampler:
        kind = type(loader.batch_sampler).__name__
        return "it has no batch_size" if loader.batch_sampler is None else f"it has the batch sampler {kind}"
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return f"it has the sampler {type(sampler).__name__}"
    if len(sampler) != len(loader.dataset) or getattr(sampler, "replacement", False):
        return f"its {type(sampler).__name__} draws with replacement, or not all samples"
    return ""


class Divided:
    """The loaders of a learner, with others to train and to validate on, and else as they are."""

    def __init__(self, dls: Any, train: Any, valid: Any) -> None:
        self._dls, self.train, self.valid = dls, train, valid

    def __getattr__(self, name: str) -> Any:
        if name == "_dls":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self._dls, name)


def with_loaders(dls: Any, train: Any, valid: Any) -> Any:
    """A learner's `dls` with other loaders."""
    return dls._replace(train=train, valid=valid) if hasattr(dls, "_replace") else Divided(dls, train, valid)
