"""Base classes of callbacks that schedule the learning rate."""

import copy
from abc import ABC, abstractmethod
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookcb.core import orders
from hookcb.core.batch import n_batches
from hookcb.core.callback import Callback
from hookcb.core.console import warn
from hookcb.core.optim import Settings, copied_setting, group_settings, set_groups
from hookcb.core.torch_private import OPT_CALLED, mark_stepped

MADE_BY_TORCH = ("step", OPT_CALLED)  # attributes of the optimizer that a scheduler sets

RATES = ("max_lr", "initial_lr")  # settings that torch's schedulers keep in the groups


class RateCallback(Callback, ABC):
    """Base class of callbacks that set the learning rate with a torch scheduler.

    Each fit creates a new scheduler; when the fit ends, the settings of the optimizer's groups are restored.

    Attributes:
        scheduler: the torch scheduler during a fit; else None.
    """

    order = orders.SCHEDULE
    run_lr_find = False
    n_steps: int | None = None  # in the whole fit, if the schedule spans it

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.scheduler: LRScheduler | None = None
        self._before: Settings | None = None
        self._given: Settings = []  # rates of the groups when the schedule was made
        self._patches: dict[str, Any] = {}

    @abstractmethod
    def make(self, opt: Optimizer) -> LRScheduler:
        """Returns a new scheduler of `opt`."""

    def before_fit(self) -> None:
        opt = self.learn.opt
        self._before = group_settings(opt)
        self._patches = {key: value for key, value in vars(opt).items() if key in MADE_BY_TORCH}
        if not any(getattr(cb, "scheduler", None) for cb in self.learn.cbs if isinstance(cb, RateCallback)):
            for group in opt.param_groups:  # left by an earlier scheduler, it would override this fit's rate
                group.pop("initial_lr", None)
        self.scheduler = self.make(opt)
        self._given = [{k: group[k] for k in RATES if k in group} for group in group_settings(opt)]
        # else torch warns if the first step is skipped or accumulated, which is not a mistake
        mark_stepped(opt)

    def after_fit(self) -> None:
        opt, self.scheduler = self.learn.opt, None
        if self._before is not None:
            set_groups(opt, self._before)
            for key in MADE_BY_TORCH:
                vars(opt).pop(key, None)
            vars(opt).update(self._patches)
        self._before, self._patches, self._given = None, {}, []

    def state_dict(self) -> dict[str, Any]:
        """State of the scheduler, current settings of the groups, and those to restore after the fit."""
        if self.scheduler is None:
            return {}
        state = {k: copy.deepcopy(v) for k, v in self.scheduler.state_dict().items() if not callable(v)}
        horizon = {} if self.n_steps is None else {"n_epoch": self.n_epoch, "n_steps": self.n_steps}
        return {
            "kind": type(self.scheduler).__name__,
            "scheduler": state,
            "groups": group_settings(self.learn.opt),
            "before": [{k: copied_setting(v) for k, v in group.items()} for group in self._before or []],
            **horizon,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the schedule from a state.

        Raises:
            RuntimeError: If no fit is running.
            ValueError: If the state is of another kind of schedule, or of a fit of another length.
        """
        if not state:
            return
        if self.scheduler is None:
            raise RuntimeError(
                "no fit is running; the state of a schedule is loaded by learn.fit(…, resume=…)"
            )
        self._check_same(state)
        self._warn_of_other_rates(state["groups"])
        self.scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
        set_groups(self.learn.opt, state["groups"])
        self._before = state["before"]

    def _warn_of_other_rates(self, saved: Settings) -> None:
        """Warns if this schedule was given other rates, as those of the checkpoint are used."""
        pairs = zip(saved, self._given, strict=False)
        others = [(key, old[key], rate) for old, new in pairs for key, rate in new.items() if key in old]
        for key, old, new in [x for x in others if float(x[1]) != float(x[2])][:1]:
            warn(
                f"{self.name!r} goes on with {key}={float(old):g}, as in the checkpoint, and not with "
                f"{float(new):g}; to train at another rate, begin a new fit"
            )

    def _check_same(self, state: dict[str, Any]) -> None:
        kind = type(self.scheduler).__name__
        if state["kind"] != kind:
            raise ValueError(
                f"the checkpoint has the state of a {state['kind']} for {self.name!r}, but this is a {kind}; "
                "resume with the schedule it was written with"
            )
        if self.n_steps is None:
            return
        label = f"a {type(self).__name__} fit"
        if state["n_epoch"] != self.n_epoch:
            raise ValueError(
                f"the checkpoint is from {label} of {state['n_epoch']} epochs, this one has {self.n_epoch}; "
                "a schedule over the whole fit cannot be made longer or shorter, so "
                f"give n_epoch={state['n_epoch']}, and continue training in a new fit"
            )
        if state["n_steps"] != self.n_steps:
            raise ValueError(
                f"the checkpoint is from {label} of {state['n_steps']} batches, this one has {self.n_steps}; "
                "resume with the same number of training batches"
            )


class SteppedRate(RateCallback):
    """Base class of schedules that are stepped after each training batch, or after each epoch.

    Batches that are cancelled, or only accumulate gradients, count too.

    Attributes:
        per: "batch" or "epoch", after which the scheduler is stepped.
        scheduler: the torch scheduler during a fit; else None.
    """

    per = "batch"

    def after_batch(self) -> None:
        if self.training and self.per == "batch":
            self._step()

    def after_epoch(self) -> None:
        if self.per == "epoch":
            self._step()

    def _step(self) -> None:
        # if a loader has more batches than its length, the rate stays that of the last one
        if self.scheduler and (self.n_steps is None or self.scheduler.last_epoch < self.n_steps - 1):
            self.scheduler.step()

    def count_steps(self) -> int:
        """Number of training batches in the whole fit, at least 1; for schedules that span it.

        Raises:
            ValueError: If the training loader has no length.
        """
        n = n_batches(self.learn.dls.train)
        if n is None:
            raise ValueError(
                f"{type(self).__name__} spans the whole fit, but the training loader has no length; give it "
                "a __len__, or use Schedule with a torch scheduler that is given the number of batches"
            )
        shortest = -int(self.learn.ranks.max([-n])[0])  # which ends the epoch on all ranks
        self.n_steps = max(1, self.n_epoch * shortest)
        return self.n_steps
