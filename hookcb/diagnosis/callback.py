"""Diagnose: watches a training and reports what is wrong with it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from hookcb.activations.callback import ActivationStats
from hookcb.core import orders
from hookcb.core.arguments import check_number
from hookcb.core.callback import Callback
from hookcb.core.callback_list import is_among
from hookcb.core.console import attempt, log, show, warn
from hookcb.core.events import CancelFitException, Event
from hookcb.core.switch import OFF, is_off
from hookcb.diagnosis.dispatcher import Dispatcher
from hookcb.diagnosis.failures import describe_failure, is_failure, note_end
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.faults.gradients.compiled import CompiledGradients
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.gather import gather, note_unseen, recorded
from hookcb.diagnosis.judge import ALONE, judge
from hookcb.diagnosis.led import Led, LedHealth, LedStats, LedTimer
from hookcb.diagnosis.measurements.clock import Clock
from hookcb.diagnosis.measurements.largest_losses import LargestLosses
from hookcb.diagnosis.measurements.outside import OutsideParameters
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.preflight import add_preflight
from hookcb.diagnosis.ranks import Note, Posted, Together, of_all, states_of
from hookcb.diagnosis.run import Run, Skipped
from hookcb.diagnosis.verdict import Finding, Status, Verdict
from hookcb.gradients.callback import GradientHealth
from hookcb.hooks.modules import ModelGoneError, has_params, named_modules, without_wrappers
from hookcb.processes.groups import name_own_rank, name_ranks
from hookcb.processes.hangs import Lookout, Terminated, follow
from hookcb.profiling.steps.timer import StepTimer
from hookcb.training.progress import Progress

OnSick = Literal["warn", "stop", "ignore"] | Callable[[Verdict], object]
FIRST_CHECK, CHECK_GROWTH = 20, 10  # check after batch 20, then after ten times as many
N_EVAL = 4  # batches of each validation whose inputs and outputs are shown
LEVELS = {  # at which the headline of a verdict is logged
    "healthy": logging.INFO,
    "unknown": logging.WARNING,
    "suspect": logging.WARNING,
    "sick": logging.ERROR,
}
SWITCHED_OFF = Verdict("unknown", None, (), (), (), OFF)
SHOWN_OF_EVAL = (Event.BEFORE_BATCH, Event.AFTER_PRED, Event.AFTER_LOSS)


@runtime_checkable
class TakesVerdict(Protocol):
    """A callback that gets the verdict of each fit, as `Log` does; an error in it becomes a warning."""

    def take_verdict(self, verdict: Verdict) -> object:
        """Takes the verdict, once the fit has ended or failed."""


class Diagnose(Callback):
    """Watches a training closely at first, then less and less often, and reports what is wrong with it.

    It attaches its own `ActivationStats` and `GradientHealth`, and checks inputs, targets, train and eval
    modes, loss, optimizers and time itself. The verdict is printed at the end of the fit; `diagnose()` of the
    learner or the watch returns it at any time. The training is bit-identical with and without it. With
    HOOKCB=0 in the environment it does nothing, and the verdict is UNKNOWN.

    Args:
        on_sick: what to do if the training is sick: "warn"; "stop", which warns and ends the fit, or sets
            `stop_requested` of a watch, because hookcb cannot end that loop; "ignore", which waits for the
            verdict at the end; or a function that is called with the verdict once per fit and may raise
            `CancelFitException`. Checked after batches 20, 200, 2,000 …, and when the loss or a gradient is
            not finite.
        budget: share of the batches to inspect closely, 0..1. The first 20 batches are not counted, and a
            batch is always inspected when the number of batches has doubled. The choice does not depend on
            the clock, so the same training gets the same verdict on a busy machine.
        compare_compiled: whether to compare the gradients of a compiled model, in the first batch, with those
            of the same batch without torch.compile; needs the memory and time of a few batches.
        show: whether to print the verdict at the end; it is never printed within `learn.no_logging()`. Its
            headline is logged in any case, by the logger "hookcb" of `logging`.
        name: its name on the learner.

    Attributes:
        is_wanted: whether the current batch, and the step it leads to, are inspected.
        verdict: verdict of the last fit, None until that ends.
        reason: why it has ended the fit, or asked a loop to end; None if it has not.

    Raises:
        TypeError, ValueError: If `on_sick` or `budget` is invalid.

    >>> from hookcb import Diagnose, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(4, cbs=Diagnose())
    >>> learn.diagnose().status
    'healthy'
    """

    default_name = "diagnosis"  # diagnose is a method of a Learner
    order = orders.DIAGNOSE
    run_valid = False
    run_lr_find = False  # it tries rates that are too high on purpose
    is_wanted = False
    logs = True  # the headline, as the logger "hookcb"
    _users_error: Exception | None = None  # while it is raised

    def __init__(
        self,
        on_sick: OnSick = "warn",
        *,
        budget: float = 0.02,
        compare_compiled: bool = False,
        show: bool = True,
        name: str | None = None,
    ) -> None:
        if on_sick not in ("warn", "stop", "ignore") and not callable(on_sick):
            error = ValueError if isinstance(on_sick, str) else TypeError
            raise error(
                f"on_sick must be 'warn', 'stop', 'ignore' or a function of the verdict, got {on_sick!r:.80}"
            )
        share = check_number("budget", budget, 0, 1, closed=True, hint=", the share of batches to inspect")
        super().__init__(name=name)
        self.on_sick, self.show, self.budget = on_sick, show, float(share)
        self.compare_compiled = compare_compiled
        self.verdict: Verdict | None = None
        self.reason: str | None = None
        self._told: dict[str, Finding] = {}  # errors told in this fit, by code
        self._final: Run | None = None  # of the last fit that ended
        self._dispatcher: Dispatcher | None = None  # while a fit runs
        self._led: list[Led] = []  # likewise
        self._posted: Posted | None = None  # likewise, in a watched loop on several ranks
        self._lookout: Lookout | None = None  # likewise, on several processes

    # ---- events

    def acts(self, event: str, training: bool) -> bool:
        """Whether it acts at an event: in a validation only where a batch is shown, see `N_EVAL`."""
        return super().acts(event, training) or (self.run and event in SHOWN_OF_EVAL)

    def before_fit(self) -> None:
        self.verdict = self.reason = self._final = None
        self._told = {}
        self._next_check, self._has_reacted = FIRST_CHECK, False
        self._is_new_step, self.is_wanted, self._n_eval = True, False, 0
        if is_off():
            self.verdict = SWITCHED_OFF
            return
        self._dispatcher = dispatcher = Dispatcher(
            Run(loop=self.learn), [*FAULTS.values(), LargestLosses], self.budget
        )
        dispatcher.run.measured(CompiledGradients).is_wanted = self.compare_compiled
        self._of_rank, self._posted = name_own_rank(), None  # the group may be gone at the end
        self._frame = dispatcher.guarded("frame", Frame.of, self.model, []) or Frame()
        self._names = {id(m): name or type(m).__name__ for name, m in named_modules(self.model).items()}
        self._led = list(self._to_lead())
        for cb in self._led:
            cb.leader = self
        dispatcher.run.measured(Clock).own = (self, *self._led)
        dispatcher.begin()
        self.learn.add_cbs(self._led)

    def _to_lead(self) -> Iterator[Led]:
        """The callbacks that record for it."""
        model, cbs = self.model, self.learn.cbs
        kinds: list[tuple[type[Led], dict[str, Any]]] = [(LedHealth, {"detail_every": 1})]
        if any(m is not model for m in model.modules()) or has_params(model):
            kinds.insert(0, (LedStats, {"include_paramless": True}))
        if self.learn.ranks.world > 1 and not any(isinstance(cb, StepTimer) for cb in cbs):
            kinds.append((LedTimer, {}))
        taken = {cb.name for cb in cbs}
        for kind, options in kinds:
            name = kind.usual_name
            yield kind(**options, name=f"{self.name}_{name}" if name in taken else name)

    def see_output(self, m: nn.Module, output: Any) -> None:
        """Shows a layer's output, in a batch that is inspected, to what looks at that."""
        if self._dispatcher is not None:
            self._dispatcher.emit_output(self._names.get(id(m), ""), m, output)

    def see_compiled_output(self, m: nn.Module, output: Tensor | None) -> None:
        """Shows the output of a layer in compiled code, None in a CUDA graph, where nothing may be copied."""
        if self._dispatcher is not None:
            self._dispatcher.emit("on_compiled_output", self._names.get(id(m), ""), m, output)

    def see_compiled_operation(self, layer: str, what: str, xs: Any, numbers: Any) -> None:
        """Shows an operation in compiled code, with its tensors, or None if it is met, and hides these."""
        self._emit("on_compiled_operation", layer, what, xs, numbers)

    def before_batch(self) -> None:
        if (dispatcher := self._dispatcher) is None:
            return
        if not self.learn.training:
            self._n_eval += 1
            return self._show_eval("on_eval_batch")
        run, schedule = dispatcher.run, dispatcher.schedule
        if not run.n_batches:
            self._meet_others()
        if self._is_new_step or not run.n_steps:  # decided once for all batches of a step
            self._is_new_step, self.is_wanted = False, schedule.is_due()
            run.noting = schedule.is_noted() or self.is_wanted
        run.looking = self.is_wanted
        dispatcher.emit("on_batch")

    def _meet_others(self) -> None:
        """Begins to note where this rank is, and to leave notes for the others of a loop we do not run."""
        if self._lookout is None:
            self._lookout = follow(self.learn, self._names, self._end_by_signal)
        if self._posted is None and self.learn.is_external and (board := self.learn.board) is not None:
            kind = type(without_wrappers(self.model)).__name__
            self._posted, self._of_rank = Posted(board, kind), name_ranks([board.rank])

    def _show_eval(self, event: str) -> None:
        """Shows a batch of the validation, if it is one of the first."""
        if self._n_eval <= N_EVAL:
            self._emit(event)

    def after_pred(self) -> None:
        if not self.learn.training:
            return self._show_eval("on_eval_prediction")
        self._emit("on_prediction")

    def after_loss(self) -> None:
        if self._dispatcher is None:
            return
        if not self.learn.training:
            return self._emit("on_eval_loss")
        self._dispatcher.show_loss()

    def before_backward(self) -> None:
        self._emit("on_backward")

    def after_backward(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.end_backward()

    def before_step(self) -> None:
        if (dispatcher := self._dispatcher) is None:
            return
        dispatcher.emit("on_step")
        if dispatcher.run.looking and dispatcher.run.measured(OutsideParameters).has_joined:
            for cb in self._led:
                if isinstance(cb, LedHealth):
                    cb.look_again()

    def after_step(self) -> None:
        self._is_new_step = True
        if self._dispatcher is not None:
            self._dispatcher.end_step()

    def after_cancel_backward(self) -> None:
        self._emit("on_cancel", "backward")

    def after_cancel_step(self) -> None:
        self._emit("on_cancel", "step")

    def after_cancel_batch(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.run.looking = False
        self._emit("on_cancel", "batch")

    def after_train(self) -> None:
        self._emit("on_epoch")

    def before_validate(self) -> None:
        self._n_eval = 0
        self._emit("on_validation")

    def after_validate(self) -> None:
        self._emit("on_validated")

    def _emit(self, event: str, *args: Any) -> None:
        if self._dispatcher is not None:
            self._dispatcher.emit(event, *args)

    def after_batch(self) -> None:
        if (dispatcher := self._dispatcher) is None:
            return
        dispatcher.end_batch()
        run = dispatcher.run
        is_alarmed, dispatcher.is_alarmed = self.learn.agree_on_alarm(dispatcher.is_alarmed), False
        is_check = run.n_batches >= self._next_check
        if is_check:
            self._next_check *= CHECK_GROWTH
        if is_check or is_alarmed:
            self.react(is_check)
        elif self._posted is not None and self._posted.asks and self._posted.has_news():
            self._tell_of_others(self._posted)

    def after_fit(self) -> None:
        if (dispatcher := self._dispatcher) is None:
            return
        error, lookout = self.learn.fit_error, self._lookout
        hang = lookout and dispatcher.guarded("events", lookout.end, self.learn, error)
        if hang:
            dispatcher.run.lack(Skipped(hang), "hang")
        if error is not None and is_failure(error):
            dispatcher.guarded("events", note_end, dispatcher.run, error)
            dispatcher.emit("on_error", error)
        dispatcher.emit("on_end")
        # after an error, others may not come
        ranks = Together(self.learn.ranks) if error is None else ALONE
        run = Run()
        try:
            own = run = self.evidence()
            verdict, run = self._judge(own, ranks)
            doubt = error is None and dispatcher.doubt(own, verdict.findings)
            if error is None and any(self.learn.ranks.max([doubt])):
                own = self.evidence()
                verdict, run = self._judge(own, ranks)
            if self._posted is not None:
                ended = f"{type(error).__name__}: {str(error)[:80]}" if is_failure(error) else ""
                self._posted.end(self._note(own, verdict, ended))
                verdict, run = self._judge(own, self._posted)
        finally:
            self._end(run)
        if run.add_failures(dispatcher.run) and self._posted is None:  # of what has just failed
            verdict, _ = self._judge(run, ALONE)
        self.verdict = verdict
        for cb in self.learn.cbs:
            if isinstance(cb, TakesVerdict):
                attempt(partial(cb.take_verdict, verdict))
        if self._is_to_show(verdict):
            if self.logs and (self.learn.ranks.is_main or verdict.of_rank):
                log(LEVELS[verdict.status], verdict.headline)
            if self.show and not self._is_quiet():
                show(verdict)
        self._dispatcher = self._posted = self._lookout = None
        if lookout is not None:
            lookout.leave(self.learn)

    def _end_by_signal(self) -> None:
        """Ends a loop that hookcb does not run, and tells the verdict, as SIGTERM ends the process."""
        loop: Any = self.learn
        if loop.is_external:
            loop.close(Terminated("SIGTERM"))

    def _is_to_show(self, verdict: Verdict) -> bool:
        """Whether this rank shows the verdict: not one that rank 0 shows for all."""
        return self._posted is None or not self._posted.rank or verdict.of_rank == self._of_rank

    def _end(self, run: Run) -> None:
        """Removes all hooks at the end of the fit; what was recorded stays as plain values in `run`."""
        self._final = run
        if self._dispatcher is not None:
            self._dispatcher.close()
        led, self._led = self._led, []
        try:
            self.learn.remove_cbs([cb for cb in led if is_among(cb, self.learn.cbs)])
        finally:
            for cb in led:
                cb.leader = None  # its records can be read without it

    # ---- the verdict

    def evidence(self) -> Run:
        """The run of this fit so far, or of the last one.

        Raises:
            RuntimeError: If there was no fit yet.
        """
        if self._final is not None:
            return self._final
        if (dispatcher := self._dispatcher) is None:
            raise RuntimeError("nothing is recorded yet; train first, learn.fit(1, cbs=Diagnose())")
        dispatcher.guarded("frame", self._look_at_model, dispatcher.run)
        run = dispatcher.told(self._frame)
        if self.learn.is_external:
            dispatcher.guarded("unseen", note_unseen, run, self.learn)
        dispatcher.guarded("events", gather, [*self._led, *self.learn.cbs], self._frame, run, dispatcher)
        run.add_failures(dispatcher.run)
        return run

    def _look_at_model(self, run: Run) -> None:
        with suppress(ModelGoneError):  # a watched model may have been freed
            self._frame = Frame.of(self.model, run.measured(Steps).optimizers.values())

    def _judge(self, run: Run, ranks: Together) -> tuple[Verdict, Run]:
        """Verdict on what was recorded, and the run of all ranks, which call this together."""
        told, dispatcher = tuple(self._told.values()), self._dispatcher
        try:
            if ranks.world == 1 or dispatcher is None:
                return replace(judge(run, told=told), of_rank=self._of_rank), run
            # a rank with labels of its own kind may learn nothing, though all together do
            own = [finding for finding in judge(run).findings if finding.code == "loss.trivial"]
            merged = of_all(run, ranks.states(states_of(run, dispatcher)), ranks, dispatcher)
            return judge(merged, ranks, own, told), merged
        except Exception as error:  # a verdict that says why there is none is better than none
            if self.learn.ranks.world > 1 and ranks.world > 1:  # others may wait in a collective
                raise
            run.note(describe_failure("a part of Diagnose", error))
            return self._no_verdict(run), run

    def _note(self, run: Run, verdict: Verdict, ended: str | None = None) -> Note:
        """A note on this rank for the other ranks of a watched loop."""
        assert self._dispatcher is not None
        assert self._posted is not None
        states, told = states_of(run, self._dispatcher), tuple(self._told.values())
        kind = self._posted.kind
        return Note(kind, run.n_batches, states, verdict.findings, verdict.gaps, told, ended)

    def _no_verdict(self, run: Run) -> Verdict:
        """Verdict if none can be made: what was told, and why there is no more."""
        notes, told = tuple(run.notes), tuple(self._told.values())
        status: Status = "sick" if told else "unknown"
        return Verdict(status, next(iter(told), None), told, (), notes, "; ".join(notes))

    # ---- failures

    def takes_error(self, error: Exception, event: str) -> bool:
        theirs, self._users_error = self._users_error, None
        is_refusal = event == Event.BEFORE_FIT  # of a callback that is attached
        dispatcher = self._dispatcher
        # on several ranks others may wait for this one in a collective
        if error is theirs or is_refusal or dispatcher is None or self.learn.ranks.world > 1:
            return False
        dispatcher.fail("events", error)
        if event == Event.AFTER_FIT:
            self.verdict = self._no_verdict(dispatcher.run) if self.verdict is None else self.verdict
            dispatcher.guarded("events", self._end, Run())
            self._dispatcher = None
        return True

    def take_error_of(self, cb: Led, error: Exception) -> bool:
        """Whether an error of a callback that it leads is contained, which then does nothing more."""
        if self._dispatcher is None or self.learn.ranks.world > 1:
            return False
        self._dispatcher.fail(cb.part, error)
        cb.stop()
        return True

    def _is_quiet(self) -> bool:
        has_progress = hasattr(self.learn, "no_logging")
        return has_progress and not any(isinstance(cb, Progress) for cb in self.learn.cbs)

    def judge(self) -> Verdict:
        """Verdict on the evidence so far in this fit, or of the last one."""
        return self._judge(self.evidence(), ALONE)[0] if self.verdict is None else self.verdict

    def react(self, is_check: bool = True) -> None:
        """Acts on a sick training as `on_sick` says; warns or calls the function once per fit.

        Args:
            is_check: whether other ranks of a watched loop get to know what this one knows in any case.
        """
        may_tell = self._may_tell()
        if not may_tell and (self._posted is None or not is_check):
            return
        run = self.evidence()
        verdict, _ = self._judge(run, Together(self.learn.ranks))
        is_told = may_tell and self._keep_told(verdict)
        if self._posted is not None:
            self._posted.post(self._note(run, verdict))
        if is_told:
            self._tell(verdict)

    def _may_tell(self) -> bool:
        return self.on_sick != "ignore" and (not self._has_reacted or self.on_sick == "stop")

    def _keep_told(self, verdict: Verdict) -> bool:
        """Keeps the errors that are to be told, for the last word; False if there are none."""
        told = [f for f in verdict.findings if f.severity == "error" and not (f.consequence_of or f.is_slow)]
        is_sick = verdict.status == "sick" and verdict.primary is not None
        self._told = {f.code: f for f in told} | self._told if is_sick else self._told
        return is_sick

    def _tell_of_others(self, posted: Posted) -> None:
        """Tells what rank 0 learns from the notes of others, unless one of them has told it."""
        if not self._may_tell():
            return
        verdict, _ = self._judge(self.evidence(), posted)
        known = {finding.code for note in posted.notes.values() for finding in note.told}
        if verdict.primary is not None and verdict.primary.code not in known and self._keep_told(verdict):
            self._tell(verdict)

    def _tell(self, verdict: Verdict) -> None:
        assert verdict.primary is not None
        is_first, self._has_reacted = not self._has_reacted, True
        try:
            if callable(self.on_sick):
                if self.learn.ranks.is_main:
                    self._call(self.on_sick, verdict)
            elif is_first:
                warn(f"{verdict.primary.head}: {verdict.primary.message}")
        except Exception as error:  # of the user's function, or a warning that the user has made an error
            self._users_error = error
            raise
        if self.on_sick == "stop":
            self.reason = _told(verdict)
            if self.learn.honors_stop:
                raise CancelFitException(self.reason)
            self.learn.stop_requested = True  # hookcb cannot end this loop

    def state_dict(self) -> dict[str, Any]:
        """Empty: a resumed fit is recorded from its start."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_dispatcher": None, "_led": [], "_posted": None, "_lookout": None}

    def _call(self, on_sick: Callable[[Verdict], object], verdict: Verdict) -> None:
        try:
            on_sick(verdict)
        except CancelFitException as cancel:
            self.reason = str(cancel) or _told(verdict)
            raise CancelFitException(self.reason) from cancel


def _told(verdict: Verdict) -> str:
    """The fault of a verdict, in one sentence."""
    told = verdict.primary
    return "" if told is None else f"{told.summary}: {told.message.rstrip('.')}"


def recorded_in(loop: Any) -> list[Callback]:
    """Callbacks of a loop, and those of fits that have ended, which are still its attributes."""
    named = [cb for cb in vars(loop).values() if isinstance(cb, Callback)]
    return [*loop.cbs, *(cb for cb in named if not is_among(cb, loop.cbs))]


def diagnose_loop(loop: Any) -> Verdict:
    """Verdict on the training of a loop, from its `Diagnose` or else the records of other callbacks.

    For a learner without `Diagnose`, outside of a fit, one batch is inspected as well; see `add_preflight`.

    Raises:
        RuntimeError: If nothing is recorded.
    """
    if loop.facts.is_off if loop.is_external else is_off():
        return SWITCHED_OFF
    cbs = recorded_in(loop)
    diagnose = next((cb for cb in cbs if isinstance(cb, Diagnose)), None)
    if diagnose is not None:
        return diagnose.judge()
    records = [cb for cb in cbs if isinstance(cb, ActivationStats | GradientHealth)]
    run = recorded(cbs, loop) if records else Run()
    if loop.is_external and records:
        note_unseen(run, loop)
        run.notes += filter(None, [loop.facts.of_rank])
    elif loop.is_external:
        what = "watch a Diagnose(), cbs=Diagnose()" if loop.way == "watch" else "HookcbCallback a Diagnose()"
        raise RuntimeError(f"nothing is recorded in this loop; give {what}")
    elif not run.n_batches:
        raise RuntimeError("nothing is recorded yet; train first, learn.fit(1, cbs=Diagnose())")
    else:
        add_preflight(run, loop, cbs)
    return judge(run)
