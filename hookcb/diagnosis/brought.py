"""The callbacks that Diagnose brings along: they look at the batches that it looks at."""

from typing import Any, Protocol

from torch import nn

from hookcb.activations.callback import ActivationStats
from hookcb.gradients.callback import GradientHealth


class Leader(Protocol):
    """Who brings them."""

    def is_wanted(self) -> bool:
        """Whether the batch in progress, and the step that it leads to, are looked at."""

    def see_layer(self, m: nn.Module, output: Any) -> None:
        """A layer has put something out, in a batch that is looked at."""


class BroughtStats(ActivationStats):
    """`ActivationStats` of all layers; a resumed fit does not go on with its records."""

    def __init__(self, leader: Leader, name: str) -> None:
        super().__init__(include_paramless=True, name=name)
        self.leader: Leader | None = leader

    def wants(self, i: int) -> bool:
        """As who has brought it says."""
        return self.leader is not None and self.leader.is_wanted()

    def hook(self, m: nn.Module, *seen: Any) -> None:
        """Has who has brought it look too, so that one hook does for both."""
        super().hook(m, *seen)
        if self.leader is not None:
            self.leader.see_layer(m, seen[-1])

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class BroughtHealth(GradientHealth):
    """`GradientHealth` of all parameters; a resumed fit does not go on with its records."""

    def __init__(self, leader: Leader, name: str) -> None:
        super().__init__(name=name)
        self.leader: Leader | None = leader

    def wants(self, i: int) -> bool:
        """As who has brought it says."""
        return self.leader is not None and self.leader.is_wanted()

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}
