"""Diagnose: watches a training, and says at its end what is wrong with it."""

import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from hookcb.callbacks import Progress
from hookcb.diagnosis.brought import BroughtHealth, BroughtStats
from hookcb.diagnosis.evidence import Evidence
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.gather import gather
from hookcb.diagnosis.judge import judge
from hookcb.diagnosis.probes import Probes, raised
from hookcb.diagnosis.schedule import Schedule
from hookcb.diagnosis.verdict import Verdict
from hookcb.events import CancelFitException
from hookcb.modules import has_params
from hookcb.sampling import SamplingCallback

FOLDER = str(Path(__file__).parents[1])
FIRST_LOOK, LATER = 20, 5  # the number of batches after which the state is judged, and how that grows


class Diagnose(SamplingCallback):
    """Watches a training closely at its beginning, then ever more rarely, and says what is wrong with it.

    It brings `ActivationStats` and `GradientHealth`, where these are not there, and looks at inputs, targets,
    modes, loss, optimizers and time by itself. The verdict is printed at the end of the fit; `diagnose()` of
    the learner, or of the watch, gives it at any time. The training is to the bit what it is without.

    Args:
        on_sick: what to do when the training is found to be sick: "warn", or "stop", which ends the fit, or
            sets `stop_asked` of a watch, whose loop is not ours to end. It is looked for after batches 20,
            100, 500 …, and when the loss or a gradient is not finite.
        budget: share of the training's time that it may take, 0..1; the first 20 batches come on top.
        show: whether to print the verdict at the end; within `learn.no_logging()` it is not.
        name: what the learner calls it.

    Attributes:
        verdict: of the last fit, None before its end.

    Raises:
        ValueError: for an `on_sick` or `budget` that cannot be.

    >>> from hookcb import Diagnose, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(4, cbs=Diagnose())
    >>> learn.diagnose().status
    'healthy'
    """

    order = -5  # ahead of those that it brings
    run_lr_find = False  # which looks for a rate that is too high on purpose

    def __init__(
        self, on_sick: str = "warn", *, budget: float = 0.02, show: bool = True, name: str = "diagnosis"
    ) -> None:
        if on_sick not in ("warn", "stop"):
            raise ValueError(f"on_sick is {on_sick!r}; give 'warn' or 'stop'")
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
            raise ValueError(f"budget is {budget!r}; give a share of the training's time, 0 to 1")
        super().__init__(name=name)
        self.on_sick, self.budget, self.show = on_sick, float(budget), show
        self.verdict: Verdict | None = None
        self._evidence: Evidence | None = None
        self._probes: Probes | None = None
        self._brought: list[BroughtStats | BroughtHealth] = []

    def before_fit(self) -> None:
        super().before_fit()
        self.verdict = self._evidence = None
        self._schedule, self._next_look, self._is_new_step = Schedule(self.budget), FIRST_LOOK, True
        self._is_wanted = self._has_warned = self._is_forward = False
        self._is_followed = not hasattr(self.learn, "get_loss")  # a loop that is not ours
        self._probes = Probes(self.learn, self._looks_inside, self._is_followed)
        self._frame = Frame.of(self.model, [])
        names = {cb.name for cb in self.learn.cbs}
        own = "activation_stats", "gradient_health"
        stats, health = (f"{self.name}_{name}" if name in names else name for name in own)
        self._brought = [BroughtHealth(self, health)]
        if any(m is not self.model for m in self.model.modules()) or has_params(self.model):
            self._brought.insert(0, BroughtStats(self, stats))
        self.learn.add_cbs(self._brought)

    def wants(self, i: int) -> bool:
        """Decided once for all batches of a step."""
        if self._is_new_step or not (self._probes and self._probes.n_steps):
            self._is_new_step, self._is_wanted = False, self._schedule.is_due()
        return self._is_wanted

    def is_wanted(self) -> bool:
        """Whether the batch in progress, and the step that it leads to, are looked at."""
        return self._is_wanted

    def _looks_inside(self) -> bool:
        """Whether a call of the model that begins now is looked at."""
        return self._is_forward and self.learn.training and self.learn.is_here

    def see_layer(self, m: nn.Module, output: Any) -> None:
        """A layer has put something out, in a batch that is looked at."""
        if self._probes is None:
            return
        if torch.compiler.is_compiling():
            self._probes.layers.look(m, output)
        else:
            self._probes.guarded(self._probes.layers.look, m, output)

    def before_batch(self) -> None:
        super().before_batch()
        self._is_forward = self.is_looking and self.training
        self._probe(Probes.begin_batch)

    def after_pred(self) -> None:
        if self.is_looking or self._is_followed:  # nobody may tell the loss
            self._probe(Probes.see_pred)

    def after_loss(self) -> None:
        self._probe(Probes.see_loss)

    def before_backward(self) -> None:
        self._is_forward = False  # a forward from here on is recomputation under activation checkpointing
        self._probe(Probes.begin_backward)

    def after_backward(self) -> None:
        self._probe(Probes.see_gradients)

    def before_step(self) -> None:
        self._probe(Probes.begin_step)

    def after_step(self) -> None:
        self._is_new_step = True
        self._probe(Probes.end_step)

    def after_batch(self) -> None:
        super().after_batch()
        self._is_forward = False
        probes = self._probes
        if probes is None or not self.training:
            return
        self._probe(Probes.end_batch)
        self._schedule.took(probes.took, self.is_looking)
        if probes.n_batches >= self._next_look:
            self._next_look *= LATER
            probes.is_alarmed = True
        if probes.is_alarmed:
            probes.is_alarmed = False
            self.react()

    def after_train(self) -> None:
        self._probe(Probes.end_epoch)

    def after_fit(self) -> None:
        if self._probes is None:
            return
        self._probes.guarded(self._probes.look_at_end, self.learn, raised())
        verdict = self.judge()
        if self._probes.look_at_labels(self.learn, verdict.findings):
            verdict = self.judge()
        self._probes.close()
        self._evidence, self.verdict, self._probes = self.evidence(), verdict, None
        self._send_away()
        if self.show and not self._is_quiet():
            Console().print(verdict)

    def _send_away(self) -> None:
        brought, self._brought = self._brought, []
        for cb in brought:
            cb.leader = None  # who reads its records does not need us
        self.learn.remove_cbs([cb for cb in brought if any(cb is x for x in self.learn.cbs)])

    def _is_quiet(self) -> bool:
        can_be = hasattr(self.learn, "no_logging")
        return can_be and not any(isinstance(cb, Progress) for cb in self.learn.cbs)

    def evidence(self) -> Evidence:
        """What was recorded so far, or in the last fit.

        Raises:
            RuntimeError: before the first fit.
        """
        if self._evidence is not None:
            return self._evidence
        if self._probes is None:
            raise RuntimeError("nothing is recorded yet; train first, learn.fit(1, cbs=Diagnose())")
        with suppress(RuntimeError):  # a model that was watched, and is gone
            self._frame = Frame.of(self.model, self._probes.optimizers.values())
        return gather([*self._brought, *self.learn.cbs], self._frame, self._probes.evidence(self._frame))

    def judge(self) -> Verdict:
        """The verdict on what was recorded so far, or in the last fit."""
        return self.verdict or judge(self.evidence())

    def _probe(self, look: Callable[[Probes, Any, bool], object]) -> None:
        if self._probes and self.training:
            self._probes.guarded(look, self._probes, self.learn, self.is_looking)

    def react(self) -> None:
        """Says at once that the training is sick, once; or ends it."""
        verdict = self.judge()
        if verdict.status != "sick" or verdict.primary is None:
            return
        if not self._has_warned:
            self._has_warned = True
            text = f"{verdict.primary.head}: {verdict.primary.message}"
            warnings.warn(text, stacklevel=frames_of_ours())
        if self.on_sick == "stop" and self._is_followed:
            self.learn.stop_asked = True  # for the loop to look at, as it is not ours to end
        elif self.on_sick == "stop":
            raise CancelFitException

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a resumed fit is looked at anew."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes in nothing."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_probes": None, "_brought": []}


def frames_of_ours() -> int:
    """How many frames up the first is that is not of this package, for `warnings.warn`."""
    frame, n = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FOLDER):
        frame, n = frame.f_back, n + 1
    return n
