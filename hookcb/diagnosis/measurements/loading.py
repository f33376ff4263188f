"""Loading: DataLoaders that a program iterates over, and the random generators that their datasets hold."""

import random
import zlib
from collections.abc import Generator, Iterator
from dis import get_instructions
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hookcb.core.randomness import parts_of
from hookcb.diagnosis.heard import Ear
from hookcb.diagnosis.measurements.drawing import Workers, WorkerStates

# names in code that may do something else in each worker
OF_WORKERS = frozenset(
    {"get_worker_info", "worker_info", "worker", "initial_seed", "seed", "manual_seed", "default_rng"}
)
KNOWN = frozenset({"torch", "numpy", "random", "os", "time"})  # libraries that know of no dataset of a user


class Pass(NamedTuple):
    """One pass over a DataLoader, as it began.

    Attributes:
        n_workers: number of its worker processes.
        is_kept: whether workers stay for the next pass.
        has_init: whether it has a `worker_init_fn`.
        may_reseed: whether that may set the generators of the dataset, see `_may_reseed`.
        is_unsharded: whether the dataset is an IterableDataset that never asks which worker it is in.
        held: name and state of each generator that the dataset holds and uses.
        shuffles: whether a sampler of torch draws the order of the samples.
        n_batches: number of batches that the loader has, 0 if unknown.
        states: random states of its workers, None if it has none.
    """

    n_workers: int
    is_kept: bool
    has_init: bool
    may_reseed: bool
    is_unsharded: bool
    held: tuple[tuple[str, int], ...]
    shuffles: bool
    n_batches: int
    states: WorkerStates | None


class Loading(Ear):
    """Observes each pass over a DataLoader, and keeps none of its objects.

    Attributes:
        last: the pass that began last, None if there was none.
        n: number of passes.
    """

    calls = ((DataLoader, "__iter__", "iterates"),)

    def __init__(self) -> None:
        self.last: Pass | None = None
        self.n = 0

    def iterates(self, loader: Any) -> Generator[None, Any, None]:
        """Observes the beginning of a pass, and lets the workers that it forks tell their random states."""
        self.last, self.n = None, self.n + 1
        self.last = pass_of(loader)
        Workers.states = self.last.states
        try:
            yield
        finally:
            Workers.states = None


def pass_of(loader: Any) -> Pass:
    """State of a loader and of its generators at the beginning of a pass."""
    kind = type(loader.dataset)
    is_unsharded = isinstance(loader.dataset, IterableDataset) and not _asks_for_worker(kind)
    n, held = loader.num_workers, [*_held_by(loader.dataset), *_held_by(loader.collate_fn)]
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    shuffles = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    return Pass(
        n,
        loader.persistent_workers,
        loader.worker_init_fn is not None,
        _may_reseed(loader.worker_init_fn),
        is_unsharded,
        tuple(held),
        shuffles or (isinstance(sampler, DistributedSampler) and sampler.shuffle),
        _length_of(loader),
        WorkerStates(n) if n else None,
    )


def _length_of(loader: Any) -> int:
    try:  # not that of the loader, which torch notes if it has a stream
        return len(loader.batch_sampler or loader.sampler)
    except (TypeError, NotImplementedError):
        return 0


def _held_by(owner: Any) -> Iterator[tuple[str, int]]:
    """Generators in the attributes of an object, and of its parts, that one of its methods uses.

    None of a class whose methods may tell workers apart.
    """
    for part in parts_of(owner):
        attributes = getattr(part, "__dict__", {})
        found = {name: state for name, x in attributes.items() if (state := _state_of(x)) is not None}
        used = _names_in_methods(type(part)) if found else set()
        for name, state in found.items():
            if name in used and used.isdisjoint(OF_WORKERS):
                yield f"{type(part).__name__}.{name}", state


def _state_of(x: Any) -> int | None:
    """Hash of the state of a random generator; None for other objects."""
    if isinstance(x, torch.Generator):
        return zlib.crc32(x.get_state().numpy().tobytes())
    if isinstance(x, random.Random):
        return hash(x.getstate())
    if type(x).__module__.startswith("numpy.random"):
        bits = getattr(x, "bit_generator", None) or getattr(x, "_bit_generator", None)
        state = getattr(bits, "state", None)
        return None if state is None else zlib.crc32(repr(_plain(state)).encode())
    return None


def _plain(x: Any) -> Any:
    """Replaces arrays by their bytes, because their repr is shortened."""
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    return x.tobytes() if hasattr(x, "tobytes") else x


def _names_in_methods(kind: type) -> set[str]:
    """Names used in the methods of a class, without those that make or copy an object."""
    names: set[str] = set()
    for name in dir(kind):
        for base in kind.__mro__ if name not in ("__init__", "__setstate__", "__getstate__") else ():
            if isinstance(method := vars(base).get(name), FunctionType):
                found = _names_in(method.__code__)
                names |= found
                if "super" not in found:
                    break  # it replaces those of the bases
    return names


def _names_in(code: CodeType) -> set[str]:
    inner = [_names_in(x) for x in code.co_consts if isinstance(x, CodeType)]
    return set(code.co_names).union(*inner)


def _may_reseed(init: Any) -> bool:
    """Whether a `worker_init_fn` may reach the dataset.

    False only if it is a plain function without closure, defaults and imports, that uses no global objects
    but what `KNOWN` libraries have, numbers, strings and other such functions.
    """
    todo, seen = [] if init is None else [init], set[CodeType]()
    while todo:
        f = todo.pop()
        if not isinstance(f, FunctionType) or f.__closure__ or f.__defaults__ or f.__kwdefaults__:
            return True
        names = _names_in(f.__code__)
        imports = any(x.opname == "IMPORT_NAME" for x in get_instructions(f.__code__))
        if imports or not names.isdisjoint({"dataset", "get_worker_info", "worker_info"}):
            return True
        own = [f.__globals__[name] for name in names if name in f.__globals__]
        others = [x for x in own if not isinstance(x, int | float | str) and _library_of(x) not in KNOWN]
        todo += [x for x in others if getattr(x, "__code__", None) not in seen]
        seen.add(f.__code__)
    return False


def _library_of(x: Any) -> str:
    """Library of a module, class or function; "" for other objects."""
    name = x.__name__ if isinstance(x, ModuleType) else None
    if isinstance(x, type | FunctionType | BuiltinFunctionType):
        name = x.__module__
    return name.partition(".")[0] if isinstance(name, str) else ""


def _asks_for_worker(kind: type) -> bool:
    """Whether the code of a dataset may depend on its worker; True if that is unknown."""
    is_plain = IterableDataset in kind.__bases__ and isinstance(vars(kind).get("__iter__"), FunctionType)
    return not is_plain or not _names_in_methods(kind).isdisjoint(OF_WORKERS)
