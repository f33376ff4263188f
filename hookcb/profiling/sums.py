"""Sums over the steps of a profiled window, by phase, layer and operator."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hookcb.core.clock import PHASES
from hookcb.hooks.modules import names_around
from hookcb.profiling.attribution import COMPILED, Attribution, Span
from hookcb.profiling.ops import MEMORY, RUNS_NODE, WAITS, Op, self_times, stacks
from hookcb.profiling.ranges import STEP

COMPILED_TYPE = "compiled graph"


def _by_name() -> defaultdict[str, Counter[str]]:
    return defaultdict(Counter)


@dataclass
class Profile:
    """Sums over profiled steps, in nanoseconds and bytes.

    Attributes:
        phases, device_phases: time of each phase, and of the kernels launched in it; "" is between phases.
        layers: by layer: `calls`; `forward`; `own_…`, without the layers called in it; `nodes` of the graph
            that ran in the backward; `output_bytes`.
        types, outer: class of each layer, and the layer around it.
        operators: by operator, the fields of `OperatorSums`.
        stacks, device_stacks: time of each operator with the Python functions around it.
        waits: number of calls that made the host wait for the device.
    """

    steps: list[int] = field(default_factory=list)
    time: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    device_phases: Counter[str] = field(default_factory=Counter)
    layers: defaultdict[str, Counter[str]] = field(default_factory=_by_name)
    types: dict[str, str] = field(default_factory=dict)
    outer: dict[str, str | None] = field(default_factory=dict)
    operators: defaultdict[str, Counter[str]] = field(default_factory=_by_name)
    stacks: Counter[tuple[str, ...]] = field(default_factory=Counter)
    device_stacks: Counter[tuple[str, ...]] = field(default_factory=Counter)
    waits: int = 0
    compilations: int = 0

    def add(self, other: "Profile") -> None:
        """Adds the sums of another window."""
        self.steps += other.steps
        for name in ("phases", "device_phases", "stacks", "device_stacks", "types", "outer"):
            getattr(self, name).update(getattr(other, name))
        for name, layer in other.layers.items():
            self.layers[name].update(layer)
        for name, operator in other.operators.items():
            self.operators[name].update(operator)
        self.time += other.time
        self.waits += other.waits
        self.compilations += other.compilations

    def totals(self, what: str) -> dict[str, int]:
        """Sum of field `what` over each layer and the layers inside it, by layer."""
        totals = {name: self.layers[name][what] if name in self.layers else 0 for name in self.outer}
        for name, outer in reversed(self.outer.items()):  # a layer comes after the one around it
            if outer is not None:
                totals[outer] += totals[name]
        return totals

    def depths(self) -> dict[str, int]:
        """Number of called layers around each layer; a layer comes before those inside it."""
        inner = defaultdict[str | None, list[str]](list)
        for name, outer in self.outer.items():
            inner[outer].append(name)
        depths: dict[str, int] = {}
        left = [(name, 0) for name in reversed(inner[None])]
        while left:
            name, depth = left.pop()
            depths[name] = depth
            deeper = depth + (name in self.layers and self.layers[name]["calls"] > 0)
            left += [(other, deeper) for other in reversed(inner[name])]
        return depths


def summarize(
    ops: list[Op],
    range_layers: Mapping[str, str],
    output_bytes: Mapping[int, Mapping[str, int]],
    steps: list[int],
    types: Mapping[str, str],
) -> tuple[Profile, list[Span]]:
    """Sums of a window over the steps that count, and the spans of the backward by layer.

    Args:
        ops: see `read_ops`.
        range_layers: layer of each range of a layer, by name of the range.
        output_bytes: size of the outputs of layers, by step.
        steps: the steps that count.
        types: classes of the layers, by name.
    """
    attribution = Attribution(ops, range_layers, steps)
    profile = Profile(steps=list(steps), types=dict(types), outer=_outer(types))
    _add_phases(profile, attribution)
    _add_layers(profile, attribution)
    _add_operators(profile, attribution)
    for step in steps:
        for name, n_bytes in output_bytes.get(step, {}).items():
            profile.layers[name]["output_bytes"] += n_bytes
    if any(op.is_python for op in ops):
        _add_stacks(profile, ops, attribution)
    return profile, attribution.spans()


def _outer(names: Iterable[str]) -> dict[str, str | None]:
    """The layer around each layer, by qualified name; None for the parents."""
    parents: dict[str, str | None] = {}
    for name in names:
        parents[name] = next((outer for outer in names_around(name) if outer in parents), None)
    return parents


def _add_phases(profile: Profile, attribution: Attribution) -> None:
    placed = zip(attribution.ops, attribution.parent, attribution.places, strict=True)
    for i, (op, outer, place) in enumerate(placed):
        if place.step is None:
            continue
        if i in attribution.steps:
            profile.time += op.time
        elif outer in attribution.steps and place.phase:
            profile.phases[place.phase] += op.time
        profile.device_phases[place.phase] += op.device_time
        profile.waits += op.name in WAITS


def _add_layers(profile: Profile, attribution: Attribution) -> None:
    for i, inside in attribution.range_starts():
        _add_range(profile, attribution, i, inside)
    for op, owner, place in zip(attribution.ops, attribution.owners, attribution.places, strict=True):
        if owner is None or place.step is None:
            continue
        sums = profile.layers[owner]
        if place.phase == "backward":
            sums["own_device_backward"] += op.device_time
        else:
            sums["own_device_forward"] += op.device_time
            sums["own_memory"] += op.nbytes
            sums["own_flops"] += op.flops


def _add_range(profile: Profile, attribution: Attribution, i: int, inside: int) -> None:
    op, owner, place = attribution.ops[i], attribution.owners[i], attribution.places[i]
    if place.step is None:
        return
    side = "own_backward" if place.phase == "backward" else "own_forward"
    around = attribution.owners[inside] if inside >= 0 else None
    if around is not None:
        profile.layers[around][side] -= op.time
    if owner is None:
        return
    if op.name.startswith(COMPILED):
        profile.types[owner], profile.outer[owner] = COMPILED_TYPE, around
    sums = profile.layers[owner]
    sums[side] += op.time
    if side == "own_backward":
        sums["nodes"] += 1
    elif not op.name.startswith(RUNS_NODE):
        sums["calls"] += 1
        if not _is_inside_itself(attribution, i):
            sums["forward"] += op.time


def _is_inside_itself(attribution: Attribution, i: int) -> bool:
    owner, around = attribution.owners[i], i
    while (around := attribution.parent[around]) >= 0:
        if attribution.starts_range(around) and attribution.owners[around] == owner:
            return True
    return False


def _add_operators(profile: Profile, attribution: Attribution) -> None:
    ops, parent = attribution.ops, attribution.parent
    self_time = self_times(ops, parent)
    device, memory = [op.device_time for op in ops], [op.nbytes for op in ops]
    for i in reversed(range(len(ops))):  # inner operators come after outer ones
        if parent[i] >= 0:
            device[parent[i]] += device[i]
            memory[parent[i]] += memory[i]
    n_inner = Counter(outer for outer, op in zip(parent, ops, strict=True) if op.name != MEMORY)
    for i, op in enumerate(ops):
        is_range = op.name in attribution.range_layers or op.name.startswith(STEP) or op.name in PHASES
        if attribution.places[i].step is None or is_range:
            continue
        outer = ops[parent[i]].name if parent[i] >= 0 else ""
        if op.name == MEMORY:
            if outer in profile.operators:
                profile.operators[outer]["self_cpu_memory_usage"] += op.nbytes
            continue
        sums = profile.operators[op.name]
        sums["self_cpu_time_total"] += self_time[i]
        sums["self_device_time_total"] += op.device_time
        sums["flops"] += op.flops
        if outer != op.name or n_inner[parent[i]] > 1:  # else it calls itself with another signature only
            sums["count"] += 1
            sums["cpu_time_total"] += op.time
            sums["device_time_total"] += device[i]
            sums["cpu_memory_usage"] += memory[i]


def _add_stacks(profile: Profile, ops: list[Op], attribution: Attribution) -> None:
    placed = zip(attribution.ops, attribution.places, strict=True)
    counted = {id(op) for op, place in placed if place.step is not None}
    ranges = {*(attribution.ops[i].name for i in attribution.steps), *PHASES, *attribution.range_layers}
    # ranges begin in one function and end in another
    for around, op, time in stacks([op for op in ops if op.name not in ranges]):
        if id(op) in counted and op.name != MEMORY:
            profile.stacks[(*around, op.name)] += time
            profile.device_stacks[(*around, op.name)] += op.device_time
