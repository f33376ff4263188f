"""Watching: records what a diagnosis rests on, at the events of a training."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hookcb.activations.callback import ActivationStats
from hookcb.core import orders
from hookcb.core.sampling import SamplingCallback
from hookcb.diagnosis.evidence import Evidence
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.gather import gather
from hookcb.diagnosis.probes.suite import Probes
from hookcb.diagnosis.schedule import Schedule
from hookcb.gradients.callback import GradientHealth
from hookcb.hooks.modules import has_params


class Watching(SamplingCallback):
    """Brings `ActivationStats` and `GradientHealth`, has probes look beside them, and makes `evidence` of it.

    Args:
        budget: share of the batches that are looked at closely, 0..1; see `Schedule`.
        name: what the learner calls it.
    """

    order = orders.DIAGNOSE
    run_lr_find = False  # which looks for a rate that is too high on purpose

    def __init__(self, budget: float, *, name: str) -> None:
        super().__init__(name=name)
        self.budget = budget
        self._evidence: Evidence | None = None  # of the last fit
        self._probes: Probes | None = None  # while a fit runs
        self._brought: list[BroughtStats | BroughtHealth] = []

    def before_fit(self) -> None:
        super().before_fit()
        self._evidence = None
        self._schedule, self._is_new_step = Schedule(self.budget), True
        self._is_wanted = self._is_forward = False
        self._is_followed = not hasattr(self.learn, "get_loss")  # a loop that is not ours
        self._probes = Probes(self.learn, self._looks_inside, self._is_followed)
        self._frame = Frame.of(self.model, [])
        names = {cb.name for cb in self.learn.cbs}
        own = "activation_stats", "gradient_health"
        stats, health = (f"{self.name}_{name}" if name in names else name for name in own)
        self._brought = [BroughtHealth(self, health)]
        if any(m is not self.model for m in self.model.modules()) or has_params(self.model):
            self._brought.insert(0, BroughtStats(self, stats))
        self.learn.follow_fetches(self._probes.fetches)
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
        return self._is_forward and self.learn.training and self.learn.in_loop_thread

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

    def after_cancel_backward(self) -> None:
        self._probe(Probes.leave_out)

    def after_cancel_batch(self) -> None:
        super().after_cancel_batch()
        self._probe(Probes.leave_out)

    def after_cancel_step(self) -> None:
        self._probe(Probes.cancel_step)

    def after_step(self) -> None:
        self._is_new_step = True
        self._probe(Probes.end_step)

    def after_batch(self) -> None:
        super().after_batch()
        self._is_forward = False
        if self._probes and self.training:
            self._probe(Probes.end_batch)

    def after_train(self) -> None:
        self._probe(Probes.end_epoch)

    def end(self, evidence: Evidence) -> None:
        """The fit is over: hooks come off, and what was recorded stays as plain values."""
        if self._probes is not None:
            self._probes.close()
            self.learn.leave_fetches(self._probes.fetches)
            self._evidence, self._probes = evidence, None
        brought, self._brought = self._brought, []
        for cb in brought:
            cb.leader = None  # who reads its records does not need us
        self.learn.remove_cbs([cb for cb in brought if any(cb is x for x in self.learn.cbs)])

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
        own = self._probes.evidence(self._frame)
        if self._is_followed:
            own.unseen = dict(self.learn.coverage.missing)
        evidence = gather([*self._brought, *self.learn.cbs], self._frame, own)
        evidence.looks = self._schedule.rule
        return evidence

    def _probe(self, look: Callable[[Probes, Any, bool], object]) -> None:
        if self._probes and self.training:
            self._probes.guarded(look, self._probes, self.learn, self.is_looking)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a resumed fit is looked at anew."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes in nothing."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_probes": None, "_brought": []}


class Brought:
    """Callback that a `Watching` brings and that looks when it does; a resumed fit records anew."""

    leader: Watching | None = None

    def wants(self, i: int) -> bool:
        """Whether who has brought it looks at the batch."""
        return self.leader is not None and self.leader.is_wanted()

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class BroughtStats(Brought, ActivationStats):
    """`ActivationStats` of all layers."""

    def __init__(self, leader: Watching, name: str) -> None:
        super().__init__(include_paramless=True, name=name)
        self.leader = leader

    def hook(self, m: nn.Module, *seen: Any) -> None:
        """Has who has brought it look too, so that one hook does for both."""
        super().hook(m, *seen)
        if self.leader is not None:
            self.leader.see_layer(m, seen[-1])


class BroughtHealth(Brought, GradientHealth):
    """`GradientHealth` of all parameters."""

    def __init__(self, leader: Watching, name: str) -> None:
        super().__init__(name=name)
        self.leader = leader
