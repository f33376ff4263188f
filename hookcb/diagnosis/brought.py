"""The callbacks that Diagnose brings along: they look at the batches that it looks at."""

from collections.abc import Callable
from typing import Any

from hookcb.callbacks import ActivationStats, GradientHealth

Leader = Callable[[], bool]  # whether the batch in progress is looked at


class BroughtStats(ActivationStats):
    """`ActivationStats` of all layers; a resumed fit does not go on with its records."""

    def __init__(self, leader: Leader) -> None:
        super().__init__(include_paramless=True, name="activation_stats")
        self.leader: Leader | None = leader

    def wants(self, i: int) -> bool:
        """As who has brought it says."""
        return self.leader is not None and self.leader()

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class BroughtHealth(GradientHealth):
    """`GradientHealth` of all parameters; a resumed fit does not go on with its records."""

    def __init__(self, leader: Leader) -> None:
        super().__init__(name="gradient_health")
        self.leader: Leader | None = leader

    def wants(self, i: int) -> bool:
        """As who has brought it says."""
        return self.leader is not None and self.leader()

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}
