"""wd.dominates: weight decay that moves the weights more than the loss does."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.rules import LATEST, before, median, persistent, persistent_max, rates, ratio, weights
from hookcb.diagnosis.run import WINDOW, Param, Passed, Run, Series, Skipped, Span
from hookcb.diagnosis.verdict import Finding

MAX_SHARE, N_RECORDS = 0.9, 20  # share of the decay in a step, in so many records in a row
MAX_USUAL_DECAY = 0.1  # AdamW is rarely given more
# times 1/sqrt(fan in); sum of lr · weight decay that explains such a small weight, a factor of e**-2
MAX_SHRUNK, MIN_DECAYED = 0.1, 2.0


@fault(
    "wd.dominates",
    Site.OPTIMIZER,
    needs="gradients optimizers",
    leads_to="loss.flat loss.trivial act.collapse unit.* grad.attenuated update.*",
    shown_by="params.weight_norm",
)
class DominatingDecay(Fault):
    """Weight decay that moves the weights more than the loss does, toward zero.

    Formula: share of the decay in a step, for the median weight. If it is added to the gradient (SGD, Adam):
    wd ‖W‖ / (wd ‖W‖ + ‖g‖). For adaptive optimizers, which may decouple it from the gradient (AdamW), at most
    lr · wd / (‖ΔW‖ / ‖W‖), the largest part of the step it can be. Limit: 0.9 in 20 records in a row, or in
    all of ten or more. Otherwise, its outcome: the median weight has less than a tenth of the usual size
    1/sqrt(fan in) and did not begin that small (a drift of 1), and decay either explains a factor of e**-2 or
    had such a share in ten records.

    Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019, for the two kinds.
    """

    headline = "Weight decay outweighs the loss"
    uses = (Curves, Steps)

    def findings(self, run: Run) -> Iterator[Result]:
        until, lr = run.converged_at(), dict(rates(run))
        if not (params := [p for p in weights(run) if p.is_optimized and p.weight_decay > 0]):
            has_optimizer = any(p.optimizer is not None for p in run.params.values())
            is_known = has_optimizer and not run.measured(Steps).is_by_hand
            unknown = Skipped("the optimizer of the parameters is not known")
            yield Passed("weight decay (none)") if is_known else unknown
            return
        if len(shares := _median_share([_decay_shares(p, lr, until) for p in params])) < WINDOW:
            yield Skipped(f"fewer than {WINDOW} steps with weight decay were inspected before convergence")
            return
        n = min(N_RECORDS, len(shares))
        span = persistent(shares, lambda x: x > MAX_SHARE, n, n)
        if span or _has_decayed(params, run, until):
            yield self._decayed(params, shares, span or Span(shares.steps[0], shares.steps[-1], len(shares)))
        else:
            most = persistent_max(shares, n, n)
            yield Passed(f"weight decay ({shares.median():.0%} of a step)", most, MAX_SHARE)

    def _decayed(self, params: list[Param], shares: Series, span: Span) -> Finding:
        decay = max(p.weight_decay for p in params)
        share = median(shares.between(span.first, span.last).values)
        cause = "gradients so small that even a usual weight decay outweighs them"
        advice = "Set weight_decay to 0 as a test, and find out why gradients are smaller than the decay"
        if decay > MAX_USUAL_DECAY:
            cause = f"a weight decay of {decay:g}, which is too high"
            advice = "Set weight_decay to 0.01, or to 0 as a test"
        return self.finding(
            f"Weight decay of {decay:g} makes up {share:.0%} of a step of the median weight (limit "
            f"{MAX_SHARE:.0%}), or has shrunk it to almost nothing: the decay outweighs the loss.",
            when=span,
            value=share,
            limit=MAX_SHARE,
            causes=(cause,),
            next_steps=(advice,),
        )


def _coupled(param: Param, norm: float, gradient: float) -> float:
    decay = param.weight_decay * norm
    return ratio(decay, decay + gradient)


def _decay_shares(param: Param, lr: dict[int, float], until: float) -> Series:
    """Share of the decay in each recorded step of a weight."""
    norms, updates = dict(param.series("weight_norm")), dict(param.series("update_ratio"))
    shares = Series()
    for step, gradient in before(param.series("clipped_norm"), until):
        share = _coupled(param, norms.get(step, math.nan), gradient)
        if param.is_adaptive:
            part = lr.get(step, param.lr) * param.weight_decay
            share = min(share, ratio(part, updates.get(step, math.nan)))
        if gradient > 0 and math.isfinite(share):
            shares.add(step, min(1.0, share))
    return shares


def _median_share(shares: list[Series]) -> Series:
    """Median over weights, for each record."""
    table = [dict(series) for series in shares]
    steps = sorted({step for row in table for step in row})
    return Series(steps, [median(row.get(step, math.nan) for row in table) for step in steps])


def _has_decayed(params: list[Param], run: Run, until: float) -> bool:
    """Whether the median weight has shrunk to almost nothing, and decay explains it."""
    size, drift, share, decay = [], [], [], []
    lr = median(x for x in rates(run).values if x > 0)
    for p in params:
        norms, gradients = before(p.series("weight_norm"), until), before(p.series("clipped_norm"), until)
        by_step = dict(norms)
        shares = [_coupled(p, by_step.get(step, math.nan), gradient) for step, gradient in gradients]
        size.append(norms.median(LATEST) / math.sqrt(max(1, p.shape[0])))
        drift.append(before(p.series("drift"), until).median(LATEST))
        share.append(sum(x > MAX_SHARE for x in shares))
        n_steps = min(run.n_steps or math.inf, norms.steps[-1] + 1 if len(norms) else 0)
        decay.append(n_steps * p.weight_decay * (lr if math.isfinite(lr) else p.lr))
    is_gone = median(size) < MAX_SHRUNK and abs(median(drift) - 1) < MAX_SHRUNK
    return is_gone and (median(decay) > MIN_DECAYED or median(share) >= WINDOW)
