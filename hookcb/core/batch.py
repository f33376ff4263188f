"""Batches, loaders, and the tensors in them."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

MAX_DEPTH = 50  # levels of nesting
KINDS: tuple[tuple[type, str], ...] = (  # of objects that are passed around, in words
    (nn.Module, "module"),
    (Optimizer, "optimizer"),
    (LRScheduler, "scheduler"),
    (DataLoader, "loader"),
    (Dataset, "dataset"),
)


def n_batches(loader: Iterable[Any]) -> int | None:
    """Number of batches of a loader, None if it has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]  # a loader without a length is handled below
    except TypeError:
        return None


def map_tensors(f: Callable[[Tensor], Tensor], item: Any) -> Any:
    """Applies `f` to every tensor in `item`; tuples, lists, dicts and dataclasses keep their type."""
    return map_leaves(f, item, _is_tensor)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def to_device(item: Any, device: torch.device) -> Any:
    """Moves every tensor in `item` to `device`, and other objects that have a method `to`.

    Tensors already on the device are returned as they are. Copies to a GPU are `non_blocking`: from pinned
    memory they overlap with computation.
    """

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x.to(device)
        return x if x.device == device else x.to(device, non_blocking=True)

    # not only tensors: a PackedSequence keeps a part on the CPU, a tokenizer's BatchEncoding keeps its type
    return map_leaves(move, item, lambda x: hasattr(x, "to"))


def map_leaves(
    f: Callable[[Any], Any],
    item: Any,
    is_leaf: Callable[[Any], bool],
    depth: int = MAX_DEPTH,
    above: tuple[Any, ...] = (),
) -> Any:
    """Applies `f` to every leaf in `item`; tuples, lists, dicts and dataclasses keep their type.

    Items nested deeper than `depth`, or in themselves, are left as they are; `above` has what
    contains `item`.
    """
    if is_leaf(item):
        return f(item)
    if depth == 0 or (above and any(item is x for x in above)):
        return item
    above = (*above, item)

    def mapped(x: Any) -> Any:
        return map_leaves(f, x, is_leaf, depth - 1, above)

    if type(item) is tuple:  # the usual case, without the slower checks below
        return tuple(map(mapped, item))
    if is_dataclass(item) and not isinstance(item, type):
        if isinstance(item, Mapping):  # a ModelOutput; its keys are the fields that are not None
            return type(item)(**{str(key): mapped(x) for key, x in item.items()})
        copied = copy.copy(item)
        for name, x in _fields_of(item):
            setter = object.__setattr__ if item.__dataclass_params__.frozen else setattr  # type: ignore[attr-defined]
            setter(copied, name, mapped(x))
        return copied
    if isinstance(item, Mapping):
        return _like(item, {key: mapped(x) for key, x in item.items()})
    if isinstance(item, (tuple, list)):
        return _like(item, list(map(mapped, item)))
    return item


def _fields_of(item: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a dataclass's fields that are set."""
    for field in fields(item):
        if hasattr(item, field.name):
            yield field.name, getattr(item, field.name)


def is_container(item: Any) -> bool:
    """Whether `map_leaves` looks inside `item`."""
    if isinstance(item, Tensor):  # the usual case, without the slower checks below
        return False
    return isinstance(item, (tuple, list, Mapping)) or (is_dataclass(item) and not isinstance(item, type))


def split_batch(batch: Any, device: torch.device, n_inp: int | None = None) -> tuple[Any, tuple[Any, ...]]:
    """Splits a batch into `(xb, yb)` on `device`: the inputs of the model, and the targets of the loss.

    Args:
        batch: a tensor (an input without target), a tuple or list `(*xb, *yb)`, a mapping of keyword
            arguments, or any object that the model accepts.
        device: device for every tensor in the batch, see `to_device`.
        n_inp: number of items that are inputs; by default all but the last of a tuple, all of a mapping.

    Returns:
        `xb`, a tuple, or a mapping if the batch is one; and `yb`, a tuple, empty without targets.

    Raises:
        ValueError: If the batch has fewer than `n_inp` items.
    """
    if type(batch) in (tuple, list) and len(batch) == 2 and n_inp is None:
        x, y = batch  # the usual case without recursion, which would take 2 % of a tiny step
        if type(x) is Tensor is type(y) and x.device == device == y.device:
            return (x,), (y,)
    batch = to_device(batch, device)
    xb: Any
    if isinstance(batch, Mapping):
        items = list(batch.items())
        n = len(items) if n_inp is None else n_inp
        xb, yb = (batch if n_inp is None else dict(items[:n])), tuple(value for _, value in items[n:])
    elif isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence):
        items = list(batch)
        n = n_inp or max(1, len(items) - 1)
        xb, yb = tuple(items[:n]), tuple(items[n:])
    else:
        return (batch,), ()
    if n > len(items):
        raise ValueError(f"n_inp is {n_inp}, but a batch has only {len(items)} items")
    return xb, yb


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inputs of a call: a tuple, or a mapping by name, with positions among these: `{0: x, "mask": mask}`."""
    return {**dict(enumerate(args)), **kwargs} if args and kwargs else args or kwargs


def called(model: Callable[..., Any], inputs: Any) -> Any:
    """Calls a model with inputs as `inputs_of` returns them."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    named = dict(inputs)
    return model(*[named.pop(i) for i in range(len(inputs)) if i in named], **named)


def parts(
    item: Any, path: str = "", depth: int = MAX_DEPTH, above: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields the parts of nested tuples, lists, mappings and dataclasses, each with its path: `[0].data`.

    Anything nested deeper than `depth`, or in itself, counts as one part; `above` has what contains `item`.
    """
    if item is None or isinstance(item, Tensor) or depth == 0 or (above and any(item is x for x in above)):
        yield path, item
        return
    inside: Iterable[tuple[str, Any]]
    if type(item) is tuple or type(item) is list:  # the usual case, without the slower checks below
        inside = ((f"[{i}]", x) for i, x in enumerate(item))
    elif isinstance(item, PackedSequence):
        inside = ((".data", item.data),)
    elif isinstance(item, Mapping):
        inside = ((f".{key}", x) for key, x in item.items())
    elif is_dataclass(item) and not isinstance(item, type):
        inside = ((f".{name}", x) for name, x in _fields_of(item))
    elif isinstance(item, (tuple, list)):
        inside = ((f"[{i}]", x) for i, x in enumerate(item))
    else:
        yield path, item
        return
    above = (*above, item)  # not their ids, which torch 2.11 cannot compile
    for step, x in inside:
        yield from parts(x, path + step, depth - 1, above)


def batch_size(item: Any) -> int:
    """Number of samples: the length of the first tensor in `item`, 1 if there is none."""
    size = n_samples(item)
    return 1 if size is None else size


def n_samples(item: Any) -> int | None:
    """Number of samples: the length of the first tensor in `item`, None if there is none."""
    if type(item) is tuple and item and type(item[0]) is Tensor and (shape := item[0].shape):
        return shape[0]  # the usual case, without the slower checks below
    if isinstance(item, Tensor):
        return item.shape[0] if item.ndim else 1
    if isinstance(item, PackedSequence):
        return int(item.batch_sizes[0])
    if not isinstance(item, (tuple, list)):
        item = item.values() if isinstance(item, Mapping) else ()
    for x in item:
        size = n_samples(x)
        if size is not None:
            return size
    return None


def describe(item: Any) -> str:
    """Dtypes and shapes of the tensors in `item`, for a message: `(float32[64, 1, 8, 8])`."""
    if isinstance(item, Tensor) or is_array(item):
        kind = "" if isinstance(item, Tensor) else "ndarray "
        return f"{kind}{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    if isinstance(item, (tuple, list)):
        return f"({', '.join(describe(x) for x in item)})"
    if isinstance(item, Mapping):
        return f"{{{', '.join(f'{key}: {describe(x)}' for key, x in item.items())}}}"
    return type(item).__name__


def is_array(item: Any) -> bool:
    """Whether `item` is a NumPy array."""
    return type(item).__module__ == "numpy" and type(item).__name__ == "ndarray"


def array_hint(item: Any) -> str:
    """End of a message that says how to convert NumPy arrays in `item`; "" if there are none."""
    if any(is_array(x) for _, x in parts(item)):
        return "; NumPy arrays are not converted: torch.from_numpy(x) makes a tensor, as a DataLoader does"
    return ""


def shown(x: Any) -> str:
    """Kind of `x` in one line, for a message that refuses it; no values of tensors.

    >>> shown(torch.nn.Linear(2, 1)), shown((torch.zeros(2), 1)), shown(3)
    ('the module Linear', '(float32[2], int)', '3')
    """
    if isinstance(x, type):
        return f"the class {x.__name__}"
    for kind, noun in KINDS:
        if isinstance(x, kind):
            return f"the {noun} {type(x).__name__}"
    if isinstance(x, Tensor) or is_array(x):
        return f"the {'tensor ' if isinstance(x, Tensor) else ''}{describe(x)}"
    if any(isinstance(part, Tensor) or is_array(part) for _, part in parts(x)):
        return f"{describe(x):.80}"
    text = " ".join(repr(x).split())
    if " at 0x" in text:
        return f"the {type(x).__name__} {getattr(x, '__name__', '')}".rstrip()
    return f"{text:.80}"


def concat(items: list[Any]) -> Any:
    """Joins the results of several batches into one; tensors are concatenated along their first dimension.

    0-d tensors are stacked, mappings and tuples joined item by item, anything else is put in a list.

    Raises:
        ValueError: If tensors differ in the other dimensions.
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
    if isinstance(first, list) and not any(isinstance(x, (Tensor, tuple, list, Mapping)) for x in first):
        return [x for item in items for x in item]  # such as one string per sample
    if isinstance(first, (tuple, list)):
        return _like(first, [concat(list(parts)) for parts in zip(*items, strict=True)])
    return items


def _like(kind: Any, items: Any) -> Any:
    """Converts `items` to the type of `kind`, or to a plain tuple, list or dict if that fails."""
    plain = dict if isinstance(kind, Mapping) else tuple if isinstance(kind, tuple) else list
    if type(kind) is plain or (isinstance(kind, PackedSequence) and not isinstance(items[0], Tensor)):
        return plain(items)
    try:
        return type(kind)(*items) if hasattr(kind, "_fields") else type(kind)(items)
    except Exception:  # an error of a user's class must not surface in the user's forward
        return plain(items)
