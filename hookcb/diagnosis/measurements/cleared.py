"""ClearedGradients: whether gradients are cleared after the backward, before the step can use them."""

import torch
from torch import Tensor, nn

from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Run

MIN_STEPS, MAX_STEPS = 3, 64


class ClearedGradients(Measurement):
    """Counts steps before which the gradients of the backward were cleared, so that they do nothing.

    It follows one small gradient; on a GPU, which would have to be waited for, zeros are not seen.
    """

    cadence = EVERY
    uses = (Steps,)

    def __init__(self) -> None:
        self._param: nn.Parameter | None = None  # had a gradient when the backward ended
        self.n_steps = self.n_cleared = 0

    def on_gradients(self, run: Run) -> None:
        param = run.measured(Steps).first_param  # as long as all steps came too late
        is_gone = self.n_cleared < self.n_steps or param is None or not is_there(param.grad)
        self._param = None if is_gone else param

    def on_step(self, run: Run) -> None:
        self.n_steps += 1
        self.n_cleared += self._param is not None and not is_there(self._param.grad)
        self._param = None
        self.done |= self.n_steps >= MAX_STEPS

    @property
    def has_found(self) -> bool:
        return self.n_cleared >= max(MIN_STEPS, self.n_steps)

    def freeze(self) -> None:
        self._param = None


def is_there(grad: Tensor | None) -> bool:
    """Whether there is a gradient, which is not zero if it can be read without waiting."""
    is_readable = grad is not None and grad.is_cpu and grad.layout is torch.strided
    return bool(grad.any()) if is_readable else grad is not None  # type: ignore[union-attr]
