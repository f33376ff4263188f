"""Clipping: what is left of a gradient at the step, in a loop that clips before hookcb reads gradients."""

import torch
from torch import Tensor, nn

from hookcb.core.optim import detached_scalar
from hookcb.core.precision import at_least_float32
from hookcb.core.shards import local_part
from hookcb.diagnosis.measurements.curves import Curve
from hookcb.diagnosis.run import Series
from hookcb.gradients.steps import is_unscaled, scale_of


class Clipping:
    """Norm of one small gradient at the step / its norm when the backward has ended.

    Clipping scales all gradients alike, so that this is the coefficient of all of them, whatever has clipped
    them.
    """

    def __init__(self) -> None:
        self._coefs = Curve()
        self._before: tuple[int, Tensor] | None = None  # number of the batch, and the norm

    def after_backward(self, param: nn.Parameter | None, step: int) -> None:
        """Reads the norm that the backward gives."""
        self._before = None if (norm := _norm_of(param)) is None else (step, norm)

    def before_step(self, param: nn.Parameter | None, step: int, scale: float | Tensor) -> None:
        """Compares it with the norm that the optimizer gets, which is divided by `scale`."""
        before, self._before = self._before, None
        if before is not None and before[0] == step and (norm := _norm_of(param)) is not None:
            self._coefs.add(step, detached_scalar(scale * norm / before[1]))

    def coefs(self) -> Series:
        """The share that is left, for each inspected step; NaN if the gradient was zero."""
        return self._coefs.series()


def _norm_of(param: nn.Parameter | None) -> Tensor | None:
    if param is None or param.grad is None or param.grad.layout is not torch.strided:
        return None
    norm: Tensor = torch.linalg.vector_norm(at_least_float32(local_part(param.grad.detach())))
    return norm


def divided_by(
    scaler: torch.amp.GradScaler | None, opt: torch.optim.Optimizer, model: nn.Module
) -> float | Tensor:
    """Number by which a GradScaler has divided the gradients since the backward."""
    return scale_of(scaler, model) if is_unscaled(scaler, opt) else 1.0
