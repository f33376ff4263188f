"""What a profiled window comes to: sums over its steps, by phase, layer and operator."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Self

from hookcb.profiling.attribution import COMPILED, Placed, Span
from hookcb.profiling.ops import MEMORY, RUNS_NODE, WAITS, Op, enclosing, self_times, stacks
from hookcb.profiling.phases import PHASES
from hookcb.profiling.ranges import STEP, RangeInfo

COMPILED_TYPE = "compiled graph"


@dataclass
class _Sums:
    """Numbers that add up."""

    def add(self, other: Self) -> None:
        """Adds those of `other`."""
        for of in fields(self):
            setattr(self, of.name, getattr(self, of.name) + getattr(other, of.name))


@dataclass
class LayerSums(_Sums):
    """Of a layer; times in nanoseconds, `own` ones without the layers called in it."""

    calls: int = 0
    forward: int = 0
    own_forward: int = 0
    own_backward: int = 0
    nodes: int = 0  # of the graph, run in the backward
    own_device_forward: int = 0
    own_device_backward: int = 0
    own_memory: int = 0
    own_flops: int = 0
    output_bytes: int = 0


@dataclass
class OperatorSums(_Sums):
    """Of an operator, by torch's names; times in nanoseconds."""

    count: int = 0
    cpu_time_total: int = 0
    self_cpu_time_total: int = 0
    device_time_total: int = 0
    self_device_time_total: int = 0
    cpu_memory_usage: int = 0
    self_cpu_memory_usage: int = 0
    flops: int = 0


@dataclass
class Profile:
    """Sums over profiled steps, times in nanoseconds; `types` and `outer` tell of each layer what it is."""

    steps: list[int] = field(default_factory=list)
    time: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    device_phases: Counter[str] = field(default_factory=Counter)
    layers: defaultdict[str, LayerSums] = field(default_factory=lambda: defaultdict(LayerSums))
    types: dict[str, str] = field(default_factory=dict)
    outer: dict[str, str | None] = field(default_factory=dict)
    operators: defaultdict[str, OperatorSums] = field(default_factory=lambda: defaultdict(OperatorSums))
    stacks: Counter[tuple[str, ...]] = field(default_factory=Counter)
    device_stacks: Counter[tuple[str, ...]] = field(default_factory=Counter)
    waits: int = 0  # of the host for the device
    compilations: int = 0

    def add(self, other: "Profile") -> None:
        """Adds what another window came to."""
        self.steps += other.steps
        for name in ("phases", "device_phases", "stacks", "device_stacks", "types", "outer"):
            getattr(self, name).update(getattr(other, name))
        for name, layer in other.layers.items():
            self.layers[name].add(layer)
        for name, operator in other.operators.items():
            self.operators[name].add(operator)
        self.time += other.time
        self.waits += other.waits
        self.compilations += other.compilations

    def totals(self, what: str) -> dict[str, int]:
        """Of each layer the sum of what is `own` to it and to those inside it."""
        found = {name: getattr(self.layers[name], what) if name in self.layers else 0 for name in self.outer}
        for name, outer in reversed(self.outer.items()):  # a layer stands behind the one it is inside of
            if outer is not None:
                found[outer] += found[name]
        return found

    def depths(self) -> dict[str, int]:
        """How many called layers each is inside of, by hierarchy: each layer before those inside it."""
        inner = defaultdict[str | None, list[str]](list)
        for name, outer in self.outer.items():
            inner[outer].append(name)
        found: dict[str, int] = {}
        left = [(name, 0) for name in reversed(inner[None])]
        while left:
            name, depth = left.pop()
            found[name] = depth
            deeper = depth + (name in self.layers and self.layers[name].calls > 0)
            left += [(other, deeper) for other in reversed(inner[name])]
        return found


def summarise(
    ops: list[Op],
    infos: Mapping[str, RangeInfo],
    output_bytes: Mapping[int, Mapping[str, int]],
    steps: list[int],
    types: Mapping[str, str],
) -> tuple[Profile, list[Span]]:
    """Sums of a window over the steps that count, and the backward of each layer as it went.

    Args:
        ops: see `read_ops`.
        infos: of ranges of layers, by name.
        output_bytes: of layers, by step.
        steps: those that count.
        types: of layers, by name.
    """
    placed = Placed(ops, infos, steps)
    profile = Profile(steps=list(steps), types=dict(types), outer=_outer(types))
    _add_phases(profile, placed)
    _add_layers(profile, placed)
    _add_operators(profile, placed)
    for step in steps:
        for name, n_bytes in output_bytes.get(step, {}).items():
            profile.layers[name].output_bytes += n_bytes
    if any(op.is_python for op in ops):
        _add_stacks(profile, ops, placed)
    return profile, placed.spans()


def _outer(names: Iterable[str]) -> dict[str, str | None]:
    """The layer that each is inside of, by its qualified name; None of the outermost."""
    found: dict[str, str | None] = {}
    for name in names:
        outer: str | None = name
        while outer:
            outer = outer.rpartition(".")[0]
            if outer in found:
                break
        found[name] = outer if name and outer in found else None
    return found


def _add_phases(profile: Profile, placed: Placed) -> None:
    for i, (op, outer, place) in enumerate(zip(placed.ops, placed.parent, placed.places, strict=True)):
        if place.step is None:
            continue
        if i in placed.steps:
            profile.time += op.time
        elif outer in placed.steps and place.phase:
            profile.phases[place.phase] += op.time
        profile.device_phases[place.phase] += op.device_time
        profile.waits += op.name in WAITS


def _add_layers(profile: Profile, placed: Placed) -> None:
    for i, inside in placed.marks():
        _add_mark(profile, placed, i, inside)
    for op, owner, place in zip(placed.ops, placed.owners, placed.places, strict=True):
        if owner is None or place.step is None:
            continue
        sums = profile.layers[owner]
        if place.phase == "backward":
            sums.own_device_backward += op.device_time
        else:
            sums.own_device_forward += op.device_time
            sums.own_memory += op.nbytes
            sums.own_flops += op.flops


def _add_mark(profile: Profile, placed: Placed, i: int, inside: int) -> None:
    op, owner, place = placed.ops[i], placed.owners[i], placed.places[i]
    if place.step is None:
        return
    side = "own_backward" if place.phase == "backward" else "own_forward"
    around = placed.owners[inside] if inside >= 0 else None
    if around is not None:
        sums = profile.layers[around]
        setattr(sums, side, getattr(sums, side) - op.time)
    if owner is None:
        return
    if op.name.startswith(COMPILED):
        profile.types[owner], profile.outer[owner] = COMPILED_TYPE, around
    sums = profile.layers[owner]
    setattr(sums, side, getattr(sums, side) + op.time)
    if side == "own_backward":
        sums.nodes += 1
    elif not op.name.startswith(RUNS_NODE):
        sums.calls += 1
        if not _is_inside_itself(placed, i):
            sums.forward += op.time


def _is_inside_itself(placed: Placed, i: int) -> bool:
    owner = placed.owners[i]
    return enclosing(placed.parent, i, lambda j: placed.is_mark(j) and placed.owners[j] == owner) >= 0


def _add_operators(profile: Profile, placed: Placed) -> None:
    ops, parent = placed.ops, placed.parent
    own = self_times(ops, parent)
    device, memory = [op.device_time for op in ops], [op.nbytes for op in ops]
    for i in reversed(range(len(ops))):  # the inner come behind the outer
        if parent[i] >= 0:
            device[parent[i]] += device[i]
            memory[parent[i]] += memory[i]
    n_inner = Counter(outer for outer, op in zip(parent, ops, strict=True) if op.name != MEMORY)
    for i, op in enumerate(ops):
        is_range = op.name in placed.infos or op.name.startswith(STEP) or op.name in PHASES
        if placed.places[i].step is None or is_range:
            continue
        if parent[i] >= 0 and ops[parent[i]].name == op.name and n_inner[parent[i]] == 1:
            profile.operators[op.name].add(_calling_itself(op, own[i]))
            continue
        if op.name == MEMORY:
            if parent[i] >= 0 and ops[parent[i]].name in profile.operators:
                profile.operators[ops[parent[i]].name].self_cpu_memory_usage += op.nbytes
            continue
        profile.operators[op.name].add(
            OperatorSums(1, op.time, own[i], device[i], op.device_time, memory[i], 0, op.flops)
        )


def _calling_itself(op: Op, own: int) -> OperatorSums:
    """What an operator adds that is all of another call of its own: one call with another signature."""
    return OperatorSums(self_cpu_time_total=own, self_device_time_total=op.device_time, flops=op.flops)


def _add_stacks(profile: Profile, ops: list[Op], placed: Placed) -> None:
    counted = {id(op) for op, place in zip(placed.ops, placed.places, strict=True) if place.step is not None}
    ranges = {*(placed.ops[i].name for i in placed.steps), *PHASES, *placed.infos}
    # ranges begin in one function and end in another
    for around, op, time in stacks([op for op in ops if op.name not in ranges]):
        if id(op) in counted and op.name != MEMORY:
            profile.stacks[(*around, op.name)] += time
            profile.device_stacks[(*around, op.name)] += op.device_time
