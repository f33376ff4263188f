"""Windows of a fit under torch's profiler: their schedule, and what they record."""

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile, supported_activities

from hookcb.core.arguments import check_count
from hookcb.core.batch import n_batches
from hookcb.core.clock import PHASES, Follower
from hookcb.core.console import warn
from hookcb.core.torch_private import compile_counts, is_profiling, plain_class
from hookcb.hooks.modules import Where, find_modules, named_modules, outermost_compiled, unwrapped
from hookcb.profiling.ops import read_ops
from hookcb.profiling.ranges import LayerRanges
from hookcb.profiling.sums import Profile, summarize
from hookcb.profiling.trace_file import check_trace, cycle_file, take_trace, write_trace

Follow = Callable[[bool], None]
LOADERS = (("train", True), ("valid", False))
STEPS_ON = {"train": (True, False), "valid": (False, True), "all": (True, True)}


@dataclass(frozen=True, slots=True)
class ProfileSchedule:
    """The steps to profile, and how; see `ProfilerCallback`."""

    wait: int
    warmup: int
    active: int
    repeat: int
    activities: tuple[ProfilerActivity, ...]
    trace: Path | None
    on: str

    @property
    def length(self) -> int:
        """Length of a cycle in steps."""
        return self.wait + self.warmup + self.active

    def covers(self, training: bool) -> bool:
        """Whether steps of training (or of validation) count."""
        return STEPS_ON[self.on][not training]

    def action(self, step: int) -> ProfilerAction:
        """The profiler's action in a step, counted from 0."""
        cycle, place = divmod(step, self.length)
        if (self.repeat and cycle >= self.repeat) or place < self.wait:
            return ProfilerAction.NONE
        if place < self.wait + self.warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD_AND_SAVE if place == self.length - 1 else ProfilerAction.RECORD

    def describe(self) -> str:
        """The profiled steps in words, for messages."""
        first, last = self.wait + self.warmup, self.length - 1
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        return which if self.repeat == 1 else f"{which} of every {self.length}"

    def warn_if_longer(self, dls: Any, n_epoch: int) -> None:
        """Warns if a fit is shorter than the window, as far as its loaders have a length."""
        loaders = [getattr(dls, name, None) for name, training in LOADERS if self.covers(training)]
        lengths = [n_batches(loader) for loader in loaders if loader is not None]
        n_steps = n_epoch * sum(n or 0 for n in lengths)
        if n_steps >= self.length or None in lengths or not lengths:
            return
        parts = f"{self.wait} + {self.warmup} + {self.active}"
        n_profiled = max(0, n_steps - self.wait - self.warmup)
        warn(
            f"wait + warmup + active = {parts} = {self.length} steps, and the fit has {n_steps}: "
            f"{n_profiled} of {self.active} will be profiled; make the window shorter",
            stacklevel=2,
            is_of_rank=True,
        )


def check_schedule(
    wait: int, warmup: int, active: int, repeat: int, activities: Any, trace: Any, on: str
) -> ProfileSchedule:
    """Schedule of a `ProfilerCallback` from its arguments, which it checks."""
    for name, value in (("wait", wait), ("warmup", warmup), ("repeat", repeat)):
        check_count(name, value, least=0)
    check_count("active", active, "steps")
    if on not in STEPS_ON:
        raise ValueError(f"on is {on!r}; give one of {', '.join(map(repr, STEPS_ON))}")
    return ProfileSchedule(
        wait, warmup, active, repeat, _check_activities(activities), check_trace(trace), on
    )


def _check_activities(activities: Any) -> tuple[ProfilerActivity, ...]:
    supported: set[ProfilerActivity] = supported_activities()  # type: ignore[no-untyped-call]
    available = {activity.name.lower(): activity for activity in supported}
    if activities is None:
        return tuple(supported)
    names = ", ".join(sorted(available))
    if not isinstance(activities, str | ProfilerActivity | Iterable):
        raise TypeError(f"activities is {activities!r:.80}; give some of {names}, or None for all")
    wanted = [activities] if isinstance(activities, str | ProfilerActivity) else list(activities)
    if not wanted:
        raise ValueError(f"activities is empty; give some of {names}, or None for all")
    lower = [str(getattr(asked, "name", asked)).lower() for asked in wanted]
    for asked, name in zip(wanted, lower, strict=True):
        if name not in available:
            is_one = name.upper() in ProfilerActivity.__members__
            what = "not available here" if is_one else "not an activity of torch's profiler"
            raise ValueError(f"activities has {asked!r}, which is {what}; available: {names}")
    return tuple(available[name] for name in lower)


def layers_to_profile(
    model: nn.Module, where: Where | Iterable[Where] | None
) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """Layers that get a range, by name, and the names of the compiled modules.

    A compiled module has no layers inside, and a hook would trigger another compilation. TorchScript modules
    run without hooks.

    Raises:
        LookupError, TypeError, ValueError: See `find_modules`.
    """
    if where is None:
        layers = dict(named_modules(model))
    elif isinstance(where, tuple | list) and not where:
        layers = {}
    else:
        layers = find_modules(model, where, include_paramless=True)
    compiled = outermost_compiled(model)
    without = {id(inner) for m in compiled.values() for inner in m.modules()}
    hooked = {
        name: m
        for name, m in layers.items()
        if id(m) not in without and not isinstance(m, torch.jit.ScriptModule)
    }
    return hooked, tuple(name or plain_class(unwrapped(model)).__name__ for name in compiled)


class Window:
    """Torch's profiler, warming up or recording, with the ranges of steps, phases and layers."""

    def __init__(
        self, layers: Mapping[str, nn.Module], activities: tuple[ProfilerActivity, ...], **options: Any
    ) -> None:
        self.types = {name: plain_class(m).__name__ for name, m in layers.items()}
        self.is_recording = self.has_batch = False
        self.steps: list[int] = []
        self._prof = profile(activities=activities, **options)
        # early only with a device, as it takes a while; another profiler in between would break it
        self._is_prepared = activities != (ProfilerActivity.CPU,)
        if self._is_prepared:
            self._prepare()
        self.ranges = LayerRanges(layers)
        self._compilations = 0

    def _prepare(self) -> None:
        # torch 2.11 warns that a later cycle would clear the events of this one; with `acc_events`, which it
        # advises, it would take ten times as long to read them as `read_ops` does
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            self._prof.prepare_trace()

    def begin_step(self, step: int, phase: str, record: bool) -> None:
        """Begins a step, with the fetch of its batch; if not `record`, the profiler only warms up."""
        if record and not self.is_recording:
            if not self._is_prepared:
                self._prepare()
            self._prof.start_trace()
            self.is_recording, self._compilations = True, n_compilations()
        self.ranges.begin_step(step)
        if phase in PHASES:  # time outside the phases is "other"
            self.ranges.begin_phase(phase)

    def begin_phase(self, phase: str) -> None:
        """Begins a phase of the step."""
        # a step that begins with the fetch of a batch that does not come has callbacks only
        self.has_batch |= self.is_recording and phase != "callbacks"
        self.ranges.begin_phase(phase)

    def end_step(self, step: int) -> None:
        """Ends a step."""
        self.ranges.end_step()
        if self.is_recording:
            self.has_batch = True
            self.steps.append(step)

    def close(self) -> tuple[Profile, bytes] | None:
        """Stops the profiler; returns the sums and the trace, or None if no batch was recorded."""
        self.ranges.remove()
        if self.is_recording and not is_profiling():  # stopping it again would crash Python
            lost = "another torch profiler stopped that of ProfilerCallback; its window is lost"
            warn(lost, stacklevel=2, is_of_rank=True)
            return None
        if not self.is_recording and self._is_prepared:
            self._prof.start_trace()  # else it stays prepared
        if self.is_recording or self._is_prepared:
            self._prof.stop_trace()
        if not self.has_batch or self._prof.profiler is None:
            return None
        ops = read_ops(self._prof.profiler.kineto_results.events())  # type: ignore[union-attr]
        sums, spans = summarize(
            ops, self.ranges.range_layers, self.ranges.output_bytes, self.steps, self.types
        )
        sums.compilations = n_compilations() - self._compilations
        return sums, take_trace(self._prof, spans, self.steps)


_OPEN = threading.Lock()  # held while a window is open, as torch has one profiler for all threads


class Windows(Follower):
    """The windows of a fit, one after the other, and the sums over them.

    Args:
        schedule: which steps are profiled.
        layers: layers that get a range, by name.
        options: options for `torch.profiler.profile`.
        follow: called with True when a window begins, and with False when it ends.
        rank: number of this rank, for the names of files.
        ranks: ranks to profile; on others there is no window.

    Attributes:
        profile: sums over all windows.
        traces: trace of each window, as gzipped JSON.
        n_steps: number of steps that have ended.
        n_switched: number of times a window began or ended.
    """

    def __init__(
        self,
        schedule: ProfileSchedule,
        layers: Mapping[str, nn.Module],
        options: Mapping[str, bool],
        follow: Follow,
        rank: int = 0,
        ranks: tuple[int, ...] = (0,),
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.schedule, self.options, self.follow = schedule, dict(options), follow
        # weak, because a watched loop ends when its model is freed
        self._layers: MutableMapping[str, nn.Module] = WeakValueDictionary(layers)
        self.in_training, self.in_validation = schedule.covers(True), schedule.covers(False)
        self._first = ""  # phase in which steps begin
        self.profile, self.traces, self.n_steps, self.n_switched = Profile(), list[bytes](), 0, 0
        self._window: Window | None = None

    @property
    def why_nothing(self) -> str:
        """Message if nothing was profiled."""
        if self.rank not in self.ranks:
            return f"nothing was profiled on rank {self.rank}; ranks is {self.ranks}"
        scheduled = self.schedule.describe()
        return f"nothing was profiled: scheduled are {scheduled}, and {self.n_steps} steps ran"

    def begin_step(self, phase: str) -> None:
        """Begins the next step, with the fetch of its batch or, in an external loop, with "other"."""
        self._first, action = phase, self.schedule.action(self.n_steps)
        if action is ProfilerAction.NONE:
            return
        is_own = self._window is not None and (self._window.is_recording or not is_profiling())
        if not is_own and (is_profiling() or not _OPEN.acquire(blocking=False)):
            left_out = "another torch profiler is running; this step is left out"
            warn(left_out, stacklevel=2, is_of_rank=True)
            return
        if self._window is None:
            try:
                self._window = Window(dict(self._layers), self.schedule.activities, **self.options)
            except BaseException:
                _OPEN.release()
                raise
            self.n_switched += 1
            self.follow(True)
        self._window.begin_step(self.n_steps, phase, record=action is not ProfilerAction.WARMUP)

    def enter(self, phase: str) -> None:
        """Begins a phase of the step."""
        if self._window is not None and phase != self._first:
            self._window.begin_phase(phase)

    def drop_step(self) -> None:
        """Discards the step in progress, which does not end."""
        if self._window is not None:
            self._window.ranges.end_step()

    def end_step(self) -> None:
        """Ends the step in progress."""
        step, self.n_steps = self.n_steps, self.n_steps + 1
        if self._window is not None:
            self._window.end_step(step)
            if self.schedule.action(step) is ProfilerAction.RECORD_AND_SAVE:
                self.end_window()

    def end_window(self) -> None:
        """Closes the open window, adds its sums, and writes its trace."""
        window, self._window = self._window, None
        if window is None:
            return
        self.n_switched += 1
        try:
            self.follow(False)
            taken = window.close()
        finally:
            _OPEN.release()
        if taken is not None:
            profile, trace = taken
            self.profile.add(profile)
            self.traces.append(trace)
            if self.schedule.trace is not None:
                write_trace(trace, cycle_file(self.schedule.trace, len(self.traces) - 1, self.rank))

    def close(self) -> None:
        """Closes the open window and releases the model."""
        try:
            self.end_window()
        finally:
            self._layers.clear()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_window": None, "_layers": {}}


def n_compilations() -> int:
    """Number of graphs that torch.compile has compiled in this process."""
    return int(compile_counts("stats")["unique_graphs"])
