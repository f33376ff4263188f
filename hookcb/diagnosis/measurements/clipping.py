"""Clipping: what is left of a gradient at the step, in a loop that clips before hookcb reads gradients."""

import torch
from torch import Tensor, nn

from hookcb.core.optim import detached_scalar
from hookcb.core.precision import at_least_float32
from hookcb.core.shards import local_part
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.measurements.curves import Curve
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Run
from hookcb.gradients.steps import is_unscaled, scale_of


class Clipping(Measurement):
    """Norm of one small gradient at the step / its norm when the backward has ended.

    Clipping scales all gradients alike, so that this is the coefficient of all of them, whatever has clipped
    them. It is NaN if the gradient was zero.
    """

    uses = (Steps,)

    def __init__(self) -> None:
        self._coefs = Curve()
        self._before: tuple[int, Tensor] | None = None  # number of the batch, and the norm
        self._is_unseen = False  # whether the loop clips before gradients are read

    def on_model(self, run: Run) -> None:
        self._is_unseen = run.loop.is_external
        self.done = not self._is_unseen

    def on_gradients(self, run: Run) -> None:
        if self._is_unseen:
            norm = _norm_of(run.measured(Steps).first_param)
            self._before = None if norm is None else (run.step, norm)

    def on_step(self, run: Run) -> None:
        loop = run.loop
        self._is_unseen = not loop.facts.reports_steps
        if self._is_unseen:
            before, self._before = self._before, None
            norm = _norm_of(run.measured(Steps).first_param)
            if before is not None and before[0] == run.step and norm is not None:
                has_divided = is_unscaled(loop.scaler, loop.opt)  # a GradScaler, since the backward
                divided_by = scale_of(loop.scaler, loop.model) if has_divided else 1.0
                self._coefs.add(run.step, detached_scalar(divided_by * norm / before[1]))

    def tell(self, run: Run) -> None:
        if self._is_unseen:
            run.steps["clip_coef"] = self._coefs.series()

    def freeze(self) -> None:
        self._before = None


def _norm_of(param: nn.Parameter | None) -> Tensor | None:
    if param is None or param.grad is None or param.grad.layout is not torch.strided:
        return None
    norm: Tensor = torch.linalg.vector_norm(at_least_float32(local_part(param.grad.detach())))
    return norm
