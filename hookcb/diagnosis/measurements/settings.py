"""Settings: what a program changes while it trains: numbers of optimizers and layers, clipping, the loss."""

import math
from collections import deque
from collections.abc import MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.torch_private import input_dtype
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.heard import heard
from hookcb.diagnosis.measurements.changes import (
    BACKWARDS,
    CLEARED,
    CLIPPED,
    FACTOR,
    FACTORS,
    GRADIENT,
    GRAPH,
    LIMIT,
    LOADED,
    NUMBERS,
    OPERATIONS,
    OPTIMIZER,
    PARAM,
    PARTS,
    SHAPE,
    Change,
    Known,
    changed,
    shown,
)
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.gradient_writes import GradientWrites
from hookcb.diagnosis.measurements.group_rates import JUMP
from hookcb.diagnosis.measurements.layer_settings import LayerSettings, plain_settings
from hookcb.diagnosis.measurements.loss_terms import factor_of, factor_of_mean
from hookcb.diagnosis.measurements.restores import Restores, numbers_of
from hookcb.diagnosis.measurements.step_scales import StepScales
from hookcb.diagnosis.run import Run
from hookcb.hooks.params import named_params

N_CHANGES, MAX_GROUPS = 16, 8  # changes that are kept; groups of an optimizer that are followed
MIN_SEEN, MIN_SEEN_GRAPH = 12, 6  # looks with one value, of what is looked at in some batches only
MAX_NODES, MAX_GRAPH = 24, 2_000  # nodes of the graph of the loss, and of that of the model
MIN_NOTED, EASY_GRAPH = 3, 100  # noted batches between looks at the graph; one more for so many operations
TURN = 128  # steps in which changes of other gradients are the same one
SAVED = {"exponent": None, "reduction": None, "alpha": 1}  # of operations of the loss, and what is usual
OF_STEP = BACKWARDS, CLIPPED, LIMIT, FACTOR, CLEARED
RATES = ("lr", "initial_lr")


class Settings(Measurement):
    """Follows settings: of up to eight groups of each optimizer, in each step, of layers, and of the loss.

    Those of a layer are its attributes that are numbers, such as `p`, `eps` and `momentum`, strings or
    dtypes, without private ones, the dtypes of its buffers, and writes to these: of all layers in inspected
    batches, and of one in each other batch, in turn. Of the inputs, their names, their dtypes, and the shape
    of the first. Of the loss, its operations next to it and numbers that scale its parts, in batches of
    `Run.noting`, and in some of these and inspected ones the graph behind them, up to 2,000 operations and
    the parameters that it reaches; and the number that a mean is multiplied by, in each batch. Of each step,
    its optimizer, the number of backwards before it, of parameters that torch's clipping was given, and its
    limit; and, see `GradientWrites`, whether gradients are cleared before it or written to after the
    backward. What changes often, as by a schedule, or changes back at once, was not changed by a program
    once.

    Attributes:
        changes: the last 16, where nothing of the group, layer or loss had changed for 32 steps before, and
            it has not come back in eight afterwards.
    """

    cadence = EVERY
    uses = (Curves, StepScales)
    hears = (Restores,)

    def __init__(self) -> None:
        self.changes = deque[Change](maxlen=N_CHANGES)
        self._of_layers: LayerSettings | None = None
        self._of_groups: MutableMapping[Optimizer, list[Known]] = WeakKeyDictionary()
        self._of_opt: list[Known] = []
        # by id of the optimizer: what is followed of its steps, and the newest values if none is new
        self._of_steps: dict[int, tuple[list[Known], tuple[Any, ...] | None]] = {}
        self._of_loss: list[Known] = []
        self._of_inputs: list[Known] = []
        self._input: tuple[Any, ...] | None = None  # shape and dtype of the only one, if none is new
        self._of_graph: Known | None = None
        self._n_until_graph = 0  # noted batches
        self._names: dict[int, str] = {}  # of parameters, by id
        self._n_backward = 0
        self._factor = 1.0  # of the newest mean
        self._writes = GradientWrites({})
        self._of_grads: dict[str, Known] = {}

    def on_model(self, run: Run) -> None:
        named = named_params(run.loop.model)
        self._names = {id(p): PARAM + name for name, p in named.items()}
        self._writes = GradientWrites(named)
        self._of_layers = LayerSettings(run.loop.model, run.step)

    def on_batch(self, run: Run) -> None:
        if self._of_layers is not None:
            self.changes += self._of_layers.changed(run.step, run.looking)
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
            PARTS: tuple(f"{path} {shown(x.dtype)}".strip() for path, x in tensors),
        }
        self.changes += [x._replace(of="the inputs") for x in changed(self._of_inputs, values, step)]
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
            x._replace(of="the loss") for x in changed(self._of_loss, values, run.step, MIN_SEEN)
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
            self._of_graph = Known(values, run.step, MIN_SEEN_GRAPH)
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
        values = {GRADIENT: is_written}
        known = self._of_grads.setdefault(name, Known(values, run.step))
        for change in known.changed(values, run.step):
            if all(change.step > x.step + TURN for x in self.changes if x.name == GRADIENT):
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
        self.changes += changed(self._of_opt, {OPTIMIZER: (type(opt).__name__, id(opt))}, step)
        if id(opt) not in self._of_steps:
            self._see_loaded(opt, step)
        known_step, before = self._of_steps.get(id(opt), ([], None))
        if current == before:
            for own in known_step:
                own.last = step
        else:
            new = changed(known_step, dict(zip(OF_STEP, current, strict=True)), step)
            self.changes += [x._replace(of="the loss") if x.name == FACTOR else x for x in new]
            is_new = any(own.is_new for own in known_step)
            self._of_steps[id(opt)] = known_step, None if is_new else current
        groups = opt.param_groups[:MAX_GROUPS]
        known = self._of_groups.setdefault(opt, [])
        for i, group in enumerate(groups):
            if i == len(known):
                known.append(Known(plain_settings(group), step))
            for change in known[i].changed({name: group.get(name) for name in known[i].values}, step):
                self.changes.append(change._replace(of=_group(i, groups)))

    def _see_loaded(self, opt: Optimizer, step: int) -> None:
        """Compares the first step of an optimizer with the groups that it had loaded before."""
        known, groups = heard(Restores).groups.pop(id(opt), (lambda: None, []))
        if known() is not opt or len(groups) != len(opt.param_groups):
            return
        for i, (before, group) in enumerate(zip(groups, opt.param_groups, strict=True)):
            now = numbers_of(group)
            others = [name for name in before if name in now and before[name] != now[name]]
            for name in others:
                if name not in RATES or (name == "lr" and 0 < JUMP * before["lr"] <= now["lr"]):
                    change = Change(step, LOADED, name, before[name], now[name], _group(i, groups))
                    self.changes.append(change)

    def freeze(self) -> None:
        self._of_layers, self._of_loss, self._of_groups, self._of_steps = None, [], {}, {}
        self._of_graph, self._of_inputs, self._names, self._writes = None, [], {}, GradientWrites({})


def _group(i: int, groups: Sequence[Any]) -> str:
    """A group of an optimizer in words; the optimizer itself if it has no other."""
    return f"parameter group {i}" if len(groups) > 1 else "the optimizer"


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
    return f"a cast from {shown(before)} to {shown(after)}"


def _first_new(before: Sequence[str], after: Sequence[str]) -> str:
    """The first parameter at or behind the first place in which two graphs differ; "" without one."""
    n = next((i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), 0)
    return next((x[1:] for x in (*after[n:], *before[n:]) if x[0] == PARAM), "")
