"""State of the random number generators of the process, and of those in loaders and datasets."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.files import as_plain
from hookcb.core.torch_private import DataLoaderIter

MAX_DEPTH = 8  # levels of attributes
NO_PARTS = (Tensor, nn.Module, ModuleType, type, str, bytes)
NOT_OF_DATA = (*NO_PARTS, DataLoaderIter)  # an iterator that persists restarts at each pass
MAX_ITEMS = 100  # a longer list or dict is data, and holds no generators


def random_state(*loaders: Any) -> dict[str, Any]:
    """State of the generators of Python, NumPy if it is imported, torch, and its GPUs.

    Args:
        *loaders: loaders whose generators are included, with those of their samplers, datasets and
            transforms. A part with `state_dict` and `load_state_dict` is saved by these.

    Returns:
        Plain values and tensors on the CPU, for `set_random_state`.
    """
    state: dict[str, Any] = {"python": _of_python(random), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = _state_of(numpy.random.mtrand._rand)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    state["loaders"] = [_state_of(part) for part in _stateful(loaders)]
    return state


def set_random_state(state: dict[str, Any], *loaders: Any) -> None:
    """Restores the result of `random_state`, which was called with the same loaders."""
    random.setstate(_as_python_has_it(state["python"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        _set_state(numpy.random.mtrand._rand, state["numpy"])
    if "cuda" in state and len(state["cuda"]) <= torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    for part, saved in zip(_stateful(loaders), state["loaders"], strict=False):
        _set_state(part, saved)


def set_seed(seed: int, reproducible: bool = False) -> None:
    """Seeds the generators of Python, NumPy if it is imported, torch, and its GPUs.

    Args:
        seed: the seed.
        reproducible: whether cuDNN uses deterministic algorithms only, and does not try which is fastest;
            `torch.use_deterministic_algorithms(True)` does more.

    >>> import torch
    >>> from hookcb import set_seed
    >>> set_seed(42)
    >>> first = torch.rand(1)
    >>> set_seed(42)
    >>> torch.equal(first, torch.rand(1))
    True
    """
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)  # all that it takes
    if reproducible:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


@contextmanager
def random_kept() -> Iterator[None]:
    """Keeps the random state in a `with` block around an import, as some packages draw numbers in theirs.

    Covers Python, NumPy, and torch on the CPU; does not wait for a device.
    """
    python, torchs = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy.random")  # if only the block imports it, there is no state to keep
    numpys = numpy and numpy.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torchs)
        if numpy:
            numpy.set_state(numpys)


def _stateful(loaders: tuple[Any, ...]) -> list[Any]:
    """The generators and other stateful objects inside loaders, each once."""
    seen: set[int] = set()
    plain = [loader for loader in loaders if not saves_itself(loader)]  # the others save their parts
    return [part for loader in plain for part in _stateful_parts(loader, seen, MAX_DEPTH)]


def _stateful_parts(x: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if id(x) in seen or depth == 0 or x is None or isinstance(x, NO_PARTS):
        return
    seen.add(id(x))
    if isinstance(x, torch.Generator | random.Random) or _is_numpy_generator(x) or saves_itself(x):
        yield x
        return
    for inner in _inside(x):
        yield from _stateful_parts(inner, seen, depth - 1)


def parts_of(loader: Any) -> Iterator[Any]:
    """Yields a loader and the objects inside it, each once: samplers, datasets, transforms, lists."""
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
        return list(x) if len(x) <= MAX_ITEMS else []
    if isinstance(x, dict):
        return list(x.values()) if len(x) <= MAX_ITEMS else []
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
    except ValueError:  # it is still empty
        return []


def saves_itself(x: Any) -> bool:
    """Whether a loader, or a part of one, has `state_dict` and `load_state_dict`."""
    return hasattr(x, "state_dict") and hasattr(x, "load_state_dict")


def _is_numpy_generator(x: Any) -> bool:
    """Whether `x` is a NumPy `Generator`, or an older `RandomState`."""
    return type(x).__module__.startswith("numpy.random") and hasattr(_numpy_bits(x), "state")


def _numpy_bits(x: Any) -> Any:
    return getattr(x, "bit_generator", None) or getattr(x, "_bit_generator", None)


def _of_python(generator: Any) -> tuple[int, Tensor, float | None]:
    """State of a generator of Python, with its 625 numbers in a tensor, as lists are slow to save."""
    version, numbers, rest = generator.getstate()
    return version, torch.tensor(numbers, device="cpu"), rest


def _as_python_has_it(state: Any) -> Any:
    version, numbers, rest = state
    return version, tuple(numbers.tolist()) if isinstance(numbers, Tensor) else numbers, rest


def _of_numpy(state: Any) -> Any:
    """State of a generator of NumPy as plain values, with a tensor of the 624 numbers of MT19937."""
    if isinstance(state, dict):
        return {name: _of_numpy(x) for name, x in state.items()}
    is_long = getattr(state, "dtype", None) == "uint32"
    return torch.from_numpy(state.astype("int64")) if is_long else as_plain(state)


def _as_numpy_has_it(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _as_numpy_has_it(x) for name, x in state.items()}
    return state.tolist() if isinstance(state, Tensor) else state


def _state_of(part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, random.Random):
        return _of_python(part)
    if _is_numpy_generator(part):
        is_old = hasattr(part, "get_state")
        return _of_numpy(part.get_state(legacy=False) if is_old else part.bit_generator.state)
    return part.state_dict()


def _set_state(part: Any, state: Any) -> None:
    if isinstance(part, torch.Generator):
        part.set_state(state)
    elif isinstance(part, random.Random):
        part.setstate(_as_python_has_it(state))
    elif not _is_numpy_generator(part):
        part.load_state_dict(state)
    elif hasattr(part, "set_state"):
        part.set_state(_as_numpy_has_it(state))
    else:
        part.bit_generator.state = _as_numpy_has_it(state)
