"""Loads and Saves: calls of load_state_dict, torch.load and torch.save, heard while a program runs."""

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.heard import Ear, heard
from hookcb.diagnosis.measurements.state_dicts import (
    dicts_in,
    entry_with,
    is_optimizer,
    is_plain,
    is_scheduler,
    n_params,
    numbers,
    params,
    path_of,
    tensors,
)
from hookcb.diagnosis.run import Run

MAX_CALLS = 1_000  # that are kept
N_KNOWN = 4  # first and last tensors of a state dict, by which it is known again
Observer = Generator[None, Any, None]
Shapes = dict[str, tuple[int, ...]]
Clock = dict[int, int]  # steps that were made by each run, by the id of its `LoadClock`
RATES = [
    kind
    for kind in vars(lr_scheduler).values()
    if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
]


@dataclass(frozen=True, slots=True)
class Load:
    """One call of `load_state_dict` of a module.

    Attributes:
        about: class of the module.
        params: its parameters, by name; those that it has after the call.
        own: shapes of these.
        given: shapes of the tensors that were given.
        missing, unexpected: what the call returned, without buffers that are missing.
        nested: entry of what was given that has names of the module, as "model_state_dict"; "" if none has.
        n_same: number of tensors given that are in the memory of the parameter that they are loaded into.
        taken: the clock when `state_dict` gave these, None if that is unknown.
        clock: the clock at the call.
        file: index of the file that they come from, None if that is unknown.
        n_files: number of files with tensors that were read before.
    """

    about: str
    params: dict[str, ReferenceType[Tensor]]
    own: Shapes
    given: Shapes
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    nested: str
    n_same: int
    taken: Clock | None
    clock: Clock
    file: int | None
    n_files: int


@dataclass(frozen=True, slots=True)
class File:
    """Contents of a file that `torch.load` has read.

    Attributes:
        path: absolute path, "" if it is no path.
        n_states: number of parameters with a state of an optimizer, in each.
        groups: first group of each optimizer in it, numbers only.
        epoch: largest `last_epoch` of the schedulers in it; -1 if there is none.
        n_optimizers, n_schedulers: number of loads of each that were heard before.
    """

    path: str
    n_states: tuple[int, ...]
    groups: tuple[dict[str, float], ...]
    epoch: int
    n_optimizers: int
    n_schedulers: int


@dataclass(frozen=True, slots=True)
class Dict:
    """Tensors of one dict in a file that is saved.

    Attributes:
        key: its key, "" if it is the whole.
        shapes: shapes of its tensors, by their names.
        memory: addresses of these.
        taken: the clock when `state_dict` gave these, None if that is unknown.
    """

    key: str
    shapes: Shapes
    memory: frozenset[int]
    taken: Clock | None


@dataclass(frozen=True, slots=True)
class Save:
    """Contents of a file that `torch.save` has written.

    Attributes:
        path: absolute path, "" if it is no path.
        dicts: dicts with tensors in it, other than the states of optimizers.
        optimizers: for each optimizer in it the number of its parameters.
        is_opaque: whether it has objects that are not read, such as a module.
        clock: the clock at the call.
    """

    path: str
    dicts: tuple[Dict, ...]
    optimizers: tuple[int, ...]
    is_opaque: bool
    clock: Clock


class Loads(Ear):
    """Loads into modules, optimizers and schedulers, and files that were read.

    A copy by hand, `p.copy_(state["w"])`, cannot be heard.

    Attributes:
        loads, files: in the order of the calls.
        clock: steps that each run has made, see `LoadClock`.
        n_optimizers, n_schedulers: loads of these.
    """

    calls = (
        (nn.Module, "load_state_dict", "observe_load"),
        (nn.Module, "state_dict", "observe_state"),
        (Optimizer, "load_state_dict", "observe_optimizer"),
        (torch, "load", "observe_file"),
        (lr_scheduler.LRScheduler, "__init__", "observe_scheduler"),
        *((kind, "load_state_dict", "observe_rate") for kind in RATES if "load_state_dict" in vars(kind)),
    )
    options = {"nested": False, "all_threads": True}  # noqa: RUF012  # as in its base

    def __init__(self) -> None:
        self.loads: list[Load] = []
        self.files: list[File] = []
        self.clock: Clock = {}
        self.n_optimizers = self.n_schedulers = 0
        self.schedulers: list[ReferenceType[Any]] = []
        self._loaded: dict[int, ReferenceType[Tensor]] = {}
        self._taken: dict[int, tuple[ReferenceType[Tensor], Clock]] = {}  # tensors of state dicts, by id
        self._read: dict[int, tuple[ReferenceType[Tensor], int]] = {}  # tensors of files, with their index

    def was_loaded(self, param: nn.Parameter) -> bool:
        """Whether `load_state_dict` has given values to a parameter, also by `assign=True`."""
        found = self._loaded.get(id(param))
        return found is not None and found() is param

    def taken_at(self, x: Tensor) -> Clock | None:
        """The clock when `state_dict` gave this very tensor, which is in the memory of the parameter."""
        found = self._taken.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def observe_load(self, m: nn.Module, /, state_dict: Any = (), *args: Any, **kwargs: Any) -> Observer:
        given = tensors(state_dict) if isinstance(state_dict, dict) else {}
        before = {name: p.data_ptr() for name, p in params(m) if is_plain(p)}
        n_same = sum(before.get(name, 0) == x.data_ptr() != 0 for name, x in given.items() if is_plain(x))
        sources = [read[1] for x in given.values() if (read := self._read.get(id(x))) and read[0]() is x]
        taken = next((clock for x in given.values() if (clock := self.taken_at(x)) is not None), None)
        result = yield
        if not hasattr(result, "missing_keys") or len(self.loads) >= MAX_CALLS:
            return
        own, shapes = dict(params(m)), {name: tuple(x.shape) for name, x in given.items()}
        missing = tuple(name for name in result.missing_keys if name in own)
        for name in own.keys() - set(missing):
            self._loaded[id(own[name])] = ref(own[name])
        if not isinstance(state_dict, dict):
            return  # a mapping that may read a file
        self.loads.append(
            Load(
                type(m).__name__,
                {name: ref(p) for name, p in own.items()},
                {name: tuple(p.shape) for name, p in own.items()},
                shapes,
                missing,
                tuple(result.unexpected_keys),
                entry_with(state_dict, own),
                n_same,
                taken,
                dict(self.clock),
                Counter(sources).most_common(1)[0][0] if sources else None,
                len(self.files),
            )
        )

    def observe_state(self, m: nn.Module, /, *args: Any, **kwargs: Any) -> Observer:
        state = yield
        found = list(tensors(state).values()) if isinstance(state, dict) else []
        if any(isinstance(x, nn.Parameter) for x in found):
            return  # by keep_vars=True: these are the same in each call
        if len(self._taken) >= MAX_CALLS:
            self._taken = {key: value for key, value in self._taken.items() if value[0]() is not None}
        now = dict(self.clock)
        self._taken |= {id(x): (ref(x), now) for x in (*found[:N_KNOWN], *found[-N_KNOWN:])}

    def observe_optimizer(self, opt: Optimizer, /, *args: Any, **kwargs: Any) -> Observer:
        yield
        self.n_optimizers += 1

    def observe_rate(self, scheduler: Any, /, *args: Any, **kwargs: Any) -> Observer:
        yield
        self.n_schedulers += 1

    def observe_scheduler(self, scheduler: Any, /, *args: Any, **kwargs: Any) -> Observer:
        yield
        self.schedulers = [x for x in self.schedulers if x() is not None] + [ref(scheduler)]

    def observe_file(self, f: Any = None, /, *args: Any, **kwargs: Any) -> Observer:
        read = yield
        found = [(key, state) for key, state, _ in dicts_in(read)]
        opts = [state for _, state in found if is_optimizer(state)]
        epochs = [state["last_epoch"] for _, state in found if is_scheduler(state)]
        values = [x for _, state in found for x in tensors(state).values()]
        if not values or len(self.files) >= MAX_CALLS:
            return
        self._read = {key: value for key, value in self._read.items() if value[0]() is not None}
        self._read |= {id(x): (ref(x), len(self.files)) for x in values}
        self.files.append(
            File(
                path_of(f),
                tuple(len(state["state"]) for state in opts),
                tuple(numbers(state["param_groups"]) for state in opts),
                max((x for x in epochs if isinstance(x, int)), default=-1),
                self.n_optimizers,
                self.n_schedulers,
            )
        )


class Saves(Ear):
    """Files that `torch.save` has written: dicts of tensors in them; other objects are not read."""

    calls = ((torch, "save", "observe_save"),)
    options = {"nested": False, "all_threads": True}  # noqa: RUF012  # as in its base

    def __init__(self) -> None:
        self.saves: list[Save] = []

    def observe_save(self, obj: Any = None, f: Any = None, *args: Any, **kwargs: Any) -> Observer:
        loads, found = heard(Loads), list(dicts_in(obj))
        dicts = [_dict_of(key, tensors(state), loads) for key, state, _ in found if not is_optimizer(state)]
        counts = [n_params(state["param_groups"]) for _, state, _ in found if is_optimizer(state)]
        is_opaque = not found or any(is_opaque for *_, is_opaque in found)
        yield
        kept = tuple(x for x in dicts if x.shapes)
        if kept and len(self.saves) < MAX_CALLS:
            path = path_of(kwargs.get("f", f))
            self.saves.append(Save(path, kept, tuple(counts), is_opaque, dict(loads.clock)))


class LoadClock(Measurement):
    """Tells the ears how many steps were made, so that they know when something was saved or loaded."""

    cadence = EVERY
    hears = (Loads, Saves)

    def __init__(self) -> None:
        self._ear: Loads | None = None
        self.has_heard_start = False

    def on_model(self, run: Run) -> None:
        self._ear = heard(Loads)
        self._ear.clock[id(self)] = 0
        self.has_heard_start = self._ear.from_start

    def on_between(self, run: Run) -> None:
        if self._ear is not None:
            self._ear.clock[id(self)] = run.n_steps

    def steps(self, clock: Clock) -> int:
        """Steps of this training at a call."""
        return clock.get(id(self), 0)

    def close(self, run: Run) -> None:
        if self._ear is not None:
            self._ear.clock.pop(id(self), None)

    def freeze(self) -> None:
        self._ear = None


def _dict_of(key: str, named: dict[str, Tensor], loads: Loads) -> Dict:
    taken = next((clock for x in named.values() if (clock := loads.taken_at(x)) is not None), None)
    memory = frozenset(x.data_ptr() for x in named.values() if is_plain(x) and x.numel())
    return Dict(key, {name: tuple(x.shape) for name, x in named.items()}, memory, taken)
