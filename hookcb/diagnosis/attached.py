"""The callbacks that a diagnosis attaches: they record for it, and only while it looks."""

from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from hookcb.activations.callback import ActivationStats
from hookcb.core.callback import Callback
from hookcb.core.events import Event
from hookcb.gradients.callback import GradientHealth
from hookcb.profiling.steps.timer import StepTimer


class Owner(Protocol):
    """Methods of a diagnosis that the callbacks which it attaches call."""

    is_wanted: bool

    def takes_error_of(self, cb: "Attached", error: Exception) -> bool: ...
    def measure_layer(self, m: nn.Module, output: Any) -> None: ...


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

    def __init__(self, owner: Owner, name: str) -> None:
        super().__init__(include_paramless=True, name=name)
        self.owner = owner

    def looks_alike(self) -> bool:
        """True, as the owner looks at batches by their numbers."""
        return True

    def before_fit(self) -> None:
        super().before_fit()
        for hook in self.hooks or ():
            hook.take_error = self.take_error

    def stop(self) -> None:
        super().stop()
        self._let_act(None)

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
        if self._watch is not None:
            self._watch.close()

    def note(self, opt: Optimizer | None) -> None:
        """Notes an optimizer whose steps were not recorded yet."""
        if self._watch is not None and opt is not None:
            self._watch.note(opt)

    def before_step(self) -> None:
        if self._acts:
            super().before_step()

    def after_cancel_step(self) -> None:
        if self._acts:
            super().after_cancel_step()

    def after_step(self) -> None:
        if self._acts:
            super().after_step()

    @property
    def _acts(self) -> bool:
        """Whether the current step is read, or may be skipped by a scaler."""
        return self.learn.scaler is not None or self.wants(self._n_steps)


class AttachedTimer(Attached, StepTimer):
    """`StepTimer`, which compares several ranks."""

    part = "ranks"

    def __init__(self, owner: Owner, name: str) -> None:
        super().__init__(name=name)
        self.owner = owner
