"""adam.eps: gradients that are as small as Adam's eps, which then makes its steps smaller."""

import math
import statistics
from collections.abc import Iterator

from hookcb.core.text import join_names
from hookcb.diagnosis import rules
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Absent, Param, Passed, Run, Skipped

MAX_DAMPED = 0.5  # share of the weights
MAX_SIZE = 0.1  # of their gradients, in units of eps; with larger ones steps are not much smaller


@fault(
    "adam.eps",
    Site.OPTIMIZER,
    needs="gradients",
    leads_to="update.too_small loss.flat loss.trivial train.unfinished",
    subject="eps",
    shown_by="params.clipped_norm",
)
class DampedSteps(Fault):
    """Gradients that are as small as Adam's eps, so that its steps are a half of the learning rate or less.

    Formula: share of the weights whose gradient, as the optimizer gets it, has an RMS at or below the eps of
    their group, as the median of the last five records before convergence that are not zero. Adam divides by
    sqrt(v) + eps, so with gradients of that size a step is half as large as with an eps of 0. Limit: half of
    the weights; a note unless most of these are below a tenth of eps, and the loss does not fall by a fifth.

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1; Wortsman et al.,
    "Small-scale proxies for large-scale Transformer training instabilities", 2023, in which gradients of
    large models come near to an eps of 1e-8, and 1e-15 helps.
    """

    headline = "Adam's eps makes its steps small"
    uses = (Loss,)

    def findings(self, run: Run) -> Iterator[Result]:
        of_adam = [p for p in rules.weights(run) if p.is_optimized and p.eps > 0]
        sizes = [(p, size) for p in of_adam if (size := _size(run, p)) > 0]
        if not of_adam:
            yield Absent("no optimizer adds an eps as Adam does")
        elif not sizes:
            yield Skipped(f"fewer than {rules.LATEST} steps were inspected before convergence")
        elif (share := statistics.fmean(size <= p.eps for p, size in sizes)) < MAX_DAMPED:
            yield Passed(f"gradients as small as eps ({share:.0%} of the weights)", share, MAX_DAMPED)
        else:
            yield self._found(run, sizes, share)

    def _found(self, run: Run, sizes: list[tuple[Param, float]], share: float) -> Result:
        damped = [(p, size) for p, size in sizes if size <= p.eps]
        first, _ = min(damped, key=lambda x: x[1] / x[0].eps)
        usual = statistics.median(size / p.eps for p, size in damped)
        may_learn = rules.need_not_fall(run) or rules.has_learned(run, run.first_loss)
        is_known = math.isfinite(rules.loss_left(run, run.first_loss))
        names, factor = join_names([p.name for p, _ in damped], 3), rules.format_factor(1 + 1 / usual)
        return self.finding(
            f"The gradients of {len(damped)} of {len(sizes)} weights ({share:.0%}; limit {MAX_DAMPED:.0%}) "
            f"are as small as Adam's eps of {first.eps:.2g}, or smaller: {names}. With an eps of 0 their "
            f"steps would be about {factor} times as large.",
            "info" if may_learn or not is_known or usual > MAX_SIZE else "warning",
            at=first,
            when=first.series("clipped_norm"),
            value=share,
            limit=MAX_DAMPED,
            causes=(
                "a loss that is multiplied by a small number, or gradients that are clipped to almost 0",
                "gradients of a large model, which are small at a large batch and width",
            ),
            next_steps=(
                "Lower eps: eps=1e-15 in float32",
                "Or multiply the loss by a constant, as Adam's steps do not depend on its scale otherwise",
            ),
        )


def _size(run: Run, param: Param) -> float:
    """RMS of the gradient that the optimizer gets, the median of the latest ones; NaN if few are known."""
    norms = rules.before(param.series("clipped_norm"), run.converged_at())
    latest = [x for _, x in norms if x > 0][-rules.LATEST :]
    n = math.prod(param.shape)
    return statistics.median(latest) / math.sqrt(n) if len(latest) == rules.LATEST else math.nan
