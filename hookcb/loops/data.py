"""The batches that a Learner trains and validates on."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hookcb.core.batch import is_array, n_batches, shown


class Loaders(NamedTuple):
    """The batches to train on and those to validate on, or None."""

    train: Iterable[Any]
    valid: Iterable[Any] | None = None

    @property
    def train_ds(self) -> Any:
        """Dataset of the training loader."""
        return getattr(self.train, "dataset", None)

    @property
    def valid_ds(self) -> Any:
        """Dataset of the validation loader."""
        return getattr(self.valid, "dataset", None)

    def __repr__(self) -> str:
        return describe_loaders(self)

    def one_batch(self) -> Any:
        """The first training batch; a loader that shuffles draws random numbers for it."""
        return next(iter(self.train))


def describe_loaders(dls: Any) -> str:
    """Kind of `dls`, and numbers of batches in its loaders: `Loaders(train=10 batches, valid=None)`."""
    held = ((part, getattr(dls, part, None)) for part in ("train", "valid"))
    return f"{type(dls).__name__}({', '.join(f'{part}={_described(loader)}' for part, loader in held)})"


def _described(loader: Any) -> str:
    if loader is None:
        return "None"
    n = n_batches(loader)
    return type(loader).__name__ if n is None else f"{n:,} batch{'es' * (n != 1)}"


def as_loaders(dls: Any) -> Any:
    """Returns loaders as `.train` and `.valid`: `dls` itself, or `Loaders` for a tuple or one iterable.

    Raises:
        TypeError: If one of them cannot yield batches; the message says what can.
    """
    if isinstance(dls, tuple) and not hasattr(dls, "train"):
        if len(dls) != 2:
            raise TypeError(f"dls is a tuple of {len(dls)}; a tuple means (train, valid), a list is batches")
        dls = Loaders(*dls)
    elif not hasattr(dls, "train") or callable(dls.train):
        check_loader(dls, "dls")
        return Loaders(dls)
    check_loader(dls.train, "dls.train")
    if getattr(dls, "valid", None) is not None:
        check_loader(dls.valid, "dls.valid")
    return dls


def check_loader(loader: Any, role: str) -> None:
    """Checks that a loader iterates over batches.

    Raises:
        TypeError: If it does not; the message names `role`, and says what to give.
    """
    kind = type(loader).__name__
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"{role} is the dataset {kind}, which yields samples; "
            f"wrap it: DataLoader({kind}(…), batch_size=64)"
        )
    if isinstance(loader, Tensor) or is_array(loader):
        made = "x, y" if isinstance(loader, Tensor) else "torch.from_numpy(x), torch.from_numpy(y)"
        raise TypeError(
            f"{role} is {shown(loader)}, which yields rows; "
            f"wrap it: DataLoader(TensorDataset({made}), batch_size=64)"
        )
    if isinstance(loader, tuple | str | bytes | Mapping | nn.Module) or not hasattr(loader, "__iter__"):
        raise TypeError(
            f"{role} must be an iterable of batches, got {shown(loader)}; give a DataLoader, a list of "
            "batches, a (train, valid) tuple of these, or an object with .train and .valid"
        )
    if isinstance(loader, list) and any(isinstance(item, DataLoader) for item in loader):
        raise TypeError(
            f"{role} is a list of DataLoaders; give a (train, valid) tuple, a list is read as batches"
        )


def set_epoch(loader: Any, epoch: int) -> None:
    """Gives the number of the epoch to whatever in a loader shuffles by it, such as a DistributedSampler."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    places = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    setters = [getattr(x, "set_epoch", None) for x in (*places, getattr(loader, "dataset", None))]
    for setter in dict.fromkeys(setter for setter in setters if callable(setter)):
        setter(epoch)
