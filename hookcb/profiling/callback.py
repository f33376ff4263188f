"""ProfilerCallback: torch's profiler for a few steps, with a named range for each phase and layer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from hookcb.core import orders
from hookcb.core.arguments import check_count
from hookcb.core.callback import Callback
from hookcb.core.torch_private import is_profiling
from hookcb.hooks.modules import Where
from hookcb.processes.ranks import ranks_of
from hookcb.profiling.readings import ProfileRecords
from hookcb.profiling.window import Windows, check_schedule, layers_to_profile
from hookcb.records.forward import forwarded, forwarded_property

OPTIONS = ("record_shapes", "profile_memory", "with_stack", "with_flops")


class ProfilerCallback(Callback):
    """Profiles some steps with `torch.profiler`: time and memory by phase, layer and operator.

    Steps are counted from 0 in this fit; a step lasts from the fetch of its batch to its `after_batch`. In
    each cycle, `wait` steps are skipped, `warmup` steps warm up the profiler, and `active` are profiled.
    At other times the model has no hooks. At the end of a window the profiler waits for the device, and takes
    a while to hand over its records.

    Args:
        wait, warmup, active: number of steps.
        repeat: number of cycles, 0 for as many as fit into the training.
        activities: `"cpu"`, `"cuda"`, `"xpu"` or members of `torch.profiler.ProfilerActivity`; by default
            all that are available.
        record_shapes, profile_memory, with_stack, with_flops: as for `torch.profiler.profile`; with stacks
            each step takes several times as long.
        trace: path for Chrome traces: a file, `.json` or `.json.gz`, or a folder, for TensorBoard.
        on: which steps to profile, `"train"`, `"valid"` or `"all"`.
        modules: layers that get a range, see `find_modules`; by default all modules, `()` for none.
        ranks: numbers of the ranks to profile, of several; on the others it does nothing. The trace of a rank
            but 0 has its number in its name, `trace.rank3.json`.
        name: attribute of the learner.

    Attributes:
        profiled_steps: the steps that were profiled completely, those that `layers()`, `phases()`, `table()`
            and `report()` are about.
        compiled: names of the compiled modules; they have no layers inside, and torch names their graphs.

    Raises:
        TypeError, ValueError: If an argument is invalid, including `"cuda"` without CUDA.
        LookupError: If the model has none of `modules`, when a fit begins.
        RuntimeError: If another profiler is running or attached when a fit begins.

    >>> from hookcb import ProfilerCallback, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(1, cbs=ProfilerCallback(wait=2, warmup=1, active=3))
    >>> learn.profiler.profiled_steps
    [3, 4, 5]
    >>> [row.name for row in learn.profiler.layers()]
    ['', '0', '1', '2']
    """

    order = orders.PROFILER
    run_lr_find = False

    profiled_steps = forwarded_property(ProfileRecords.profiled_steps)
    layers = forwarded(ProfileRecords.layers)
    phases = forwarded(ProfileRecords.phases)
    table = forwarded(ProfileRecords.table)
    report = forwarded(ProfileRecords.report)
    _repr_html_ = forwarded(ProfileRecords._repr_html_)
    export_chrome_trace = forwarded(ProfileRecords.export_chrome_trace)
    export_stacks = forwarded(ProfileRecords.export_stacks)

    def __init__(
        self,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        activities: Iterable[Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        trace: str | Path | None = None,
        on: str = "train",
        modules: Where | Iterable[Where] | None = None,
        ranks: Iterable[int] = (0,),
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.schedule = check_schedule(wait, warmup, active, repeat, activities, trace, on)
        self.record_shapes, self.profile_memory = record_shapes, profile_memory
        self.with_stack, self.with_flops, self.modules = with_stack, with_flops, modules
        self.ranks, self._is_profiled = _check_ranks(ranks), False

        self._windows, self.compiled = Windows(self.schedule, {}, {}, self._follow), tuple[str, ...]()
        self.records = ProfileRecords(self._windows)

    @property
    def n_switched(self) -> int:
        """Number of times the profiler was switched on or off in this fit; `StepTimer` reads it."""
        return self._windows.n_switched

    def before_fit(self) -> None:
        rank = ranks_of(self.model).rank  # under watch too, where ranks do not communicate
        self._is_profiled = rank in self.ranks
        layers, self.compiled = self._check_model(rank) if self._is_profiled else ({}, ())
        options = {name: getattr(self, name) for name in OPTIONS}
        self._windows = Windows(self.schedule, layers, options, self._follow, rank, self.ranks)
        self.records = ProfileRecords(self._windows)

    def _check_model(self, rank: int) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
        if any(isinstance(cb, ProfilerCallback) and cb is not self for cb in self.learn.cbs):
            raise RuntimeError("two profilers cannot run at once; attach one ProfilerCallback")
        if is_profiling():
            raise RuntimeError("a torch profiler is running already; end it before the fit begins")
        found = layers_to_profile(self.model, self.modules)
        if rank == min(self.ranks):
            self.schedule.warn_if_longer(getattr(self.learn, "dls", None), self.n_epoch)
        return found

    def before_train(self) -> None:
        if self._counts():
            self._windows.begin_step(self.learn.between_batches)

    before_validate = before_train

    def after_batch(self) -> None:
        if self._counts():
            self._windows.end_step()
            self.before_train()

    def after_train(self) -> None:
        if not self.learn.is_nested:
            self._windows.drop_step()  # begun for a batch that did not come

    after_validate = after_train

    def after_fit(self) -> None:
        self._windows.close()

    def _counts(self) -> bool:
        """Whether this step is covered by the schedule; a validation in the middle of a step is not."""
        return (
            self._is_profiled
            and self.learn.fitting
            and not self.learn.is_nested
            and self.schedule.covers(self.training)
        )

    def _follow(self, run: bool) -> None:
        (self.learn.follow_phases if run else self.learn.leave_phases)(self._windows)


def _check_ranks(ranks: Iterable[int]) -> tuple[int, ...]:
    if isinstance(ranks, str | int) or not isinstance(ranks, Iterable):
        raise TypeError(f"ranks is {ranks!r:.80}; give numbers of ranks, such as (0, 7)")
    numbers = tuple(check_count("ranks", rank, least=0) for rank in ranks)
    if not numbers:
        raise ValueError("ranks is empty; give numbers of ranks, such as (0, 7)")
    return numbers
