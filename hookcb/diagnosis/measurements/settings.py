"""Settings: what a program changes while it trains: numbers of optimizers and layers, clipping, the loss."""

import math
from collections import Counter, deque
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.text import as_layer, join_names
from hookcb.core.torch_private import buffers_of, children_of, input_dtype, parameters_of, version_of
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.attributes import plain_objects
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.gradient_writes import GradientWrites
from hookcb.diagnosis.measurements.group_rates import JUMP
from hookcb.diagnosis.measurements.loss_terms import factor_of, factor_of_mean
from hookcb.diagnosis.measurements.restores import Restores, numbers_of
from hookcb.diagnosis.measurements.step_scales import StepScales
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules
from hookcb.hooks.params import named_params

N_CHANGES, MAX_GROUPS = 16, 8  # changes that are kept; groups of an optimizer that are followed
MIN_SPAN, MIN_STAY = 32, 8  # steps with one value before a change, and with the new one
MIN_SEEN, MIN_SEEN_GRAPH = 12, 6  # looks with one value, of what is looked at in some batches only
MAX_NODES, MAX_GRAPH = 24, 2_000  # nodes of the graph of the loss, and of that of the model
MIN_NOTED, EASY_GRAPH = 3, 100  # noted batches between looks at the graph; one more for so many operations
NUMBERS = {bool, int, float}
SINGLE = {*NUMBERS, str, torch.dtype}
PLAIN = {*SINGLE, tuple, type(None)}
LEFT_OUT = {"lr", "initial_lr", "training"}  # which have records of their own
SAVED = {"exponent": None, "reduction": None, "alpha": 1}  # of operations of the loss, and what is usual
BACKWARDS, CLIPPED, OPERATIONS = "backwards per step", "parameters that are clipped", "operations"
LIMIT, GRAPH = "limit of clip_grad_norm_", "autograd graph"  # inf without any; of the model
SHAPE, PARTS, PARAMS, MODULES = "shape", "tensors", "names of parameters", "modules"
FACTOR, FACTORS = "the factor", "numbers that scale parts"  # of a mean, and of the rest of the loss
GRADIENT, CLEARED, TURN = (
    "gradient",
    "gradients",
    128,
)  # steps in which changes of other gradients are the same one
BUFFER, DTYPE, OPTIMIZER = "buffer ", "dtype of ", "optimizer"  # the first two before the name of a buffer
LOADED, RATES = -2, ("lr", "initial_lr")  # stands for the batch before a first step after a state was loaded
OF_STEP = BACKWARDS, CLIPPED, LIMIT, FACTOR, CLEARED
MAX_OBJECTS = 64  # of the user's, in attributes of layers
PARAM = "="  # before the name of a parameter in a graph


class Change(NamedTuple):
    """Something that had stayed the same and was then changed.

    Attributes:
        step: number of the first batch with the new value, as far as was seen.
        last: that of the last batch in which the old one was seen; -2 if it was in a state that was loaded.
        name: of the setting.
        before, after: its values.
        of: what has it, as text.
        layer: name of the layer that has it, None if it is of none.
    """

    step: int
    last: int
    name: str
    before: Any
    after: Any
    of: str = "the optimizer"
    layer: str | None = None

    @property
    def text(self) -> str:
        """Words on what has changed, how and when, without a verb."""
        if self.last == LOADED:
            values = f"{_shown(self.before)} in the state that was loaded and {_shown(self.after)}"
            return f"{self.name} of {self.of}, {values} in its first step, {self.step:,}"
        when = when_of(self.last, self.step)
        if self.name == OPTIMIZER:
            return f"the optimizer, from {self.before[0]} to another {self.after[0]} {when}"
        if self.name == GRADIENT:
            way = "is written to" if self.after else "is no longer written to"
            return f"the gradient of {self.of} {way} between backward and step, first seen {when}"
        if self.name == CLEARED:
            way = "cleared" if self.after else "no longer cleared"
            return f"gradients are {way} before each backward, from step {self.step:,} on"
        if self.name.startswith(BUFFER):
            return f"{self.name} of {self.of}, which was written to {when}"
        how = f"from {_shown(self.before)} to {_shown(self.after)}"
        if self.name in (OPERATIONS, PARTS, MODULES):
            how = _difference(self.before, self.after)
        if self.name == GRAPH:
            place = f", near {as_layer(self.layer)}" if self.layer else ""
            how = f"{_difference(self.before, self.after)}{place},"
        return f"{self.name} of {self.of}, {how} {when}"


def _difference(before: Sequence[str], after: Sequence[str]) -> str:
    """Words on names that were added and removed: those of parameters, or else of operations."""
    old, new = Counter(before), Counter(after)
    said = []
    for way, names in (("now with", new - old), ("without", old - new)):
        found = [x[1:] for x in names if x[0] == PARAM] or [*names]
        said += [f"{way} {join_names(found, 4)}"] * bool(found)
    return ", ".join(said) or "in another order"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "none"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return str(value).removeprefix("torch.")


def when_of(last: int, step: int) -> str:
    """Words on a change between two steps that were looked at, of which `last` is the one before it."""
    return f"between steps {last:,} and {step:,}" if step > last + 1 else f"at step {step:,}"


class _Known:
    """Values of settings, and the first and last step in which they were all so.

    Args:
        values: those of the first step.
        step: that step.
        min_seen: number of looks with one value before a change, and of a third as many after it, if not all
            steps are looked at: values that alternate may be the same in some looks by chance.
    """

    __slots__ = ("_before", "_min_seen", "_n_seen", "_new", "last", "since", "values")

    def __init__(self, values: dict[str, Any], step: int, min_seen: int = 1) -> None:
        self.values, self.since, self.last = values, step, step
        self._min_seen, self._n_seen = min_seen, 1
        self._new: list[Change] = []  # not told yet, as the old values may come back
        self._before = values, step

    @property
    def is_new(self) -> bool:
        """Whether a change waits to be told."""
        return bool(self._new)

    def changed(self, values: dict[str, Any], step: int) -> list[Change]:
        """Takes the values of a step; returns what has left a value that had stayed, and not come back."""
        if not PLAIN.issuperset(map(type, values.values())):
            return []  # a tensor, which cannot be compared at no cost
        if self._new:
            return self._left(values, step)
        if values == self.values:
            self.last, self._n_seen = step, self._n_seen + 1
            return []
        is_long = self.last - self.since >= MIN_SPAN and self._n_seen >= self._min_seen
        old, self._n_seen = self.values, 1
        names = [name for name in values if is_long and values[name] != old.get(name)]
        self._new = [Change(step, self.last, name, old.get(name), values[name]) for name in names]
        self._before, self.values, self.since, self.last = (old, self.since), values, step, step
        return []

    def _left(self, values: dict[str, Any], step: int) -> list[Change]:
        """Takes values after a change that is not told yet; they may be others by now, as of a schedule."""
        if values == self._before[0]:
            (self.values, self.since), self.last, self._new = self._before, step, []
            self._n_seen = 1
            return []
        if values != self.values:
            self.values, self.since = values, step
        self.last, self._n_seen = step, self._n_seen + 1
        if step - self._new[0].step < MIN_STAY or self._n_seen <= self._min_seen // 3:
            return []
        new, self._new = self._new, []
        return [x._replace(after=values.get(x.name)) for x in new if values.get(x.name) != x.before]


def _changed(known: list[_Known], values: dict[str, Any], step: int, min_seen: int = 1) -> list[Change]:
    """Takes values of a step, each of which is followed by itself; returns what has changed."""
    if not known:
        known += [_Known({name: x}, step, min_seen) for name, x in values.items()]
    pairs = zip(known, values.items(), strict=True)
    return [change for own, (name, x) in pairs for change in own.changed({name: x}, step)]


class _Holds(NamedTuple):
    """Buffers, parameters and modules of a layer, in the mappings that it has them in."""

    buffers: Mapping[str, Tensor | None] = {}
    params: Mapping[str, Tensor | None] = {}
    modules: Mapping[str, nn.Module | None] = {}


class _Followed(NamedTuple):
    """A layer, or an object in an attribute of one, and which of its attributes and buffers are followed."""

    name: str
    layer: str
    attributes: dict[str, Any]
    key: str  # of the object among these; "" for the layer itself
    holds: _Holds
    numbers: tuple[str, ...]
    known: list[_Known]


class Settings(Measurement):
    """Follows settings: of up to eight groups of each optimizer, in each step, of layers, and of the loss.

    Those of a layer are its attributes that are numbers, such as `p`, `eps` and `momentum`, strings or
    dtypes, without private ones, the dtypes of its buffers, and writes to these: of all layers in inspected
    batches, and of one in each other batch, in turn. Of the inputs, their names, their dtypes, and the shape
    of the first. Of the loss, its operations next to it and numbers that scale its parts, in batches of
    `Run.noting`, and the graph behind them, in inspected batches, up to 2,000 operations and the parameters
    that it reaches; and the number that a mean is multiplied by, in each batch. Of each step, its optimizer,
    the number of backwards before it, of parameters that torch's clipping was given, and its limit; and of
    one parameter in each, in turn, whether something writes to its gradient between backward and step. What
    changes often, as by a schedule, or changes back at once, was not changed by a program once.

    Attributes:
        changes: the last 16, where nothing of the group, layer or loss had changed for 32 steps before, and
            it has not come back in eight afterwards.
    """

    cadence = EVERY
    uses = (Curves, StepScales)
    hears = (Restores,)

    def __init__(self) -> None:
        self.changes = deque[Change](maxlen=N_CHANGES)
        self._of_layers: list[_Followed] = []
        self._of_groups: MutableMapping[Optimizer, list[_Known]] = WeakKeyDictionary()
        self._of_opt: list[_Known] = []
        # by id of the optimizer: what is followed of its steps, and the newest values if none is new
        self._of_steps: dict[int, tuple[list[_Known], tuple[Any, ...] | None]] = {}
        self._of_loss: list[_Known] = []
        self._of_inputs: list[_Known] = []
        self._input: tuple[Any, ...] | None = None  # shape and dtype of the only one, if none is new
        self._of_graph: _Known | None = None
        self._n_until_graph = 0  # noted batches
        self._names: dict[int, str] = {}  # of parameters, by id
        self._n_backward = 0
        self._factor = 1.0  # of the newest mean
        self._writes = GradientWrites({})
        self._of_grads: dict[str, _Known] = {}

    def on_model(self, run: Run) -> None:
        named = named_params(run.loop.model)
        self._names = {id(p): PARAM + name for name, p in named.items()}
        self._writes = GradientWrites(named)
        objects: dict[int, tuple[str, str, dict[str, Any], str]] = {}
        for name, m in named_modules(run.loop.model).items():
            holds = _Holds(buffers_of(m), parameters_of(m), children_of(m))
            are_plain = all(isinstance(x, dict) for x in holds)  # not those of TorchScript
            of = as_layer(name) or "the model", name, vars(m), ""
            self._follow(run, *of, holds if are_plain else _Holds())
            for key, x in plain_objects(m):
                objects.setdefault(id(x), (f"{name}.{key}" if name else key, name, vars(m), key))
        for of in [*objects.values()][:MAX_OBJECTS]:
            self._follow(run, *of, _Holds())

    def _follow(
        self,
        run: Run,
        name: str,
        layer: str,
        attributes: dict[str, Any],
        key: str,
        holds: _Holds,
    ) -> None:
        own = _own(attributes, key)
        numbers = tuple(_settings(own))
        if numbers or any(holds):
            known = [_Known(values, run.step) for values in _values_of(own, holds, numbers)]
            self._of_layers.append(_Followed(name, layer, attributes, key, holds, numbers, known))

    def on_batch(self, run: Run) -> None:
        layers = self._of_layers
        if layers and not run.looking:
            layers = [layers[run.step % len(layers)]]
        for name, layer, attributes, key, holds, numbers, known in layers:
            of_each = _values_of(_own(attributes, key), holds, numbers)
            new = [
                x for own, values in zip(known, of_each, strict=True) for x in own.changed(values, run.step)
            ]
            replaced = {BUFFER + x.name.removeprefix(DTYPE) for x in new}  # told by their new dtype
            self.changes += [x._replace(of=name, layer=layer) for x in new if x.name not in replaced]
        self._see_inputs(run.loop.xb, run.step)

    def _see_inputs(self, xb: Any, step: int) -> None:
        is_usual = type(xb) is tuple and len(xb) == 1 and type(xb[0]) is Tensor
        current = (xb[0].shape, xb[0].dtype) if is_usual else None
        if is_usual and current == self._input:
            for own in self._of_inputs:
                own.last = step
            return
        tensors = [(path, x) for path, x in parts(xb) if isinstance(x, Tensor)]
        values = {
            SHAPE: tuple(tensors[0][1].shape) if tensors else None,
            PARTS: tuple(f"{path} {_shown(x.dtype)}".strip() for path, x in tensors),
        }
        self.changes += [x._replace(of="the inputs") for x in _changed(self._of_inputs, values, step)]
        self._input = None if any(own.is_new for own in self._of_inputs) else current

    def on_loss(self, run: Run) -> None:
        if not self._n_backward:
            self._writes.begin_backward()
        if run.noting:
            self._note_loss(run)

    def _note_loss(self, run: Run) -> None:
        node = run.loop.loss_node
        values: dict[str, Any] = {OPERATIONS: operations_of(node), FACTORS: factors_of(node)}
        self.changes += [
            x._replace(of="the loss") for x in _changed(self._of_loss, values, run.step, MIN_SEEN)
        ]
        self._n_until_graph -= 1
        if run.looking or self._n_until_graph <= 0:
            self._look_at_graph(run)

    def _look_at_graph(self, run: Run) -> None:
        loss = run.loop.loss_node
        nodes = graph.walk([loss], at_most=MAX_GRAPH)
        close = set(graph.near(loss, MAX_NODES))
        read = ((graph.leaf(at), _operation(at)) for at in nodes if at not in close)
        values = {GRAPH: tuple(op if x is None else self._names.get(id(x), op) for x, op in read)}
        self._n_until_graph = MIN_NOTED + len(values[GRAPH]) // EASY_GRAPH
        if self._of_graph is None:
            self._of_graph = _Known(values, run.step, MIN_SEEN_GRAPH)
        for change in self._of_graph.changed(values, run.step):
            layer = _first_new(change.before, change.after).rpartition(".")[0]
            self.changes.append(change._replace(of="the model", layer=layer))

    def on_gradients(self, run: Run) -> None:
        self._n_backward += 1
        self._writes.end_backward(run.step)

    def on_step(self, run: Run) -> None:
        if (seen := self._writes.begin_step()) is None:
            return
        name, is_written = seen
        known = self._of_grads.setdefault(name, _Known({GRADIENT: is_written}, run.step))
        told = [x.step for x in self.changes if x.name == GRADIENT]
        for change in known.changed({GRADIENT: is_written}, run.step):
            if not told or change.step > told[-1] + TURN:
                self.changes.append(change._replace(of=name, layer=name.rpartition(".")[0]))

    def on_between(self, run: Run) -> None:
        opt, n, self._n_backward = run.loop.opt, self._n_backward, 0
        if not isinstance(opt, Optimizer):
            return
        step, scales = run.step, run.measured(StepScales)
        self._writes.end_step(step)
        if (factor := run.measured(Curves).factor) is not None:
            self._factor = factor
        current = n, scales.n_clipped, scales.limit, self._factor, self._writes.are_cleared
        self.changes += _changed(self._of_opt, {OPTIMIZER: (type(opt).__name__, id(opt))}, step)
        if id(opt) not in self._of_steps:
            self._see_loaded(opt, step)
        known_step, before = self._of_steps.get(id(opt), ([], None))
        if current == before:
            for own in known_step:
                own.last = step
        else:
            new = _changed(known_step, dict(zip(OF_STEP, current, strict=True)), step)
            self.changes += [x._replace(of="the loss") if x.name == FACTOR else x for x in new]
            is_new = any(own.is_new for own in known_step)
            self._of_steps[id(opt)] = known_step, None if is_new else current
        groups = opt.param_groups[:MAX_GROUPS]
        known = self._of_groups.setdefault(opt, [])
        for i, group in enumerate(groups):
            if i == len(known):
                known.append(_Known(_settings(group), step))
            for change in known[i].changed({name: group.get(name) for name in known[i].values}, step):
                of = f"parameter group {i}" if len(groups) > 1 else "the optimizer"
                self.changes.append(change._replace(of=of))

    def _see_loaded(self, opt: Optimizer, step: int) -> None:
        """Compares the first step of an optimizer with the groups that it had loaded before."""
        known, groups = heard(Restores).groups.pop(id(opt), (lambda: None, []))
        if known() is not opt or len(groups) != len(opt.param_groups):
            return
        for i, (before, group) in enumerate(zip(groups, opt.param_groups, strict=True)):
            now = numbers_of(group)
            others = [name for name in before if name in now and before[name] != now[name]]
            of = f"parameter group {i}" if len(groups) > 1 else "the optimizer"
            for name in others:
                if name not in RATES or (name == "lr" and 0 < JUMP * before["lr"] <= now["lr"]):
                    self.changes.append(Change(step, LOADED, name, before[name], now[name], of))

    def freeze(self) -> None:
        self._of_layers, self._of_loss, self._of_groups, self._of_steps = [], [], {}, {}
        self._of_graph, self._of_inputs, self._names, self._writes = None, [], {}, GradientWrites({})


def operations_of(node: Any) -> tuple[str, ...]:
    """Operations of a graph from a loss back to the last layers, up to 24, with numbers that they have."""
    found = []
    for at in graph.near(node, MAX_NODES):
        saved = ((graph.read_saved(at, key), usual) for key, usual in SAVED.items())
        numbers = ", ".join(str(x) for x, usual in saved if type(x) in NUMBERS and x != usual)
        found.append(f"{_operation(at)}({numbers})" if numbers else _operation(at))
    return tuple(found)


def factors_of(node: Any) -> tuple[float, ...]:
    """Known numbers that multiply parts of a loss, or what the last layers give to it, nearest first."""
    is_mean = math.isfinite(factor_of_mean(node))  # whose factor is known by itself
    near = graph.near(graph.peel(node, graph.SCALING) if is_mean else node, MAX_NODES)
    found = (factor_of(at) for at in near if graph.name(at) in graph.SCALING)
    return tuple(x for x in found if x is not None and math.isfinite(x))


def _operation(node: Any) -> str:
    """Name of an operation; of a cast, with its dtypes."""
    if (name := graph.name(node)) != "ToCopy":
        return name
    before, after = (input_dtype(at) for at in (graph.only_input(node), node))
    return f"a cast from {_shown(before)} to {_shown(after)}"


def _first_new(before: Sequence[str], after: Sequence[str]) -> str:
    """The first parameter at or behind the first place in which two graphs differ; "" without one."""
    n = next((i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), 0)
    return next((x[1:] for x in (*after[n:], *before[n:]) if x[0] == PARAM), "")


def _own(attributes: dict[str, Any], key: str) -> dict[str, Any]:
    """Attributes of a layer, or of the object that is in one of them now, which is not kept alive."""
    own: dict[str, Any] = getattr(attributes.get(key), "__dict__", {}) if key else attributes
    return own


def _settings(owner: dict[str, Any]) -> dict[str, Any]:
    """Public numbers, tuples of numbers, strings and dtypes, by their names."""
    named = {name: x for name, x in owner.items() if name[0] != "_" and name not in LEFT_OUT}
    return {
        name: x
        for name, x in named.items()
        if type(x) in SINGLE or (type(x) is tuple and NUMBERS.issuperset(map(type, x)))
    }


def _values_of(
    attributes: dict[str, Any], holds: _Holds, numbers: tuple[str, ...]
) -> tuple[dict[str, Any], ...]:
    """Numbers of a layer, the names and types of what it holds, and writes to its buffers."""
    buffers = [(name, x) for name, x in holds.buffers.items() if x is not None]
    return (
        {name: attributes.get(name) for name in numbers},
        {DTYPE + name: x.dtype for name, x in buffers}
        | {
            PARAMS: tuple(holds.params),
            MODULES: tuple([f"{name} ({type(m).__name__})" for name, m in holds.modules.items()]),
        },
        {BUFFER + name: (id(x), version_of(x)) for name, x in buffers if not x.is_inference()},
    )
