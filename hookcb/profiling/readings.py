"""ProfileRecords: tables of profiled steps by phase, layer and operator, and a report."""

from collections.abc import Mapping
from pathlib import Path

from hookcb.core.clock import PHASES
from hookcb.core.text import duration, join_names
from hookcb.core.whole import write_whole
from hookcb.profiling.sums import COMPILED_TYPE, Profile
from hookcb.profiling.tables import (
    KEYS,
    LayerTime,
    LayerTimes,
    OperatorSums,
    OperatorTimes,
    PhaseTime,
    PhaseTimes,
    ProfileReport,
)
from hookcb.profiling.trace_file import write_trace
from hookcb.profiling.window import Windows
from hookcb.records.content import Content, TimeSpent
from hookcb.records.recording import Recording
from hookcb.records.tables import Worst

TOTALS = ("own_backward", "nodes", "own_device_forward", "own_device_backward", "own_memory", "own_flops")
N_SLOWEST = 5


class ProfileRecords(Recording):
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
        sums = self._recorded().operators.items()
        operators = [(name, OperatorSums(**of_name)) for name, of_name in sums]
        operators.sort(key=lambda item: getattr(item[1], sort_by), reverse=True)
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

    def show_on(self, page: Content) -> None:
        """Shows seconds by layer."""
        if self._windows.profile.steps:
            page.time = page.time or TimeSpent()
            page.time.layers = {
                row.name: [row.forward_self, row.backward_self or 0.0] for row in self.layers()
            }

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
            if name in profile.layers and profile.layers[name]["calls"]
        ]

    def _layer_time(self, profile: Profile, name: str, depth: int, total: Mapping[str, int]) -> LayerTime:
        sums, n, on_device = profile.layers[name], len(profile.steps), _has_device(profile)
        seconds = n * 1e9
        forward, backward = sums["forward"] / seconds, total["own_backward"] / seconds
        has_backward = total["nodes"] > 0
        device_forward, device_backward = total["own_device_forward"], total["own_device_backward"]
        time = device_forward + device_backward if on_device else sums["forward"] + total["own_backward"]
        flops, options = total["own_flops"] / n, self._windows.options
        return LayerTime(
            name=name,
            type=profile.types[name],
            depth=depth,
            calls=sums["calls"] / n,
            forward=forward,
            forward_self=sums["own_forward"] / seconds,
            backward=backward if has_backward else None,
            backward_self=sums["own_backward"] / seconds if has_backward else None,
            device_forward=device_forward / seconds if on_device else None,
            device_forward_self=sums["own_device_forward"] / seconds if on_device else None,
            device_backward=device_backward / seconds if on_device else None,
            device_backward_self=sums["own_device_backward"] / seconds if on_device else None,
            memory=total["own_memory"] / n if options["profile_memory"] else None,
            output_bytes=None if profile.types[name] == COMPILED_TYPE else sums["output_bytes"] / n,
            share=time / max(1, profile.time),
            flops=flops if options["with_flops"] else None,
            flops_per_second=flops / forward if options["with_flops"] and flops and forward else None,
        )


def _has_device(profile: Profile) -> bool:
    return any(profile.device_phases.values())


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
