"""ProfileRecords: tables of profiled steps by phase, layer and operator, and a report."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hookcb.core.files import write_whole
from hookcb.core.text import duration, format_bytes, join_names, short_number
from hookcb.profiling.phases import PHASES
from hookcb.profiling.sums import COMPILED_TYPE, OperatorSums, Profile
from hookcb.profiling.trace_file import write_trace
from hookcb.profiling.window import Windows
from hookcb.records.printing import Printed, Rows
from hookcb.records.tables import Column, LayerTable, Worst, fitted

TOTALS = (
    "own_backward",
    "nodes",
    "own_device_forward",
    "own_device_backward",
    "own_memory",
    "own_flops",
)
KEYS = tuple(field.name for field in fields(OperatorSums))
HEADS = {
    "cpu_time_total": "CPU",
    "self_cpu_time_total": "self CPU",
    "device_time_total": "device",
    "self_device_time_total": "self device",
    "cpu_memory_usage": "memory",
    "self_cpu_memory_usage": "self memory",
}
N_SLOWEST = 5


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Time, memory and FLOPs of a layer, averaged over the profiled steps.

    Attributes:
        name: qualified name, empty for the whole model; for a compiled graph, torch's name of it.
        type: class of the layer.
        depth: number of other layers around it.
        calls: calls per step.
        forward, forward_self: seconds per step on the host, with and without the layers called in it.
        backward, backward_self: the same for the graph nodes that its forward made; None if none of them ran.
        device_forward, device_forward_self, device_backward, device_backward_self: seconds per step in
            the kernels launched there; None without a device.
        memory: bytes allocated minus bytes freed in its forward, per step; None without `profile_memory`.
        output_bytes: size of its outputs per step; None for a compiled graph.
        share: share of the step's time, forward and backward, in 0..1; device time if there is a device.
        flops: FLOPs of its forward per step, as far as torch has formulas; None without `with_flops`.
        flops_per_second: FLOP/s of its forward; None without `with_flops`, or if torch counts nothing.
    """

    name: str
    type: str
    depth: int
    calls: float
    forward: float
    forward_self: float
    backward: float | None
    backward_self: float | None
    device_forward: float | None
    device_forward_self: float | None
    device_backward: float | None
    device_backward_self: float | None
    memory: float | None
    output_bytes: float | None
    share: float
    flops: float | None
    flops_per_second: float | None

    @property
    def self_time(self) -> float:
        """Self time, forward and backward, in seconds per step; device time if there is a device."""
        if self.device_forward_self is not None:
            return self.device_forward_self + (self.device_backward_self or 0.0)
        return self.forward_self + (self.backward_self or 0.0)


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Time of a phase of a step.

    Attributes:
        name: one of `hookcb.profiling.phases.PHASES`, or "other".
        seconds: seconds per step on the host.
        share: share of the step, in 0..1.
        device_seconds: seconds per step in the kernels launched in it; None without a device.
    """

    name: str
    seconds: float
    share: float
    device_seconds: float | None


class LayerTimes(LayerTable[LayerTime]):
    """The layers that were called, each under the one around it."""

    missing = "no profiled layer is named"
    columns = (
        Column("type", lambda row: row.type, is_text=True),
        Column("calls", lambda row: f"{row.calls:.3g}", 5),
        Column("forward", lambda row: duration(row.forward), 1),
        Column("self", lambda row: duration(row.forward_self), 4),
        Column("backward", lambda row: duration(row.backward), 2),
        Column("device", lambda row: duration(_sum(row.device_forward, row.device_backward)), 3),
        Column("share", lambda row: f"{row.share:.1%}"),
        Column("output", lambda row: format_bytes(row.output_bytes), 6),
        Column("memory", lambda row: format_bytes(row.memory), 7),
        Column("FLOP/s", lambda row: short_number(row.flops_per_second), 8),
    )

    @staticmethod
    def size(row: LayerTime) -> float:
        """Self time in seconds per step; device time if there is a device."""
        return row.self_time


class PhaseTimes(Rows[PhaseTime]):
    """The phases of a step; `step` is the time of the whole step, in seconds."""

    missing = "no phase is named"

    def __init__(self, rows: Iterable[PhaseTime], step: float, title: str) -> None:
        super().__init__(rows, title)
        self.step = step

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=self.title)
        table.add_column("phase")
        on_device = any(row.device_seconds is not None for row in self.rows)
        for title in ("time", "share", *(["device"] if on_device else [])):
            table.add_column(title, justify="right", no_wrap=True)
        for row in self.rows:
            device = [duration(row.device_seconds)] if on_device else []
            table.add_row(row.name, duration(row.seconds), f"{row.share:.1%}", *device)
        table.add_section()
        table.add_row("step", duration(self.step), "")
        yield table


class OperatorTimes(Printed):
    """Operators and user ranges by name, with sums over the profiled steps, in nanoseconds."""

    def __init__(self, rows: Sequence[tuple[str, OperatorSums]], sort_by: str, title: str) -> None:
        self.rows, self.sort_by, self.title = list(rows), sort_by, title

    def __iter__(self) -> Iterator[tuple[str, OperatorSums]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> OperatorSums:
        for operator, sums in self.rows:
            if operator == name:
                return sums
        raise LookupError(f"{name!r} is not in this table; give row_limit=-1 for all operators")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def column(key: str) -> Column[Any]:
            rank = first.index(key) if key in first else len(first)
            return Column(HEADS.get(key, key), lambda row: _operator_text(key, getattr(row[1], key)), rank)

        first = [self.sort_by, "count", "self_cpu_time_total"]
        columns = [column(key) for key in KEYS if any(getattr(sums, key) for _, sums in self.rows)]
        names = [name for name, _ in self.rows]
        yield fitted(self.rows, names, columns, options, title=self.title, head="operator", is_tree=True)


class ProfileReport(Printed):
    """The phases of a step as a table, and sentences about what takes the time."""

    def __init__(self, phases: PhaseTimes, lines: Sequence[str]) -> None:
        self.phases, self.lines = phases, list(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.phases
        yield Text("\n".join(self.lines))


class ProfileRecords:
    """Tables and exports of the windows that were profiled.

    Args:
        windows: the windows of a fit, in progress or over.
    """

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    @property
    def profiled_steps(self) -> list[int]:
        """The steps that were profiled from beginning to end."""
        return list(self._windows.profile.steps)

    def layers(self, depth: int | None = None, *, worst: Worst = None) -> LayerTimes:
        """Time and memory of each layer, in the order of the model.

        Args:
            depth: number of levels to show, by default all.
            worst: number of layers to show, by self time, largest first; "auto" for 20 if there are more
                than 30.

        Raises:
            TypeError, ValueError: If `worst` is invalid.
            RuntimeError: If nothing was profiled.
        """
        profile = self._recorded()
        rows = [row for row in self._layer_times(profile) if depth is None or row.depth <= depth]
        return LayerTimes(rows, f"layers, per step, {self._steps_text()}", worst)

    def phases(self) -> PhaseTimes:
        """Time of each phase of a step.

        Raises:
            RuntimeError: If nothing was profiled.
        """
        profile = self._recorded()
        n, on_device = len(profile.steps) * 1e9, _has_device(profile)
        named = {phase: profile.phases[phase] for phase in PHASES}
        rows = [
            PhaseTime(
                phase,
                time / n,
                time / max(1, profile.time),
                profile.device_phases["" if phase == "other" else phase] / n if on_device else None,
            )
            for phase, time in {**named, "other": profile.time - sum(named.values())}.items()
        ]
        return PhaseTimes(rows, profile.time / n, f"phases of a step, {self._steps_text()}")

    def table(self, sort_by: str = "self_cpu_time_total", row_limit: int = 20) -> OperatorTimes:
        """Operators by torch's names, summed over the profiled steps.

        Args:
            sort_by: largest first, a key of torch's `key_averages().table`: `count`, `cpu_time_total`,
                `self_cpu_time_total`, `device_time_total`, `self_device_time_total`, `cpu_memory_usage`,
                `self_cpu_memory_usage` or `flops`.
            row_limit: number of rows, -1 for all.

        Raises:
            ValueError: If the key is unknown.
            RuntimeError: If nothing was profiled.
        """
        if sort_by not in KEYS:
            raise ValueError(f"sort_by is {sort_by!r}; give one of {', '.join(KEYS)}")
        operators = sorted(
            self._recorded().operators.items(), key=lambda item: getattr(item[1], sort_by), reverse=True
        )
        title = f"operators by {sort_by.replace('_', ' ')}, {self._steps_text()}"
        return OperatorTimes(operators[: None if row_limit < 0 else row_limit], sort_by, title)

    def report(self) -> ProfileReport:
        """The phases of a step, and sentences about what takes the time; prints as a table.

        Raises:
            RuntimeError: If nothing was profiled.
        """
        profile, phases = self._recorded(), self.phases()
        rows = self._layer_times(profile)
        lines = [_data_line(phases), f"callbacks take {phases['callbacks'].share:.1%} of the step"]
        slowest = sorted(rows, key=lambda row: row.self_time, reverse=True)[:N_SLOWEST]
        lines += ["slowest layers, by self time:"] if slowest else []
        lines += [_layer_line(row, phases.step) for row in slowest]
        if _has_device(profile):
            waits = profile.waits / len(profile.steps)
            lines.append(f"the host waits for the device {waits:.3g} times per step")
        if profile.compilations:
            n = profile.compilations
            lines.append(f"torch.compile compiled {n} new graphs in these steps; profile later ones")
        graphs = [name for name, kind in profile.types.items() if kind == COMPILED_TYPE]
        if graphs:
            lines.append(f"compiled: {join_names(graphs, 3)}; layers inside are not shown separately")
        return ProfileReport(phases, lines)

    def export_chrome_trace(self, path: str | Path, cycle: int = -1) -> Path:
        """Writes the trace of a window, for Perfetto or chrome://tracing; gzipped if `path` ends in .gz.

        Args:
            path: file to write.
            cycle: index of the window, by default the last.

        Returns:
            The path written.

        Raises:
            RuntimeError: If nothing was profiled.
            LookupError: If there was no such window.
        """
        if not self._windows.traces:
            raise RuntimeError(self._windows.why_nothing)
        if not -len(self._windows.traces) <= cycle < len(self._windows.traces):
            raise LookupError(
                f"cycle is {cycle}; there are {len(self._windows.traces)} cycles, counted from 0"
            )
        return write_trace(self._windows.traces[cycle], Path(path))

    def export_stacks(self, path: str | Path, metric: str = "self_cpu_time_total") -> Path:
        """Writes the time spent in each Python stack, in microseconds, for a flame graph.

        Args:
            path: file to write.
            metric: "self_cpu_time_total" or "self_device_time_total".

        Raises:
            ValueError: If the metric is unknown, or stacks were not recorded.
            RuntimeError: If nothing was profiled.
        """
        profile = self._recorded()
        stacks = {"self_cpu_time_total": profile.stacks, "self_device_time_total": profile.device_stacks}
        if metric not in stacks:
            raise ValueError(f"metric is {metric!r}; give one of {', '.join(stacks)}")
        if not self._windows.options["with_stack"]:
            raise ValueError("stacks were not recorded; profile with with_stack=True")
        lines = [
            f"{';'.join(frame.replace(';', ',') for frame in stack)} {time // 1000}\n"
            for stack, time in stacks[metric].items()
            if time >= 1000
        ]
        return write_whole(path, lambda opened: opened.write("".join(lines).encode()))

    def _recorded(self) -> Profile:
        if not self._windows.profile.steps:
            raise RuntimeError(self._windows.why_nothing)
        return self._windows.profile

    def _steps_text(self) -> str:
        steps = self._windows.profile.steps
        one_run = steps[-1] - steps[0] + 1 == len(steps)
        which = f"{steps[0]} to {steps[-1]}" if one_run and len(steps) > 1 else join_names(map(str, steps), 6)
        return f"{'steps' if len(steps) > 1 else 'step'} {which}"

    def _layer_times(self, profile: Profile) -> list[LayerTime]:
        totals = {key: profile.totals(key) for key in TOTALS}
        return [
            self._layer_time(profile, name, depth, {key: by_layer[name] for key, by_layer in totals.items()})
            for name, depth in profile.depths().items()
            if name in profile.layers and profile.layers[name].calls
        ]

    def _layer_time(self, profile: Profile, name: str, depth: int, total: Mapping[str, int]) -> LayerTime:
        sums, n, on_device = profile.layers[name], len(profile.steps), _has_device(profile)
        seconds = n * 1e9
        forward, backward = sums.forward / seconds, total["own_backward"] / seconds
        has_backward = total["nodes"] > 0
        device_forward, device_backward = total["own_device_forward"], total["own_device_backward"]
        time = device_forward + device_backward if on_device else sums.forward + total["own_backward"]
        flops, options = total["own_flops"] / n, self._windows.options
        return LayerTime(
            name=name,
            type=profile.types[name],
            depth=depth,
            calls=sums.calls / n,
            forward=forward,
            forward_self=sums.own_forward / seconds,
            backward=backward if has_backward else None,
            backward_self=sums.own_backward / seconds if has_backward else None,
            device_forward=device_forward / seconds if on_device else None,
            device_forward_self=sums.own_device_forward / seconds if on_device else None,
            device_backward=device_backward / seconds if on_device else None,
            device_backward_self=sums.own_device_backward / seconds if on_device else None,
            memory=total["own_memory"] / n if options["profile_memory"] else None,
            output_bytes=None if profile.types[name] == COMPILED_TYPE else sums.output_bytes / n,
            share=time / max(1, profile.time),
            flops=flops if options["with_flops"] else None,
            flops_per_second=flops / forward if options["with_flops"] and flops and forward else None,
        )


def _has_device(profile: Profile) -> bool:
    return any(profile.device_phases.values())


def _sum(*values: float | None) -> float | None:
    known = [x for x in values if x is not None]
    return sum(known) if known else None


def _operator_text(key: str, value: int) -> str:
    if "time" in key:
        return duration(value / 1e9)
    return format_bytes(value) if "memory" in key else f"{value:,}"


def _data_line(phases: PhaseTimes) -> str:
    data = phases["data"]
    if not data.seconds:
        return "time spent waiting for data is unknown, because the loop is not a Learner's"
    without = f"without it a step would take {duration(phases.step - data.seconds)}"
    return f"{data.share:.1%} of the step is spent waiting for data; {without}"


def _layer_line(row: LayerTime, step: float) -> str:
    what = "on the device" if row.device_forward_self is not None else "on the host"
    share = row.self_time / step if step else 0.0
    return f"  {row.name or row.type} ({row.type}): {duration(row.self_time)} {what}, {share:.1%} of the step"
