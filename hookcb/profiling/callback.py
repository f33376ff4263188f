"""ProfilerCallback: torch's profiler for a few steps, with a named range for each phase and layer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.torch_private import is_profiling
from hookcb.hooks.modules import Where
from hookcb.profiling.phases import Edge, follow_phases, leave_phases
from hookcb.profiling.readings import ProfileReadings
from hookcb.profiling.window import Windows, check_plan, layers_to_profile

OPTIONS = ("record_shapes", "profile_memory", "with_stack", "with_flops")


class ProfilerCallback(Callback, ProfileReadings):
    """Profiles some steps with `torch.profiler`: where time and memory go, by phase, layer and operator.

    Steps are counted from 0 in this fit; one is from the fetch of its batch to its `after_batch`. In each
    cycle `wait` steps pass, `warmup` steps run with the profiler getting ready, and `active` are profiled.
    Outside of that no hook is on the model. When a window ends, the profiler waits for the device, and takes
    a while to hand out what it has.

    Args:
        wait, warmup, active: number of steps.
        repeat: number of cycles, 0 for as many as there is room for.
        activities: `"cpu"`, `"cuda"`, `"xpu"` or members of `torch.profiler.ProfilerActivity`; by default
            all that there is here.
        record_shapes, profile_memory, with_stack, with_flops: as for `torch.profiler.profile`; with stacks
            each step takes several times as long.
        trace: where Chrome traces go: a file, `.json` or `.json.gz`, or a folder, for TensorBoard.
        on: the steps of `"train"`, `"valid"` or `"all"`.
        modules: layers that get a range, see `find_modules`; by default all modules, `()` for none.
        name: what the learner calls it.

    Attributes:
        profiled_steps: the steps that were profiled whole; `layers()`, `phases()`, `table()` and `report()`
            tell of them.
        compiled: compiled modules, for whose graphs torch's own ranges stand, as inside there are no layers.

    Raises:
        TypeError, ValueError: for arguments that cannot be, `"cuda"` without CUDA among them.
        LookupError: when a fit begins, where `modules` are not there.
        RuntimeError: when a fit begins while another profiler runs, or is attached.

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
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.plan = check_plan(wait, warmup, active, repeat, activities, trace, on)
        self.record_shapes, self.profile_memory = record_shapes, profile_memory
        self.with_stack, self.with_flops, self.modules = with_stack, with_flops, modules

        self._edges: list[Edge] = []
        self._windows, self.compiled = Windows(self.plan, {}, {}, self._follow), tuple[str, ...]()

    @property
    def n_switched(self) -> int:
        """How often the profiler went on or off in this fit; `StepTimer` tells by it in which step."""
        return self._windows.n_switched

    def before_fit(self) -> None:
        if any(isinstance(cb, ProfilerCallback) and cb is not self for cb in self.learn.cbs):
            raise RuntimeError("two profilers cannot run at once; attach one ProfilerCallback")
        if is_profiling():
            raise RuntimeError("a torch profiler is running already; end it before the fit begins")
        layers, self.compiled = layers_to_profile(self.model, self.modules)
        self.plan.warn_if_longer(getattr(self.learn, "dls", None), self.n_epoch)
        options = {name: getattr(self, name) for name in OPTIONS}
        self._windows = Windows(self.plan, layers, options, self._follow)
        covers = self.plan.covers(True), self.plan.covers(False)
        self._edges = follow_phases(self.learn, self.name, self._begin, *covers)
        self._follow(False)

    def before_train(self) -> None:
        self._fetch()

    def before_validate(self) -> None:
        self._fetch()

    def after_batch(self) -> None:
        if self._counts():
            self._windows.end_step()
            self._fetch()

    def after_train(self) -> None:
        if not self.learn.is_nested:
            self._windows.drop_step()  # of the batch that did not come

    def after_validate(self) -> None:
        self.after_train()

    def after_fit(self) -> None:
        try:
            self._windows.close()
        finally:
            leave_phases(self.learn, self._edges)

    def _counts(self) -> bool:
        """Whether this is a step of the fit that is looked at, and no validation in the middle of one."""
        return self.learn.fitting and not self.learn.is_nested and self.plan.covers(self.training)

    def _fetch(self) -> None:
        if self._counts():
            self._windows.begin_step(self.learn.between_batches)

    def _begin(self, phase: str) -> None:
        if phase != self.learn.between_batches and not self.learn.is_nested:
            self._windows.begin_phase(phase)

    def _follow(self, run: bool) -> None:
        for edge in self._edges:
            edge.run = run

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_edges": []}
