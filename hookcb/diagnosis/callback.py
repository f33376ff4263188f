"""Diagnose: watches a training, and says at its end what is wrong with it."""

from collections.abc import Callable
from typing import Any, Literal

from hookcb.activations.callback import ActivationStats
from hookcb.core.arguments import check_number
from hookcb.core.callback import Callback
from hookcb.core.console import show, warn
from hookcb.core.events import CancelFitException
from hookcb.diagnosis.evidence import Evidence
from hookcb.diagnosis.falling import falls_slowly
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.gather import gather
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.probes.one_batch import add_preflight
from hookcb.diagnosis.probes.suite import raised
from hookcb.diagnosis.recorder import Watching
from hookcb.diagnosis.verdict import Verdict
from hookcb.gradients.callback import GradientHealth
from hookcb.training.progress import Progress

OnSick = Literal["warn", "stop", "ignore"] | Callable[[Verdict], object]
FIRST_LOOK, LATER = 20, 10  # the number of batches after which the state is judged, and how that grows


class Diagnose(Watching):
    """Watches a training closely at its beginning, then ever more rarely, and says what is wrong with it.

    It brings `ActivationStats` and `GradientHealth`, where these are not there, and looks at inputs, targets,
    modes, loss, optimizers and time by itself. The verdict is printed at the end of the fit; `diagnose()` of
    the learner, or of the watch, gives it at any time. The training is to the bit what it is without.

    Args:
        on_sick: what to do when the training is found to be sick: "warn"; "stop", which warns and ends the
            fit, or sets `stop_requested` of a watch, whose loop is not ours to end; "ignore", which leaves it to
            the verdict at the end; or a function that is called with the verdict, once in
            a fit; it may raise `CancelFitException`. It is looked for after batches 20, 200, 2,000 …, and
            when the loss or a gradient is not finite.
        budget: share of the batches that it may look at closely, 0..1. The first 20 batches come on top, and
            one is looked at whenever their number has doubled. No clock decides, so that the same training
            gets the same verdict on a machine that is busy.
        show: whether to print the verdict at the end; within `learn.no_logging()` it is not.
        name: what the learner calls it.

    Attributes:
        verdict: of the last fit, None before its end.

    Raises:
        TypeError, ValueError: if `on_sick` or `budget` is invalid.

    >>> from hookcb import Diagnose, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(4, cbs=Diagnose())
    >>> learn.diagnose().status
    'healthy'
    """

    def __init__(
        self, on_sick: OnSick = "warn", *, budget: float = 0.02, show: bool = True, name: str = "diagnosis"
    ) -> None:
        if on_sick not in ("warn", "stop", "ignore") and not callable(on_sick):
            error = ValueError if isinstance(on_sick, str) else TypeError
            raise error(
                f"on_sick is {on_sick!r:.80}; give 'warn', 'stop', 'ignore' or a function of the verdict"
            )
        share = check_number("budget", budget, 0, 1, closed=True, hint=", the share of batches to look at")
        super().__init__(float(share), name=name)
        self.on_sick, self.show = on_sick, show
        self.verdict: Verdict | None = None

    def before_fit(self) -> None:
        self.verdict = None
        self._next_look, self._has_told = FIRST_LOOK, False
        super().before_fit()

    def after_batch(self) -> None:
        super().after_batch()
        probes = self._probes
        if probes is None or not self.training:
            return
        if probes.n_batches >= self._next_look:
            self._next_look *= LATER
            probes.is_alarmed = True
        if probes.is_alarmed:
            probes.is_alarmed = False
            self.react()

    def after_fit(self) -> None:
        if self._probes is None:
            return
        self._probes.guarded(self._probes.look_at_end, self.learn, raised())
        verdict = judge(evidence := self.evidence())
        if self._probes.look_at_labels(self.learn, verdict.findings, falls_slowly(evidence)):
            verdict = judge(evidence := self.evidence())
        self.end(evidence)
        self.verdict = verdict
        if self.show and not self._is_quiet():
            show(verdict)

    def _is_quiet(self) -> bool:
        can_be = hasattr(self.learn, "no_logging")
        return can_be and not any(isinstance(cb, Progress) for cb in self.learn.cbs)

    def judge(self) -> Verdict:
        """The verdict on what was recorded so far, or in the last fit."""
        return judge(self.evidence()) if self.verdict is None else self.verdict

    def react(self) -> None:
        """Does what `on_sick` says if the training is sick."""
        if self.on_sick == "ignore":
            return
        verdict = self.judge()
        if verdict.status != "sick" or verdict.primary is None:
            return
        if not self._has_told:
            self._has_told = True
            if callable(self.on_sick):
                self.on_sick(verdict)
            else:
                warn(f"{verdict.primary.head}: {verdict.primary.message}")
        if self.on_sick == "stop" and self._is_followed:
            self.learn.stop_requested = True  # for the loop to look at, as it is not ours to end
        elif self.on_sick == "stop":
            raise CancelFitException


def diagnose_loop(loop: Any) -> Verdict:
    """What is wrong with the training of a loop; by its `Diagnose`, else by what other callbacks recorded.

    Of a learner without `Diagnose`, outside of a fit, one batch is looked at too; see `add_preflight`.

    Raises:
        RuntimeError: where nothing is recorded.
    """
    # those of fits that have ended are attributes still
    named = [cb for cb in vars(loop).values() if isinstance(cb, Callback)]
    cbs = [*loop.cbs, *(cb for cb in named if not any(cb is other for other in loop.cbs))]
    own = next((cb for cb in cbs if isinstance(cb, Diagnose)), None)
    if own is not None:
        return own.judge()
    records = [cb for cb in cbs if isinstance(cb, ActivationStats | GradientHealth)]
    evidence = Evidence()
    if records:
        evidence = gather(cbs, Frame.of(loop.model, [] if loop.opt is None else [loop.opt]))
    is_followed = not hasattr(loop, "get_loss")  # a loop that hookcb does not run
    if is_followed and records:
        evidence.unseen = dict(loop.coverage.missing)
    elif is_followed:
        raise RuntimeError("nothing is recorded in this loop; give watch a Diagnose(), cbs=Diagnose()")
    elif not evidence.n_batches:
        raise RuntimeError("nothing is recorded yet; train first, learn.fit(1, cbs=Diagnose())")
    else:
        add_preflight(evidence, loop, cbs)
    return judge(evidence)
