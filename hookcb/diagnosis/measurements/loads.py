"""Loads and Saves: calls of load_state_dict, torch.load and torch.save, heard while a program runs."""

import sys
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from hookcb.core.call_hook import CallHook
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.heard import Ear, heard
from hookcb.diagnosis.measurements.parameters import Parameters
from hookcb.diagnosis.measurements.state_dicts import (
    dicts_in,
    entry_with,
    is_initial,
    is_optimizer,
    is_plain,
    is_scheduler,
    n_params,
    numbers,
    params,
    path_of,
    statistics,
    tensors,
)
from hookcb.diagnosis.run import Run
from hookcb.gradients.samples import are_same, sketch_copies, sketch_copy

MAX_CALLS = 1_000  # that are kept
N_KNOWN = 4  # first and last tensors of a state dict, by which it is known again
MIN_STEPS = 20  # after which all weights of a training have changed
# functions of safetensors.torch that each save calls, in this order of preference
OF_SAFETENSORS = "_evaluate_tensors_for_save", "_flatten"
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
        is_assigned: whether the tensors given have become the parameters, by `assign=True`.
        statistics: running statistics of its batch norms that are missing, and are 0 and 1 as initialized.
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
    is_assigned: bool = False
    statistics: dict[str, ReferenceType[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class File:
    """Contents of a file that `torch.load` has read.

    Attributes:
        path: absolute path, "" if it is no path.
        n_states: number of parameters with a state of an optimizer, in each.
        groups: first group of each optimizer in it, numbers only.
        rates: numbers of each scheduler in it, such as `last_epoch` and `T_max`.
        n_optimizers, n_schedulers: number of loads of each that were heard before.
    """

    path: str
    n_states: tuple[int, ...]
    groups: tuple[dict[str, float], ...]
    rates: tuple[dict[str, float], ...]
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
    """Contents of a file that `torch.save` or safetensors has written.

    Attributes:
        path: absolute path, "" if it is no path, or of safetensors.
        dicts: dicts with tensors in it, other than the states of optimizers.
        optimizers: for each optimizer in it the number of its parameters.
        is_opaque: whether it has objects that are not read, such as a module.
        begun: ids of the `LoadClock` of runs whose weights are in it as they were before their first step.
        clock: the clock at the call.
    """

    path: str
    dicts: tuple[Dict, ...]
    optimizers: tuple[int, ...]
    is_opaque: bool
    begun: tuple[int, ...]
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

    def was_loaded(self, param: Tensor) -> bool:
        """Whether `load_state_dict` has given values to a parameter, or statistic, also by `assign=True`.

        False for those that were given the parameter's own memory, which changes nothing.
        """
        found = self._loaded.get(id(param))
        return found is not None and found() is param

    def taken_at(self, x: Tensor) -> Clock | None:
        """The clock when `state_dict` gave this very tensor, which is in the memory of the parameter."""
        found = self._taken.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def observe_load(self, m: nn.Module, /, state_dict: Any = (), *args: Any, **kwargs: Any) -> Observer:
        given = tensors(state_dict) if isinstance(state_dict, dict) else {}
        before = {name: p.data_ptr() for name, p in params(m) if is_plain(p)}
        same = {name for name, x in given.items() if is_plain(x) and before.get(name, 0) == x.data_ptr() != 0}
        sources = [read[1] for x in given.values() if (read := self._read.get(id(x))) and read[0]() is x]
        taken = next((clock for x in given.values() if (clock := self.taken_at(x)) is not None), None)
        result = yield
        if not hasattr(result, "missing_keys"):
            return
        own, running = dict(params(m)), statistics(m)
        lacking = set(result.missing_keys)
        self._loaded |= {id(x): ref(x) for name, x in running.items() if name not in lacking}
        shapes = {name: tuple(x.shape) for name, x in given.items()}
        missing = tuple(name for name in result.missing_keys if name in own)
        for name in own.keys() - set(missing) - same:
            self._loaded[id(own[name])] = ref(own[name])
        if not isinstance(state_dict, dict) or len(self.loads) >= MAX_CALLS:
            return  # other mappings may read a file
        self.loads.append(
            Load(
                type(m).__name__,
                {name: ref(p) for name, p in own.items()},
                {name: tuple(p.shape) for name, p in own.items()},
                shapes,
                missing,
                tuple(result.unexpected_keys),
                entry_with(state_dict, own),
                len(same),
                taken,
                dict(self.clock),
                Counter(sources).most_common(1)[0][0] if sources else None,
                len(self.files),
                bool(args[1] if len(args) > 1 else kwargs.get("assign")),
                {name: ref(x) for name, x in running.items() if name in lacking and is_initial(name, x)},
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

    def observe_file(self, f: Any = None, *args: Any, **kwargs: Any) -> Observer:
        read = yield
        found = [(key, state) for key, state, _ in dicts_in(read)]
        opts = [state for _, state in found if is_optimizer(state)]
        values = [x for _, state in found for x in tensors(state).values()]
        if not values or len(self.files) >= MAX_CALLS:
            return
        self._read = {key: value for key, value in self._read.items() if value[0]() is not None}
        self._read |= {id(x): (ref(x), len(self.files)) for x in values}
        self.files.append(
            File(
                path_of(f),
                tuple(len(state["state"]) for state in opts),
                tuple(numbers(state["param_groups"][0]) for state in opts if state["param_groups"]),
                tuple(numbers(state) for _, state in found if is_scheduler(state)),
                self.n_optimizers,
                self.n_schedulers,
            )
        )


class Saves(Ear):
    """Files of `torch.save` and of safetensors: dicts of tensors in them; other objects are not read.

    Attributes:
        saves: in the order of the calls.
        clocks: `LoadClock.is_as_begun` of each run.
        misses_safe: whether safetensors is there, and what it saves is not heard.
    """

    calls = ((torch, "save", "observe_save"), (nn.Module, "state_dict", "observe_state"))
    options = {"nested": False, "all_threads": True}  # noqa: RUF012  # as in its base

    def __init__(self) -> None:
        self.saves: list[Save] = []
        self.clocks: list[WeakMethod[Any]] = []
        self._hooks: list[CallHook] = []  # gone with this object

    @property
    def misses_safe(self) -> bool:
        self.hear_safetensors()
        return "safetensors" in sys.modules and not self._hooks

    def hear_safetensors(self) -> None:
        """Hears what safetensors saves, if the program has imported it."""
        library = sys.modules.get("safetensors.torch")
        if library is not None and not self._hooks:  # a program may have bound save_file, so what that calls
            name = next((x for x in OF_SAFETENSORS if hasattr(library, x)), "")
            if name:
                hook = CallHook(library, name, self.observe_safe, self.failed, **self.options)
                self._hooks.append(hook)

    def observe_state(self, m: nn.Module, /, *args: Any, **kwargs: Any) -> Observer:
        self.hear_safetensors()
        yield

    def observe_safe(self, tensors: Any = None, *args: Any, **kwargs: Any) -> Observer:
        yield from self.observe_save(tensors)

    def observe_save(self, obj: Any = None, f: Any = None, *args: Any, **kwargs: Any) -> Observer:
        self.hear_safetensors()
        loads, found = heard(Loads), list(dicts_in(obj))
        dicts = [_dict_of(key, tensors(state), loads) for key, state, _ in found if not is_optimizer(state)]
        counts = [n_params(state["param_groups"]) for _, state, _ in found if is_optimizer(state)]
        is_opaque = not found or any(is_opaque for *_, is_opaque in found)
        asked = [is_as_begun for clock in self.clocks if (is_as_begun := clock()) is not None]
        begun = [
            is_as_begun.__self__.key
            for is_as_begun in asked
            if any(is_as_begun(tensors(state)) for _, state, _ in found if not is_optimizer(state))
        ]
        yield
        kept = tuple(x for x in dicts if x.shapes)
        if kept and len(self.saves) < MAX_CALLS:
            path = path_of(kwargs.get("f", f))
            self.saves.append(Save(path, kept, tuple(counts), is_opaque, tuple(begun), dict(loads.clock)))


class LoadClock(Measurement):
    """Tells the ears how many steps were made, so that they know when something was saved or loaded."""

    cadence = EVERY
    hears = (Loads, Saves)
    uses = (Parameters,)

    def __init__(self) -> None:
        self.key = id(self)
        self.has_heard_start = False
        self._ear: Loads | None = None
        self._model: ReferenceType[nn.Module] | None = None
        self._begins: dict[str, tuple[nn.Parameter, Tensor]] = {}

    def on_model(self, run: Run) -> None:
        self._ear, self._model = heard(Loads), ref(run.loop.model)
        self._ear.clock[self.key] = 0
        self.has_heard_start = self._ear.from_start
        self._begins = run.measured(Parameters).begins
        heard(Saves).clocks.append(WeakMethod(self.is_as_begun))
        heard(Saves).hear_safetensors()

    def on_between(self, run: Run) -> None:
        if self._ear is not None:
            self._ear.clock[self.key] = run.n_steps

    def steps(self, clock: Clock) -> int:
        """Steps of this training at a call."""
        return clock.get(self.key, 0)

    def params(self) -> dict[str, nn.Parameter]:
        """Parameters of the model, by name; none if it is gone."""
        model = self._model() if self._model is not None else None
        return {} if model is None else dict(model.named_parameters())

    def loads(self) -> list[Load]:
        """Loads that have filled parameters of the model."""
        own = set(map(id, self.params().values()))
        return [load for load in heard(Loads).loads if any(id(x()) in own for x in load.params.values())]

    def statistics(self) -> dict[str, Tensor]:
        """Running statistics of the model's batch norms, by name; none if it is gone."""
        model = self._model() if self._model is not None else None
        return {} if model is None else statistics(model)

    def is_as_begun(self, named: dict[str, Tensor]) -> bool:
        """Whether tensors are a copy of the weights before the first step, which have all changed since."""
        if self._ear is None or self.steps(self._ear.clock) < MIN_STEPS:
            return False
        pairs = [(p, x, named[name]) for name, (p, x) in self._begins.items() if name in named]
        trained = [(p, x, y) for p, x, y in pairs if p.requires_grad and p.ndim > 1 and p.shape == y.shape]
        n_all = sum(p.requires_grad and p.ndim > 1 for p, _ in self._begins.values())
        is_like = all(is_plain(y) and y.dtype == p.dtype for p, _, y in trained)
        if not (len(trained) == n_all > 0 and is_like and is_same(*trained[0][1:])):
            return False
        params, began, given = zip(*trained, strict=True)
        return all(are_same(sketch_copies(given), began)) and not any(are_same(sketch_copies(params), began))

    def close(self, run: Run) -> None:
        if self._ear is not None:
            self._ear.clock.pop(self.key, None)

    def freeze(self) -> None:
        self._ear, self._model, self._begins = None, None, {}


def is_same(sample: Tensor, x: Tensor) -> bool:
    """Whether a tensor has the elements of a sample of `sketch_copy`; waits for the device."""
    mine = sketch_copy(x)
    return sample.shape == mine.shape and torch.equal(sample.to(mine.device), mine)


def _dict_of(key: str, named: dict[str, Tensor], loads: Loads) -> Dict:
    taken = next((clock for x in named.values() if (clock := loads.taken_at(x)) is not None), None)
    memory = frozenset(x.data_ptr() for x in named.values() if is_plain(x) and x.numel())
    return Dict(key, {name: tuple(x.shape) for name, x in named.items()}, memory, taken)
