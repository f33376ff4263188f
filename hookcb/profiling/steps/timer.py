"""StepTimer: times every step by phase, at almost no cost."""

from typing import Any

from hookcb.core import orders
from hookcb.core.arguments import check_count
from hookcb.core.batch import n_samples
from hookcb.core.callback import Callback
from hookcb.core.fetches import follow_starts, leave_starts
from hookcb.hooks.modules import device_of
from hookcb.processes.stragglers import WAITING, RankGather
from hookcb.profiling.phases import PhaseMarker, track_phases, untrack_phases
from hookcb.profiling.steps.clock import CudaStepClock, LoaderStarts, LoaderWaits, PhaseInside, StepClock
from hookcb.profiling.steps.incidents import Incidents
from hookcb.profiling.steps.readings import StepRecords
from hookcb.profiling.steps.times import STEP_PHASES
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
            `backward`, `optimizer`, `callbacks`, `other` and `total`, `n_samples`, and `notes`: "first batch
            of an epoch", "cancelled", "validation" (in the middle of the batch), "checkpoint written",
            "compilation", "garbage collection of 12 ms". On CUDA also `device_forward` …. A resumed fit
            has only its own steps.

    Raises:
        TypeError, ValueError: If an argument is invalid.

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

    def __init__(self, keep: int = 5_000, on_valid: bool = False, *, name: str | None = None) -> None:
        super().__init__(name=name)
        check_count("keep", keep, "steps", least=2)
        self.run_valid, self.keep = on_valid, keep
        self.records = StepRecords(keep)
        self._clock: StepClock | None = None  # for the training or validation in progress
        self._markers: list[PhaseMarker] = []
        self._incidents: Incidents | None = None  # while a fit runs
        self._fetches: LoaderWaits | None = None  # during a fit in an external loop
        self._starts: LoaderStarts | None = None
        self._gather: RankGather | None = None  # during a fit of several ranks

    def before_fit(self) -> None:
        self.records = StepRecords(self.keep)
        device = device_of(self.model)
        for part in ("train", "valid") if self.run_valid else ("train",):
            store, between = self.records.stores[part], self.learn.between_batches
            is_cuda = device.type == "cuda"
            clock = CudaStepClock(store, device, between=between) if is_cuda else StepClock(store, between)
            follows = part == "train", part == "valid"
            name = f"{self.name}_{part}"
            self._markers += track_phases(self.learn, name, clock.begin, *follows, last=self.order)
            self.records.clocks[part] = clock
        self._clock = self.records.clocks.get("train" if self.training else "valid")  # if added during a fit
        self._incidents = Incidents(self._note)
        self._incidents.open()
        if self.learn.ranks.world > 1:
            waits = PhaseInside(WAITING, lambda: self._clock)
            self._gather = RankGather(self.learn.ranks, self.model, STEP_PHASES, waits)
            self.records.ranks = self._gather.times
            self.records.clocks["train"].listener = self._gather.add
        if self.learn.between_batches != "data":
            self._fetches = LoaderWaits(lambda: self._clock)
            self._starts = LoaderStarts(self._fetches, lambda: self._clock)
            self.learn.follow_fetches(self._fetches)
            follow_starts(self._starts)

    def before_train(self) -> None:
        self._begin("train")

    def before_validate(self) -> None:
        if self.learn.is_nested:
            self._note("validation")
        else:
            self._begin("valid")

    def _begin(self, part: str) -> None:
        self._clock = self.records.clocks.get(part) if self._incidents is not None else None
        if self._incidents is not None and self._clock is not None:
            self._incidents.follow(self.learn.cbs)
            self._clock.start(0.0 if self._fetches is None else self._fetches.take())

    def after_cancel_batch(self) -> None:
        if self.training or not self.learn.is_nested:
            self._note("cancelled")

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
        if self._gather is not None and not self.learn.is_nested:
            self._gather.end_training()
        if self._fetches is not None:
            self._clock = None  # what the loader does now is for the next epoch

    after_cancel_epoch = after_cancel_fit = after_train  # then there is no `after_train`

    def after_validate(self) -> None:
        if self._fetches is not None:
            self._clock = None

    def after_fit(self) -> None:
        if self._fetches is not None and self._starts is not None:
            self.learn.leave_fetches(self._fetches)
            leave_starts(self._starts)
            self._fetches = self._starts = None
        untrack_phases(self.learn, self._markers)
        if self._gather is not None:
            self._gather.close()
            self.records.clocks["train"].listener = self._gather = None
        if self._incidents is not None:
            self._incidents.close()
        self._incidents = self._clock = None

    def _note(self, text: str) -> None:
        if self._clock is not None:
            self._clock.note(text)

    def __getstate__(self) -> dict[str, Any]:
        of_a_fit: dict[str, Any] = {"_clock": None, "_markers": [], "_incidents": None, "_fetches": None}
        of_a_fit |= {"_gather": None, "_starts": None}
        return super().__getstate__() | of_a_fit
