"""The state of random numbers and data: of the process, and of generators that loaders and datasets keep."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.torch_private import DataLoaderIter

MAX_DEPTH = 8  # levels of attributes that are looked into
NO_PARTS = (Tensor, nn.Module, ModuleType, type, str, bytes)
NOT_OF_DATA = (*NO_PARTS, DataLoaderIter)  # whose workers persist, and begin each pass anew
MOST_ITEMS = 100  # of a list that is looked into; what is longer is data


def random_state(*loaders: Any) -> dict[str, Any]:
    """What the next random numbers depend on: of Python, NumPy where it is imported, torch and its GPUs.

    Args:
        *loaders: whose generators count too, and those of what they consist of: samplers, datasets,
            transforms. A part that has `state_dict` and `load_state_dict` is asked for its state.

    Returns:
        Plain values and tensors on the CPU, for `set_random_state`.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = _of(numpy.random.mtrand._rand)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    state["loaders"] = [_of(part) for part in _stateful(loaders)]
    return state


def set_random_state(state: dict[str, Any], *loaders: Any) -> None:
    """Has the random numbers go on as they did when `random_state` gave `state` for the same loaders."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy  # which draws numbers of its own only where it is used

        _set(numpy.random.mtrand._rand, state["numpy"])
    if "cuda" in state and len(state["cuda"]) <= torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    for part, own in zip(_stateful(loaders), state["loaders"], strict=False):
        _set(part, own)


@contextmanager
def random_kept() -> Iterator[None]:
    """Has a `with` block change no random numbers: one around an import, as some packages draw in theirs.

    That is of Python, NumPy and torch's on the CPU; no device is waited for.
    """
    python, torchs = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy.random")  # if it is imported in the block, it has no state to keep
    numpys = numpy and numpy.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torchs)
        if numpy:
            numpy.set_state(numpys)


def _stateful(loaders: tuple[Any, ...]) -> list[Any]:
    """The generators, and other things with a state, that loaders consist of, each once."""
    seen: set[int] = set()
    asked = [loader for loader in loaders if not saves_itself(loader)]  # the others have all in their state
    return [part for loader in asked for part in _parts(loader, seen, MAX_DEPTH)]


def _parts(x: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if id(x) in seen or depth == 0 or x is None or isinstance(x, NO_PARTS):
        return
    seen.add(id(x))
    if isinstance(x, torch.Generator | random.Random) or _of_numpy(x) or saves_itself(x):
        yield x
        return
    for inner in _inside(x):
        yield from _parts(inner, seen, depth - 1)


def parts_of(loader: Any) -> Iterator[Any]:
    """A loader, and the objects that it consists of, each once: samplers, datasets, transforms, lists."""
    seen: set[int] = set()
    waiting = [(loader, MAX_DEPTH)]
    while waiting:
        x, depth = waiting.pop()
        if id(x) not in seen and depth and x is not None and not isinstance(x, NOT_OF_DATA):
            seen.add(id(x))
            yield x
            waiting += [(inner, depth - 1) for inner in _inside(x)]


def _inside(x: Any) -> list[Any]:
    if isinstance(x, list | tuple):
        return list(x) if len(x) <= MOST_ITEMS else []
    if isinstance(x, dict):
        return list(x.values()) if len(x) <= MOST_ITEMS else []
    if isinstance(x, partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, MethodType):
        return [x.__self__]
    if isinstance(x, FunctionType):
        return [value for cell in x.__closure__ or () for value in _content(cell)]
    return list(getattr(x, "__dict__", {}).values())


def _content(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it has none yet
        return []


def saves_itself(x: Any) -> bool:
    """Whether a part of a loader, or a loader, has a state of its own."""
    return hasattr(x, "state_dict") and hasattr(x, "load_state_dict")


def _of_numpy(x: Any) -> bool:
    """Whether it is a `Generator` of NumPy, or an older `RandomState`."""
    return type(x).__module__.startswith("numpy.random") and hasattr(_numpy_bits(x), "state")


def _numpy_bits(x: Any) -> Any:
    return getattr(x, "bit_generator", None) or getattr(x, "_bit_generator", None)


def _of(part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, random.Random):
        return part.getstate()
    if _of_numpy(part):
        older = hasattr(part, "get_state")
        return _plain(part.get_state(legacy=False) if older else part.bit_generator.state)
    return part.state_dict()


def _set(part: Any, state: Any) -> None:
    if isinstance(part, torch.Generator):
        part.set_state(state)
    elif isinstance(part, random.Random):
        part.setstate(state)
    elif not _of_numpy(part):
        part.load_state_dict(state)
    elif hasattr(part, "set_state"):
        part.set_state(state)
    else:
        part.bit_generator.state = state


def _plain(state: Any) -> Any:
    """A state of NumPy with lists for its arrays."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state
