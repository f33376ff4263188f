"""StepTimer: times every step by phase, at almost no cost."""

from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from hookcb.core import orders
from hookcb.core.arguments import check_count
from hookcb.core.batch import n_samples
from hookcb.core.call_hook import CallHook, Observer
from hookcb.core.callback import Callback
from hookcb.core.clock import Inside
from hookcb.core.fetches import print_error
from hookcb.hooks.modules import device_of
from hookcb.processes.stragglers import WAITING, RankGather
from hookcb.profiling.steps.clock import CudaStepClock, StepClock
from hookcb.profiling.steps.incidents import Incidents
from hookcb.profiling.steps.readings import StepRecords
from hookcb.profiling.steps.times import FIRST_BATCH, STEP_PHASES
from hookcb.records.forward import forwarded, forwarded_property


class StepTimer(Callback):
    """Times every step: waiting for data, forward, loss, backward, optimizer and callbacks.

    Use it for a whole training, to see how much of it waits for data, and which steps took long and why. A
    step lasts from the end of the previous one to its own `after_batch`, including the fetch of its batch and
    the move to the device; in the first of an epoch that is the start of the loader. Time between epochs is
    not counted. Cancelled batches are included, with a note, unless the training ended in them. Nothing waits
    for a GPU; its times come from CUDA events.

    In a loop that is not a Learner's, under `watch` or an adapter, `start` and `data` are the time in a
    DataLoader in the training thread; the rest of the time between two batches is `other`.

    On several ranks these are the times of this rank. Ranks wait for each other in the backward, in which
    they average gradients, with sharded parameters also in the forward; so these phases do not tell who is
    slow. `straggler` compares the others between ranks, every 100 steps. Where hookcb itself waits for
    another rank, that is `other`.

    Args:
        keep: number of steps to keep; of more, every second, fourth … is kept, and the newest. The slowest
            100 are kept too, for `outliers`.
        on_valid: whether to time validation as well, in `valid_times`; one in the middle of a batch is not.
        name: attribute of the learner.

    Attributes:
        times: a `StepTime` for each step: `epoch`, `step`, seconds of `start`, `data`, `forward`, `loss`,
            `backward`, `optimizer`, `callbacks`, `other` and `total`, of `workers`, the part of `start` in
            which a DataLoader started its workers, `n_samples`, and `notes`: "first batch of an epoch",
            "cancelled", "validation" (in the middle of the batch), "checkpoint written", "compilation",
            "garbage collection of 12 ms". On CUDA also `device_forward` …. A resumed fit has only its own
            steps.

    >>> from hookcb import StepTimer, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(2, cbs=StepTimer())
    >>> len(learn.step_timer.times), "first batch of an epoch" in learn.step_timer.times[10].notes
    (20, True)
    >>> learn.step_timer.percentiles()["forward"].p50 > 0
    True
    """

    order = orders.STEP_TIMER
    run_lr_find = False

    times = forwarded_property(StepRecords.times)
    valid_times = forwarded_property(StepRecords.valid_times)
    samples_per_second = forwarded_property(StepRecords.samples_per_second)
    straggler = forwarded_property(StepRecords.straggler)
    percentiles = forwarded(StepRecords.percentiles)
    outliers = forwarded(StepRecords.outliers)
    table = forwarded(StepRecords.table)
    to_frame = forwarded(StepRecords.to_frame)
    report = forwarded(StepRecords.report)
    _repr_html_ = forwarded(StepRecords._repr_html_)

    def __init__(self, keep: int = 5_000, on_valid: bool = False, *, name: str | None = None) -> None:
        super().__init__(name=name)
        check_count("keep", keep, "steps", least=2)
        self.run_valid, self.keep = on_valid, keep
        self.records = StepRecords(keep)
        self._clock: StepClock | None = None  # while a fit runs
        self._incidents: Incidents | None = None
        self._starts: CallHook | None = None
        self._fetches: Inside | None = None  # during a fit in an external loop
        self._gather: RankGather | None = None  # during a fit of several ranks

    def before_fit(self) -> None:
        learn, device = self.learn, device_of(self.model)
        self.records = StepRecords(self.keep)
        store = self.records.stores["train" if self.training else "valid"]  # if added during a fit
        clock = CudaStepClock(store, device) if device.type == "cuda" else StepClock(store)
        clock.in_validation = self.run_valid
        self._clock = self.records.clock = clock
        learn.follow_phases(clock)
        self._incidents = Incidents(clock.note)
        self._incidents.open()
        if learn.ranks.world > 1:
            waits = Inside(clock, WAITING)
            self._gather = RankGather(learn.ranks, self.model, STEP_PHASES, waits)
            self.records.ranks = self._gather.times
        if learn.between_batches != "data":
            self._fetches = Inside(clock, "data")
            learn.follow_fetches(self._fetches)
        starts, gate = self._loader_starts, self._counts_start
        self._starts = CallHook(DataLoader, "__iter__", starts, print_error, nested=False, gate=gate)

    def before_train(self) -> None:
        self._begin("train")

    def before_validate(self) -> None:
        if self._clock is not None and self.learn.is_nested:
            self._clock.note("validation")
        else:
            self._begin("valid")

    def _begin(self, part: str) -> None:
        if self._clock is not None and self._incidents is not None:
            self._incidents.follow(self.learn.cbs)
            gather = self._gather if part == "train" else None
            self._clock.listener = None if gather is None else gather.add
            self._clock.start(self.records.stores[part])

    def after_cancel_batch(self) -> None:
        if self._clock is not None and (self.training or not self.learn.is_nested):
            self._clock.note("cancelled")

    def after_batch(self) -> None:
        learn, clock, incidents = self.learn, self._clock, self._incidents
        if clock is None or incidents is None or (not learn.training and learn.is_nested):
            return  # outside a fit, or in a validation in the middle of a batch
        incidents.report_changes()
        step = learn.train_iter if learn.training else learn.iter
        clock.end(self.epoch, step, n_samples(learn.xb))
        if self._gather is not None and learn.training:
            self._gather.end_batch()

    def after_train(self) -> None:
        if self._clock is not None and not self.learn.is_nested:
            if self._gather is not None:
                self._gather.end_training()
            self._clock.stop()  # what a loader does now is for the next epoch

    after_cancel_epoch = after_cancel_fit = after_train  # then there is no `after_train`

    def after_validate(self) -> None:
        if self._clock is not None and not self.learn.is_nested:
            self._clock.stop()

    def after_fit(self) -> None:
        if self._clock is not None:
            self.learn.leave_phases(self._clock)
            self._clock.listener = None
        if self._fetches is not None:
            self.learn.leave_fetches(self._fetches)
        if self._starts is not None:
            self._starts.remove()
        if self._gather is not None:
            self._gather.close()
        if self._incidents is not None:
            self._incidents.close()
        self._incidents = self._clock = self._starts = self._fetches = self._gather = None

    def _counts_start(self) -> bool:
        """Whether the next batch is the first of a DataLoader whose iterator starts now."""
        if self._clock is None or self.learn.is_nested:
            return False
        return self._fetches is not None or FIRST_BATCH in self._clock.notes

    def _loader_starts(self, loader: DataLoader[Any]) -> Observer:
        clock, fetches = self._clock, self._fetches
        if clock is None:
            return
        if fetches is not None:
            clock.start_loader()
            fetches.begin()
        began = perf_counter()
        try:
            yield
        finally:
            clock.workers += perf_counter() - began if loader.num_workers else 0.0
            if fetches is not None:
                fetches.end()

    def __getstate__(self) -> dict[str, Any]:
        of_a_fit = dict.fromkeys(("_clock", "_incidents", "_starts", "_fetches", "_gather"))
        return super().__getstate__() | of_a_fit
