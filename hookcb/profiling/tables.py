"""Tables of a profile: layers, phases and operators."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hookcb.core.text import duration, format_bytes, short_number
from hookcb.records.printing import Printed, Rows
from hookcb.records.tables import Column, LayerTable, fitted

HEADS = {
    "cpu_time_total": "CPU",
    "self_cpu_time_total": "self CPU",
    "device_time_total": "device",
    "self_device_time_total": "self device",
    "cpu_memory_usage": "memory",
    "self_cpu_memory_usage": "self memory",
}
KEYS = ("count", *HEADS, "flops")  # fields of `OperatorSums`


@dataclass(frozen=True, slots=True)
class OperatorSums:
    """Sums of an operator, with torch's names; times in nanoseconds."""

    count: int = 0
    cpu_time_total: int = 0
    self_cpu_time_total: int = 0
    device_time_total: int = 0
    self_device_time_total: int = 0
    cpu_memory_usage: int = 0
    self_cpu_memory_usage: int = 0
    flops: int = 0


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
        name: one of `hookcb.core.clock.PHASES`, or "other".
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


def _sum(*values: float | None) -> float | None:
    known = [x for x in values if x is not None]
    return sum(known) if known else None


def _operator_text(key: str, value: int) -> str:
    if "time" in key:
        return duration(value / 1e9)
    return format_bytes(value) if "memory" in key else f"{value:,}"
