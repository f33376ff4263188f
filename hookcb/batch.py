"""What a loop is fed: loaders, batches and the tensors in them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Loaders(NamedTuple):
    """The batches to train on and those to validate on, or None."""

    train: Iterable[Any]
    valid: Iterable[Any] | None = None


def as_loaders(dls: Any) -> Any:
    """What has `.train` and `.valid`: `dls` itself, or `Loaders` of a `(train, valid)` tuple or one iterable.

    Raises:
        TypeError: if one of them cannot give batches; the message says what can.
    """
    if isinstance(dls, tuple) and not hasattr(dls, "train"):
        if len(dls) != 2:
            raise TypeError(f"dls is a tuple of {len(dls)}; a tuple means (train, valid), a list is batches")
        dls = Loaders(*dls)
    elif not hasattr(dls, "train"):
        dls = Loaders(dls)
    check_loader(dls.train, "dls.train" if hasattr(dls, "valid") else "dls")
    if getattr(dls, "valid", None) is not None:
        check_loader(dls.valid, "dls.valid")
    return dls


def check_loader(loader: Any, role: str) -> None:
    """Refuses what would be iterated, but not in batches.

    Raises:
        TypeError: naming `role`, what was given and what to give.
    """
    kind = type(loader).__name__
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"{role} is the dataset {kind}, which gives samples; "
            f"wrap it: DataLoader({kind}(…), batch_size=64)"
        )
    if isinstance(loader, Tensor):
        raise TypeError(
            f"{role} is a tensor of shape {tuple(loader.shape)}, which iterates in rows; "
            "wrap it: DataLoader(TensorDataset(x, y), batch_size=64)"
        )
    if isinstance(loader, tuple | str | bytes | Mapping) or not hasattr(loader, "__iter__"):
        raise TypeError(
            f"{role} is {loader!r:.80}, no iterable of batches; give a DataLoader, a list of batches, "
            "a (train, valid) tuple of these, or an object with .train and .valid"
        )
    if isinstance(loader, list) and any(isinstance(item, DataLoader) for item in loader):
        raise TypeError(
            f"{role} is a list of DataLoaders; give a (train, valid) tuple, a list is read as batches"
        )


def n_batches(loader: Iterable[Any]) -> int | None:
    """Number of batches of a loader, None where it has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]  # what has no length is the case below
    except TypeError:
        return None


def to_device(item: Any, device: torch.device) -> Any:
    """`item` with every tensor in it on `device`; nested tuples, lists and namedtuples keep their kind.

    What is there already is returned as it is. Copies to a GPU are `non_blocking`: from pinned memory they
    overlap with the computation.
    """
    if isinstance(item, Tensor):
        return item if item.device == device else item.to(device, non_blocking=True)
    if hasattr(item, "to"):  # before tuples: a PackedSequence is one, and keeps a part of itself on the CPU
        return item.to(device)
    if isinstance(item, tuple | list):
        return _like(item, [to_device(x, device) for x in item])
    if isinstance(item, Mapping):
        return {key: to_device(x, device) for key, x in item.items()}
    return item


def split_batch(batch: Any, device: torch.device, n_inp: int | None = None) -> tuple[Any, tuple[Any, ...]]:
    """A batch on `device` as `(xb, yb)`: what the model is called with, and what the loss compares with.

    Args:
        batch: a tensor (an input without target), a tuple or list `(*xb, *yb)`, a mapping of keyword
            arguments, or an object of one's own that the model takes.
        device: where to put every tensor in it, see `to_device`.
        n_inp: how many items of a tuple or mapping are inputs; by default all but the last, of a mapping all.

    Returns:
        `xb`, a tuple or, for a mapping, a mapping; and `yb`, a tuple. A mapping that is not split and an
        object are their own target, so that a loss function or metric picks from them what it needs.
    """
    if type(batch) in (tuple, list) and len(batch) == 2 and n_inp is None:
        x, y = batch  # the usual case without a walk: that is 2 % of a tiny step
        if type(x) is Tensor is type(y) and x.device == device == y.device:
            return (x,), (y,)
    batch = to_device(batch, device)
    if isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence):
        n = n_inp or max(1, len(batch) - 1)
        return tuple(batch[:n]), tuple(batch[n:])
    if isinstance(batch, Tensor):
        return (batch,), ()
    if isinstance(batch, Mapping):
        if n_inp is None:
            return batch, (batch,)
        items = list(batch.items())
        return dict(items[:n_inp]), tuple(value for _, value in items[n_inp:])
    return (batch,), (batch,)


def parts(item: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What is in nested tuples, lists and mappings but None, each with its path: `[0]`, `.encoder.logits`."""
    if isinstance(item, Mapping):
        for key, x in item.items():
            yield from parts(x, f"{path}.{key}")
    elif isinstance(item, tuple | list):
        for i, x in enumerate(item):
            yield from parts(x, f"{path}[{i}]")
    elif item is not None:
        yield path, item


def batch_size(xb: Any) -> int:
    """Number of samples of a batch: the length of the first tensor in it, 1 where there is none."""
    first = (
        xb[0]
        if isinstance(xb, tuple) and xb and isinstance(xb[0], Tensor)
        else next((x for _, x in parts(xb) if isinstance(x, Tensor)), None)
    )
    return first.shape[0] if first is not None and first.ndim else 1


def describe(item: Any) -> str:
    """Dtypes and shapes of what is in `item`, for a message: `(float32[64, 1, 8, 8])`."""
    if isinstance(item, Tensor):
        return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    if isinstance(item, tuple | list):
        return f"({', '.join(describe(x) for x in item)})"
    if isinstance(item, Mapping):
        return f"{{{', '.join(f'{key}: {describe(x)}' for key, x in item.items())}}}"
    return type(item).__name__


def detached(item: Any, device: torch.device) -> Any:
    """`item` with every tensor in it without its graph, and on `device`."""
    if isinstance(item, Tensor):
        return item.detach().to(device)
    if isinstance(item, Mapping):
        return {key: detached(x, device) for key, x in item.items()}
    if isinstance(item, tuple | list):
        return _like(item, [detached(x, device) for x in item])
    return item


def concat(items: list[Any]) -> Any:
    """What several batches gave, as if it were one: tensors joined along their first dimension.

    Tensors without dimensions are stacked, mappings and tuples joined item by item, anything else listed.

    Raises:
        ValueError: where tensors differ in the other dimensions.
    """
    first = items[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        shapes = {tuple(x.shape[1:]) for x in items}
        if len(shapes) > 1:
            raise ValueError(
                f"batches differ in shape after the first dimension: {sorted(shapes)}; pad them alike"
            )
        return torch.cat(items) if first.ndim else torch.stack(items)
    if isinstance(first, Mapping):
        return {key: concat([item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list):
        return _like(first, [concat(list(parts)) for parts in zip(*items, strict=True)])
    return items


def _like(kind: Any, items: list[Any]) -> Any:
    """`items` as a tuple, list or namedtuple, as `kind` is one."""
    return type(kind)(*items) if hasattr(kind, "_fields") else type(kind)(items)
