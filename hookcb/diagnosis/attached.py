"""The callbacks that a diagnosis attaches: they record for it, and only while it looks or sleeps."""

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from hookcb.activations.callback import ActivationStats
from hookcb.core import orders
from hookcb.core.callback import Callback
from hookcb.core.events import Event
from hookcb.core.optim import detached_scalar, largest_lr
from hookcb.core.time_split import TimeSplit
from hookcb.gradients.callback import GradientHealth
from hookcb.profiling.steps.timer import StepTimer


class Owner(Protocol):
    """Methods of a diagnosis that the callbacks which it attaches call."""

    is_wanted: bool

    def takes_error_of(self, cb: "Attached", error: Exception) -> bool: ...
    def measure_layer(self, m: nn.Module, output: Any) -> None: ...
    def note_modes(self) -> None: ...
    def expect_batch(self) -> None: ...
    def take_over(self, loss: float | Tensor | None, waited: float) -> None: ...
    def after_loss(self) -> None: ...
    def after_backward(self) -> None: ...
    def after_cancel_backward(self) -> None: ...
    def after_cancel_step(self) -> None: ...
    def after_cancel_batch(self) -> None: ...


class Attached(Callback):
    """Callback that a diagnosis attaches; a resumed fit records anew.

    Attributes:
        part: its name for a `Guard`.
    """

    owner: Owner | None = None
    part = ""

    def takes_error(self, error: Exception, event: str) -> bool:
        """Whether the owner tells of an error in the training; this does nothing more then."""
        is_refusal = event == Event.BEFORE_FIT  # what cannot be recorded is told before
        return not is_refusal and self.owner is not None and self.owner.takes_error_of(self, error)

    def take_error(self, error: Exception) -> None:
        """Tells the owner of an error in a hook."""
        if self.owner is not None:
            self.owner.takes_error_of(self, error)

    def stop(self) -> None:
        """Does nothing more in this fit, as it has failed."""
        self.run = False

    def wants(self, i: int) -> bool:
        """Whether the owner inspects the current batch."""
        return self.owner is not None and self.owner.is_wanted

    def state_dict(self) -> dict[str, Any]:
        """Empty, as in the owner."""
        return {}


class AttachedStats(Attached, ActivationStats):
    """`ActivationStats` of all layers; its hooks measure for the owner too."""

    part = "activations"
    idle_events = ActivationStats.idle_events | {Event.BEFORE_BATCH}

    def __init__(self, owner: Owner, name: str) -> None:
        super().__init__(include_paramless=True, name=name)
        self.owner = owner

    @property
    def is_resting(self) -> bool:
        """Whether it is called at no event of a batch."""
        return Event.BEFORE_BATCH in self._idle and self._is_resting

    def pass_batch(self) -> None:
        """Begins a batch of which it is not called, as it was resting in the one before."""
        if self.owner is not None and self.owner.is_wanted:
            self.before_batch()
        else:
            self.n_skipped += 1
            self.rest_hooks()  # others were on the layers before, as to measure their times

    def looks_alike(self) -> bool:
        """True, as the owner looks at batches by their numbers."""
        return True

    def before_fit(self) -> None:
        super().before_fit()
        for hook in self.hooks or ():
            hook.take_error = self.take_error

    def stop(self) -> None:
        super().stop()
        self._acts_in = None

    def hook(self, m: nn.Module, *seen: Any) -> None:
        super().hook(m, *seen)
        if self.owner is not None:
            self.owner.measure_layer(m, seen[-1])


class AttachedHealth(Attached, GradientHealth):
    """`GradientHealth` of all parameters, with details in each record, as there are few."""

    part = "gradients"

    def __init__(self, owner: Owner, name: str) -> None:
        super().__init__(detail_every=1, name=name)
        self.owner = owner

    def before_fit(self) -> None:
        super().before_fit()
        if self._watch is not None:
            self._watch.take_error = self.take_error

    def stop(self) -> None:
        super().stop()
        self.rest(True)

    def note(self, opt: Optimizer | None) -> None:
        """Notes an optimizer whose steps were not recorded yet."""
        if self._watch is not None and opt is not None:
            self._watch.note(opt)

    def rest(self, is_resting: bool) -> None:
        """Takes its hook off the optimizers, or puts it back."""
        if self._watch is not None:
            (self._watch.close if is_resting else self._watch.reopen)()


class AttachedTimer(Attached, StepTimer):
    """`StepTimer`, which compares several ranks."""

    part = "ranks"

    def __init__(self, owner: Owner, name: str) -> None:
        super().__init__(name=name)
        self.owner = owner


class Noted(NamedTuple):
    """Numbers of a batch in which a diagnosis sleeps.

    Attributes:
        step: number of the batch.
        loss: its loss, on its device.
        lr: largest learning rate of its step.
        waited: seconds for which it was fetched.
        ended: time at which its backward had ended.
        has_step: whether a step followed, or is to follow.
    """

    step: int
    loss: float | Tensor
    lr: float
    waited: float
    ended: float
    has_step: bool = True


class AttachedNotes(Attached):
    """Notes what must be seen of each batch, while its owner sleeps.

    In a small training, calls of the owner at all events cost five times as much as what they read. A batch
    that is not as usual is left to the owner, from the event on at which that shows.

    Args:
        owner: the diagnosis.
        split: measures the time spent fetching batches.
        name: its name on the learner.

    Attributes:
        stepper: optimizer of the batches that are noted.
    """

    part = "notes"
    order = orders.DIAGNOSE
    run_valid = False

    def __init__(self, owner: Owner, split: TimeSplit, name: str) -> None:
        super().__init__(name=name)
        self.owner = owner
        self._split = split
        self._rows: list[Noted] = []
        self._loss: float | Tensor | None = None  # of the batch in progress
        self.stepper: Any = None
        self._param: nn.Parameter | None = None
        self._n_left = 0
        # events of a loop that hookcb does not run; the steps that it has made by now if each batch had one
        self._seen: Mapping[str, int] | None = None
        self._n_due = 0

    def stop(self) -> None:
        super().stop()
        self.begin(0, None, None)

    def begin(self, n: int, opt: Any, param: nn.Parameter | None) -> None:
        """Begins to note batches.

        Args:
            n: number of batches; 0 if there are no more.
            opt: the optimizer, which makes a step in each of them.
            param: parameter whose gradient any number that is not finite reaches.
        """
        self._n_left, self.stepper, self._param = n, opt, param
        loop: Any = self.learn
        if loop.is_external:
            self._seen, self._n_due = loop.seen, loop.seen[Event.AFTER_STEP]

    @property
    def _n_missing(self) -> int:
        """Number of steps that were not made; a Learner tells before whether there will be one."""
        return 0 if self._seen is None else self._n_due - self._seen[Event.AFTER_STEP]

    def take(self) -> list[Noted]:
        """Returns what was noted since the last call."""
        rows, self._rows = self._rows, []
        if rows and self._n_missing > 0:
            loop: Any = self.learn
            is_over = not loop.has_batch or loop.train_iter != rows[-1].step
            rows[-1] = rows[-1]._replace(has_step=not is_over)
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | dict.fromkeys(("_split", "stepper", "_param", "_seen"))

    def before_batch(self) -> None:
        if self._n_left and self.owner is not None:
            self.owner.note_modes()

    def after_loss(self) -> None:
        if self.owner is None:
            return
        try:
            loss = detached_scalar(self.learn.loss)
        except Exception:  # the owner tells of it
            loss = math.nan
        if isinstance(loss, float) and not math.isfinite(loss):
            self.owner.take_over(None, self._split.take_fetched())
            self.owner.after_loss()
        else:
            self._loss = loss

    def after_backward(self) -> None:
        if self.owner is None:
            return
        learn, opt, loss = self.learn, self.stepper, self._loss
        self._loss = None
        try:
            grad = self._param.grad  # type: ignore[union-attr]  # it has one while this acts
            is_finite = grad is None or not grad.is_cpu or math.isfinite(grad.sum().item())
            is_usual = is_finite and learn.opt is opt and not (self._n_missing or learn.accumulating)
            lr = largest_lr(opt)
        except Exception:  # the owner tells of it
            is_usual = False
        if loss is None or not is_usual:
            self.owner.take_over(loss, self._split.take_fetched())
            self.owner.after_backward()
            return
        self._rows.append(Noted(learn.train_iter, loss, lr, self._split.take_fetched(), time.perf_counter()))
        self._n_left, self._n_due = self._n_left - 1, self._n_due + 1
        if not self._n_left:
            self.owner.expect_batch()

    def _leave_batch(self, event: str) -> None:
        """Leaves a batch that is cut short to the owner, from `event` on."""
        loss, self._loss = self._loss, None
        row = self._rows.pop() if self._rows and self._rows[-1].step == self.learn.train_iter else None
        if self.owner is None:
            return
        if row is None:
            self.owner.take_over(loss, self._split.take_fetched())
        else:
            self.owner.take_over(row.loss, row.waited)
            self.owner.after_backward()
        getattr(self.owner, event)()

    def after_cancel_backward(self) -> None:
        self._leave_batch("after_cancel_backward")

    def after_cancel_step(self) -> None:
        self._leave_batch("after_cancel_step")

    def after_cancel_batch(self) -> None:
        self._leave_batch("after_cancel_batch")
