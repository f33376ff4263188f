"""clip.always: clipping that cuts almost every gradient to a small part."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from hookcb.core.optim import detached_scalar
from hookcb.core.precision import at_least_float32
from hookcb.diagnosis import rules
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curve
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import WINDOW, Passed, Run, Series, Skipped
from hookcb.gradients.steps import is_unscaled, scale_of
from hookcb.processes.shards import local_part

UNCLIPPED, MAX_CLIPPED = 0.999, 0.95  # coefficient of a gradient that is not clipped; share of records
MIN_CLIPPED_TO, MIN_CLIPPED_TO_ANYWAY = 0.01, 1e-4  # median coefficient; the same if the loss falls
MIN_UNHARMED = rules.USUAL_UPDATE / 10  # update ratio of weights whose steps are not too small
SAME = 1.001  # ratio of coefficients that are the same
MAX_NORM = 100.0  # of all gradients; they are usually clipped to 0.1 to 10


@fault(
    "clip.always",
    Site.GRADIENTS,
    needs="gradients",
    leads_to="update.too_small adam.eps loss.flat loss.trivial",
    shown_by="run.clip_coef",
)
class ConstantClipping(Fault):
    """Gradient clipping that cuts almost every gradient to a small part, which only lowers the learning rate.

    Formula: share of records with clipped norm / norm below 1, and the median of that ratio. Limit: above
    95 % of at least ten records, and a median below 0.01. An error for optimizers like SGD, a warning for
    those like Adam, which divide by the size of gradients anyway; a note for these, and for a loss of an
    unknown kind, which need not fall, if steps change the median weight by 1e-4 of its size. No finding if
    the loss falls by a fifth and the model is better than a constant, unless the median is below 1e-4; nor if
    all records have one ratio that is a power of two, as where a loop scales its loss by hand. In a
    loop that clips before hookcb reads the gradients, the ratio is that of one small gradient at the step and
    after the backward.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, who set the limit
    by the mean norm over many updates.
    """

    headline = "Almost every gradient is clipped"
    uses = (Steps,)

    def __init__(self) -> None:
        super().__init__()
        self._coefs = Curve()
        self._before: tuple[int, Tensor] | None = None  # number of the batch, and the norm after the backward
        self._is_unseen = False  # whether the loop clips before gradients are read

    def on_model(self, run: Run) -> None:
        self._is_unseen = run.loop.is_external
        self.done = not self._is_unseen

    def on_gradients(self, run: Run) -> None:
        if self._is_unseen:
            norm = _norm_of(run.measured(Steps).first_param)
            self._before = None if norm is None else (run.step, norm)

    def on_step(self, run: Run) -> None:
        # all gradients are clipped alike, so one small one has the coefficient of all; NaN if it was zero
        loop = run.loop
        self._is_unseen = not loop.facts.reports_steps
        if self._is_unseen:
            before, self._before = self._before, None
            norm = _norm_of(run.measured(Steps).first_param)
            if before is not None and before[0] == run.step and norm is not None:
                has_divided = is_unscaled(loop.scaler, loop.opt)  # a GradScaler, since the backward
                divided_by = scale_of(loop.scaler, loop.model) if has_divided else 1.0
                self._coefs.add((run.step, detached_scalar(divided_by * norm / before[1])))

    def tell(self, run: Run) -> None:
        if self._is_unseen:
            run.steps["clip_coef"] = self._coefs.series()

    def freeze(self) -> None:
        self._before = None

    def findings(self, run: Run) -> Iterator[Result]:
        coefs = rules.before(run.steps.get("clip_coef", Series()), run.converged_at())
        if len(coefs) < WINDOW:
            yield Skipped(f"fewer than {WINDOW} records of clipping before convergence")
            return
        share, usual = sum(x < UNCLIPPED for x in coefs.values) / len(coefs), coefs.median()
        learns = rules.has_learned(run, run.first_loss)
        if usual < UNCLIPPED and _is_scale(coefs.values):
            yield Passed(f"clipping (gradients are divided by {1 / usual:g} in each step)")
            return
        if share <= MAX_CLIPPED or usual >= MIN_CLIPPED_TO or (learns and usual >= MIN_CLIPPED_TO_ANYWAY):
            yield Passed(f"clipping ({share:.0%} of steps, median ×{usual:.2g})", usual, MIN_CLIPPED_TO)
            return
        is_adaptive = any(p.is_adaptive for p in run.params.values())
        size, note = rules.usual_update(rules.recent_updates(run)), ""
        is_harmless = size >= MIN_UNHARMED and (is_adaptive or rules.need_not_fall(run))
        if is_harmless:
            what = f"Steps still change the median weight by {size:.1e} of its size"
            note = f" {what}, so this does little harm."
        elif is_adaptive:
            note = " The optimizer divides by the size of gradients, so this may have little effect."
        yield self.finding(
            f"{share:.0%} of the gradients are clipped, to a median of {usual:.1e} of their norm (limit "
            f"{MIN_CLIPPED_TO:g}): the effective learning rate is lower by that factor.{note}",
            "info" if is_harmless else "warning" if is_adaptive or learns else "error",
            when=coefs,
            value=usual,
            limit=MIN_CLIPPED_TO,
            causes=("a clipping norm that is too low", "gradients that are summed rather than averaged"),
            next_steps=(_clip_advice(run),),
        )


def _is_scale(coefs: Sequence[float]) -> bool:
    """Whether these are one power of two, as of a loss that a loop scales by hand; clipping gives others."""
    exponent = -math.log2(rules.median(coefs)) if min(coefs) > 0 else math.nan
    return max(coefs) <= SAME * min(coefs) and abs(exponent - round(exponent)) < SAME - 1


def _norm_of(param: nn.Parameter | None) -> Tensor | None:
    if param is None or param.grad is None or param.grad.layout is not torch.strided:
        return None
    norm: Tensor = torch.linalg.vector_norm(at_least_float32(local_part(param.grad.detach())))
    return norm


def _clip_advice(run: Run) -> str:
    norm = rules.median(run.steps.get("total_norm", Series()).values)
    if norm > MAX_NORM:
        return f"Find out why gradients have a norm of {norm:.2g}: a summed loss, or inputs on a large scale"
    usual = f"{norm:.2g}, the median" if norm > 0 else "the median of the gradients' norms"
    return f"Clip to a norm of {usual}, or do not clip"
