"""EvidenceRecorder: records the evidence for a diagnosis, at the events of a training."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.events import Event
from hookcb.core.loop import label_of
from hookcb.core.ranks import name_own_rank
from hookcb.core.time_split import TimeSplit
from hookcb.diagnosis.attached import Attached, AttachedHealth, AttachedStats, AttachedTimer
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.gather import gather, note_unseen
from hookcb.diagnosis.guard import Guard
from hookcb.diagnosis.probed import probed_evidence
from hookcb.diagnosis.probes.spent import N_WARM_UP, PREFIX, SpentTime
from hookcb.diagnosis.probes.suite import Probes
from hookcb.diagnosis.run import Run, Spent
from hookcb.diagnosis.schedule import Schedule
from hookcb.hooks.modules import ModelGoneError, has_params
from hookcb.profiling.steps.timer import StepTimer


class EvidenceRecorder(Callback):
    """Attaches `ActivationStats` and `GradientHealth`, runs probes, and builds `evidence` from all.

    On several ranks it attaches a `StepTimer` too, if there is none.

    Args:
        budget: share of the batches to inspect closely, 0..1; see `Schedule`.
        name: its name on the learner.

    Attributes:
        is_wanted: whether the current batch, and the step it leads to, are inspected.
        is_looking: whether it is inspected, and not cancelled yet.
    """

    order = orders.DIAGNOSE
    run_valid = False
    is_wanted = is_looking = False
    run_lr_find = False  # it tries rates that are too high on purpose

    def __init__(self, budget: float, *, name: str | None) -> None:
        super().__init__(name=name)
        self.budget = budget
        self._evidence: Run | None = None  # of the last fit that ended
        self._guard = Guard()  # of this fit
        self._probes: Probes | None = None  # while a fit runs
        self._split: TimeSplit | None = None  # these likewise
        self._spent: SpentTime | None = None
        self._attached: list[Attached] = []
        self._stats: AttachedStats | None = None  # one of these

    def before_fit(self) -> None:
        self._evidence, self._guard = None, Guard()
        self._of_rank = name_own_rank()  # the group may be gone at the end
        self._schedule, self._is_new_step = Schedule(self.budget), True
        self.is_wanted = self.is_looking = self._is_forward = False
        self._is_external = self.learn.is_external
        split, call = self._split_time(), self._guard.call
        self._spent = call("spent", SpentTime, split, self._is_external)
        self._probes = Probes(self.learn, split, self._inspects_call, self._is_external, self._guard)
        self._frame = call("frame", Frame.of, self.model, []) or Frame()
        names = {cb.name for cb in self.learn.cbs}
        defaults = "activation_stats", "gradient_health", "step_timer"
        stats, health, timer = (f"{self.name}_{name}" if name in names else name for name in defaults)
        self._health = AttachedHealth(self, health)
        self._attached = [self._health]
        if any(m is not self.model for m in self.model.modules()) or has_params(self.model):
            self._stats = AttachedStats(self, stats)
            self._attached.insert(0, self._stats)
        if self.learn.ranks.world > 1 and not any(isinstance(cb, StepTimer) for cb in self.learn.cbs):
            self._attached.append(AttachedTimer(self, timer))
        self.learn.add_cbs(self._attached)

    def _split_time(self) -> TimeSplit:
        """Begins to split the time of the training."""
        self._split = split = TimeSplit(self._label, N_WARM_UP)
        self.learn.follow_fetches(split)
        if self.learn.clock is None:  # else a second `Diagnose` does
            self.learn.clock = split
        return split

    def _label(self, cb: Any) -> str:
        is_own = cb is self or any(cb is x for x in self._attached)
        return "" if is_own else f"{PREFIX}{label_of(cb)}"

    def _inspects_call(self) -> bool:
        """Whether to inspect a call of the model that begins now."""
        return self._is_forward and self.learn.training and self.learn.in_loop_thread

    def measure_layer(self, m: nn.Module, output: Any) -> None:
        """Measures a layer's output in an inspected batch; for the hook of `AttachedStats`."""
        if self._probes is not None:
            self._probes.measure_layer(m, output)

    # ---- events

    def before_batch(self) -> None:
        probes, split = self._probes, self._split
        if probes is None:
            return
        if self._is_new_step or not probes.n_steps:  # decided once for all batches of a step
            self._is_new_step, self.is_wanted = False, self._schedule.is_due()
        self.is_looking = self._is_forward = self.is_wanted
        self._probe(Probes.begin_batch)
        if split is not None:
            split.leaves_out = self.is_looking or probes.layer_times.is_timing is True

    def _note_step(self) -> None:
        """Notes who has called a part of a step."""
        if self._spent is not None:
            self._guard.call("lines", self._spent.note_step)

    def after_pred(self) -> None:
        if self.is_looking:
            self._note_step()
        self._probe(Probes.record_pred)

    def after_loss(self) -> None:
        self._probe(Probes.record_loss)

    def before_backward(self) -> None:
        self._is_forward = False  # a later forward is a recomputation by activation checkpointing
        self._probe(Probes.begin_backward)

    def after_backward(self) -> None:
        if self.is_looking:
            self._note_step()
        self._probe(Probes.end_backward)

    def before_step(self) -> None:
        self._probe(self._look_for_params)
        self._probe(Probes.begin_step)

    def _look_for_params(self, probes: Probes, loop: Any, looking: bool) -> None:
        if looking and probes.find_new_params(loop):
            self._health.look_again()

    def after_cancel_backward(self) -> None:
        self._probe(Probes.drop_batch)

    def after_cancel_batch(self) -> None:
        self.is_looking = False
        self._probe(Probes.drop_batch)

    def after_cancel_step(self) -> None:
        self._probe(Probes.cancel_step)

    def after_step(self) -> None:
        if self.is_looking:
            self._note_step()
        self._is_new_step = True
        if (probes := self._probes) is None:
            return
        if not self.is_looking and id(self.learn.opt) not in probes.optimizers:
            self._health.note(self.learn.opt)  # which has not seen it
        self._probe(Probes.end_step)

    def after_batch(self) -> None:
        self._is_forward = False
        self._probe(Probes.end_batch)
        if self._spent is not None and self._is_external:  # the lines of a Learner are known
            self._guard.call("spent", self._spent.end_batch)

    def after_train(self) -> None:
        self._probe(Probes.end_epoch)

    def finish(self, evidence: Run) -> None:
        """Removes all hooks at the end of the fit; what was recorded stays as plain values in `evidence`."""
        if self._probes is not None:
            self._guard.always("events", self._probes.close)
            self._guard.always("events", self._end_split)
            self._evidence, self._probes = evidence, None
        attached, self._attached, self._stats = self._attached, [], None
        try:
            self.learn.remove_cbs([cb for cb in attached if any(cb is x for x in self.learn.cbs)])
        finally:
            for cb in attached:
                cb.owner = None  # its records can be read without the owner

    def _end_split(self) -> None:
        (split, self._split), (spent, self._spent) = (self._split, None), (self._spent, None)
        if spent is not None:
            self._guard.always("lines", spent.lines.close)
        if split is not None:
            split.close()
            self.learn.leave_fetches(split)
            if self.learn.clock is split:
                self.learn.clock = None

    def evidence(self) -> Run:
        """Evidence recorded so far in this fit, or in the last one.

        Raises:
            RuntimeError: If there was no fit yet.
        """
        if self._evidence is not None:
            return self._evidence
        if self._probes is None:
            raise RuntimeError("nothing is recorded yet; train first, learn.fit(1, cbs=Diagnose())")
        guard = self._guard
        guard.always("frame", self._look_at_model, self._probes)
        probed = guard.always("events", probed_evidence, self._probes, self._frame) or Run()
        if self._is_external:
            guard.always("unseen", note_unseen, probed, self.learn)
            probed.notes += [note] if (note := self.learn.facts.of_rank) else []
        probed.looks, probed.of_rank = self._schedule.rule, self._of_rank
        if self._spent is not None:
            probed.spent = guard.always("spent", self._spent.spent) or Spent()
            guard.always("lines", self._spent.add_lines, probed.spent)
        cbs = [*self._attached, *self.learn.cbs]
        if (evidence := guard.always("events", gather, cbs, self._frame, probed, guard)) is None:
            probed.notes += guard.notes
            probed.partial |= guard.partial
            return probed
        return evidence

    def _look_at_model(self, probes: Probes) -> None:
        with suppress(ModelGoneError):  # a watched model may have been freed
            self._frame = Frame.of(self.model, probes.optimizers.values())

    def _probe(self, handler: Callable[[Probes, Any, bool], object]) -> None:
        """Calls a method of the probes; if it fails, the training goes on and the verdict says so."""
        if (probes := self._probes) is not None:
            try:
                handler(probes, self.learn, self.is_looking)
            except Exception as error:  # the training must go on, whatever it is
                self._guard.note("events", error)

    def takes_error(self, error: Exception, event: str) -> bool:
        """Whether an error is contained, so that the training goes on and the verdict tells of it."""
        is_refusal = event == Event.BEFORE_FIT  # of a callback that is attached
        if is_refusal or self.learn.ranks.world > 1:  # others may wait for this rank in a collective
            return False
        self._guard.note("events", error)
        return True

    def takes_error_of(self, cb: Attached, error: Exception) -> bool:
        """Likewise an error of a callback that this has attached, which then does nothing more."""
        if self.learn.ranks.world > 1:
            return False
        self._guard.note(cb.part, error)
        if cb is self._stats:
            self._stats = None
        cb.stop()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Empty: a resumed fit is recorded from its start."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            **dict.fromkeys(("_probes", "_split", "_spent", "_stats")),
            "_attached": [],
        }
