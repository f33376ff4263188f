"""Diagnose: watches a training and reports what is wrong with it."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from hookcb.activations.callback import ActivationStats
from hookcb.core.arguments import check_number
from hookcb.core.callback import Callback
from hookcb.core.callback_list import is_among
from hookcb.core.console import attempt, show, warn
from hookcb.core.events import CancelFitException, Event
from hookcb.core.ranks import ALONE, Ranks
from hookcb.diagnosis.falling import falls_slowly
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.gather import gather, note_unseen
from hookcb.diagnosis.guard import Guard
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.on_ranks import compare_batches, keep_losses, share_inputs, share_losses
from hookcb.diagnosis.probes.one_batch import add_preflight
from hookcb.diagnosis.probes.replicas import can_compare
from hookcb.diagnosis.recorder import EvidenceRecorder
from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Finding, Status, Verdict
from hookcb.gradients.callback import GradientHealth
from hookcb.training.progress import Progress

OnSick = Literal["warn", "stop", "ignore"] | Callable[[Verdict], object]
FIRST_CHECK, CHECK_GROWTH = 20, 10  # check after batch 20, then after ten times as many


@runtime_checkable
class TakesVerdict(Protocol):
    """A callback that gets the verdict of each fit, as `Log` does; an error in it becomes a warning."""

    def take_verdict(self, verdict: Verdict) -> object:
        """Takes the verdict, once the fit has ended or failed."""


class Diagnose(EvidenceRecorder):
    """Watches a training closely at first, then less and less often, and reports what is wrong with it.

    It attaches its own `ActivationStats` and `GradientHealth`, and checks inputs, targets, train and eval
    modes, loss, optimizers and time itself. The verdict is printed at the end of the fit; `diagnose()` of the
    learner or the watch returns it at any time. The training is bit-identical with and without it.

    Args:
        on_sick: what to do if the training is sick: "warn"; "stop", which warns and ends the fit, or sets
            `stop_requested` of a watch, because hookcb cannot end that loop; "ignore", which waits for the
            verdict at the end; or a function that is called with the verdict once per fit and may raise
            `CancelFitException`. Checked after batches 20, 200, 2,000 …, and when the loss or a gradient is
            not finite.
        budget: share of the batches to inspect closely, 0..1. The first 20 batches are not counted, and a
            batch is always inspected when the number of batches has doubled. The choice does not depend on
            the clock, so the same training gets the same verdict on a busy machine.
        show: whether to print the verdict at the end; it is never printed within `learn.no_logging()`.
        name: its name on the learner.

    Attributes:
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
    _users_error: Exception | None = None  # while it is raised

    def __init__(
        self,
        on_sick: OnSick = "warn",
        *,
        budget: float = 0.02,
        show: bool = True,
        name: str | None = None,
    ) -> None:
        if on_sick not in ("warn", "stop", "ignore") and not callable(on_sick):
            error = ValueError if isinstance(on_sick, str) else TypeError
            raise error(
                f"on_sick must be 'warn', 'stop', 'ignore' or a function of the verdict, got {on_sick!r:.80}"
            )
        share = check_number("budget", budget, 0, 1, closed=True, hint=", the share of batches to inspect")
        super().__init__(float(share), name=name)
        self.on_sick, self.show = on_sick, show
        self.verdict: Verdict | None = None
        self.reason: str | None = None
        self._told: dict[str, Finding] = {}  # errors told in this fit, by code

    def before_fit(self) -> None:
        self.verdict = self.reason = None
        self._told = {}
        self._next_check, self._has_reacted = FIRST_CHECK, False
        super().before_fit()

    def after_batch(self) -> None:
        super().after_batch()
        if (probes := self._probes) is None:
            return
        is_alarmed = self.learn.agree_on_alarm(probes.is_alarmed)
        probes.is_alarmed = False
        if probes.n_batches >= self._next_check:
            self._next_check *= CHECK_GROWTH
            is_alarmed = True
        if is_alarmed:
            self.react()

    def after_fit(self) -> None:
        if self._probes is None:
            return
        error, guard = self.learn.fit_error, self._guard
        guard.always("events", self._probes.observe_end, self.learn, error)
        ranks = self.learn.ranks if error is None else ALONE  # after an error, others may not come
        evidence = Run()
        try:
            evidence = self.evidence()
            slowly = bool(guard.always("overfit", falls_slowly, evidence))
            verdict = self._judge(evidence, ranks)
            if error is None:
                has_more = self._probes.try_to_overfit(self.learn, verdict.findings, slowly)
                if any(ranks.max([has_more])):
                    verdict = self._judge(evidence := self.evidence(), ranks)
        finally:
            self.finish(evidence)
        if new := [note for note in guard.notes if note not in evidence.notes]:  # of what has just failed
            evidence.notes += new
            evidence.partial |= guard.partial
            verdict = self._judge(evidence, ALONE)
        self.verdict = verdict
        for cb in self.learn.cbs:
            if isinstance(cb, TakesVerdict):
                attempt(partial(cb.take_verdict, verdict))
        if self.show and not self._is_quiet():
            show(verdict)

    def _judge(self, evidence: Run, ranks: Ranks) -> Verdict:
        """Verdict on what was recorded; several ranks call this together, and share their losses."""
        told = tuple(self._told.values())
        if ranks.world == 1:
            verdict = self._guard.always("verdict", partial(judge, evidence, told=told))
            return self._no_verdict() if verdict is None else verdict
        # a rank with labels of its own kind may learn nothing, though all together do
        own = [finding for finding in judge(evidence).findings if finding.code == "loss.trivial"]
        evidence.notes.append(f"{ranks.world} ranks")
        keep_losses(evidence, ranks)
        share_losses(evidence, ranks)
        share_inputs(evidence, ranks)
        compare_batches(evidence, ranks, can_compare(self.learn))
        return judge(evidence, ranks, own, told)

    def _no_verdict(self) -> Verdict:
        """Verdict if none can be made: what was told, and why there is no more."""
        notes, told = tuple(self._guard.notes), tuple(self._told.values())
        status: Status = "sick" if told else "unknown"
        return Verdict(status, next(iter(told), None), told, (), notes, "; ".join(notes))

    def takes_error(self, error: Exception, event: str) -> bool:
        theirs, self._users_error = self._users_error, None
        is_taken = error is not theirs and super().takes_error(error, event)
        if is_taken and event == Event.AFTER_FIT:
            if self._probes is not None:
                self.finish(Run())
            self.verdict = self._no_verdict() if self.verdict is None else self.verdict
        return is_taken

    def _is_quiet(self) -> bool:
        has_progress = hasattr(self.learn, "no_logging")
        return has_progress and not any(isinstance(cb, Progress) for cb in self.learn.cbs)

    def judge(self) -> Verdict:
        """Verdict on the evidence so far in this fit, or of the last one."""
        return self._judge(self.evidence(), ALONE) if self.verdict is None else self.verdict

    def react(self) -> None:
        """Acts on a sick training as `on_sick` says; warns or calls the function once per fit."""
        if self.on_sick == "ignore" or (self._has_reacted and self.on_sick != "stop"):
            return
        verdict = self._judge(self.evidence(), self.learn.ranks)
        if verdict.status != "sick" or verdict.primary is None:
            return
        is_first, self._has_reacted = not self._has_reacted, True
        told = [f for f in verdict.findings if f.severity == "error" and not (f.consequence_of or f.is_slow)]
        self._told = {f.code: f for f in told} | self._told
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

    def _call(self, on_sick: Callable[[Verdict], object], verdict: Verdict) -> None:
        try:
            on_sick(verdict)
        except CancelFitException as cancel:
            self.reason = str(cancel) or _told(verdict)
            raise CancelFitException(self.reason) from cancel


def _told(verdict: Verdict) -> str:
    """The fault of a verdict, in one sentence."""
    return "" if verdict.primary is None else f"{verdict.primary.code}: {verdict.primary.message.rstrip('.')}"


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
    cbs = recorded_in(loop)
    diagnose = next((cb for cb in cbs if isinstance(cb, Diagnose)), None)
    if diagnose is not None:
        return diagnose.judge()
    records = [cb for cb in cbs if isinstance(cb, ActivationStats | GradientHealth)]
    evidence = Run()
    if records:
        model, guard = loop.model, Guard()
        frame = guard.call("frame", Frame.of, model, [] if loop.opt is None else [loop.opt]) or Frame()
        evidence = gather(cbs, frame, guard=guard)
    if loop.is_external and records:
        note_unseen(evidence, loop)
    elif loop.is_external:
        what = "watch a Diagnose(), cbs=Diagnose()" if loop.way == "watch" else "HookcbCallback a Diagnose()"
        raise RuntimeError(f"nothing is recorded in this loop; give {what}")
    elif not evidence.n_batches:
        raise RuntimeError("nothing is recorded yet; train first, learn.fit(1, cbs=Diagnose())")
    else:
        add_preflight(evidence, loop, cbs)
    return judge(evidence)
