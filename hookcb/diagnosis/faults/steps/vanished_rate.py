"""lr.vanished: a learning rate that falls to almost nothing long before the end."""

import math
from collections.abc import Iterator
from itertools import takewhile

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.schedules import Schedules
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.rules import falls_by, finite, has_learned, need_not_fall, rates
from hookcb.diagnosis.run import Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding

MIN_RATES, VANISHED, MAX_VANISHED = 50, 1e-3, 0.5  # batches; share of the largest rate; share of batches
MIN_STILL, MAX_STILL = 3, 0.25  # inspected steps, and share of batches, in which no weight changes
STEEP = 0.1  # share of the largest rate, above which the loss shows whether the model was still learning
CAUSES = ("a scheduler that is stepped in each batch, but counts epochs", "a decay that is too fast")
NEXT_STEPS = ("Call scheduler.step() once per epoch, or give the scheduler the number of batches",)


@fault(
    "lr.vanished",
    Site.OPTIMIZER,
    needs="loss",
    leads_to="loss.flat loss.trivial update.too_small train.unfinished",
    shown_by="run.lr",
)
class VanishedRate(Fault):
    """A learning rate that falls to almost nothing long before the end, so the model learns no more.

    Exact: no weight changes in the last quarter of the batches or more, though gradients are there, as the
    steps are below half of the distance to the next number. That is seen in three inspected steps or more,
    with a rate below a thousandth of the largest one, of one optimizer. Not found if the loss had ceased to
    fall before the rate was a tenth, or if `ReduceLROnPlateau` has lowered it.
    Formula: share of the batches after the largest rate with one below a thousandth of it. Limit: half of all
    batches, 50 or more, if the loss has not fallen by a fifth or is no better than that of a constant. A
    cosine is below a thousandth in the last 2 % of its steps only.

    Source: Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, for the cosine;
    torch.optim.lr_scheduler, whose `step` counts its calls: of batches, or of epochs.
    """

    headline = "The learning rate vanishes too early"
    uses = (Curves, Schedules, Steps)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        lr = rates(run)
        top = max(finite(lr.values), default=0.0)
        if len(lr) < MIN_RATES or not top:
            yield Skipped(f"the learning rate of fewer than {MIN_RATES} batches is known")
            return
        tiny = list(takewhile(lambda pair: pair[1] < VANISHED * top, reversed(list(lr))))
        share = len(tiny) / len(lr)
        began = max(step for step, rate in lr if rate == top)  # of the fall
        if share <= MAX_VANISHED or has_learned(run, run.first_loss):
            if tiny and (found := self._without_effect(run, tiny[-1][0], began, top)) is not None:
                yield found
                return
            yield Passed(f"a learning rate that vanishes ({share:.0%} of the batches)", share, MAX_VANISHED)
            return
        since, last = tiny[-1][0], tiny[0]
        yield self.finding(
            f"The learning rate has fallen from {top:.2g} to {last[1]:.2g}, and has been below a "
            f"thousandth of its largest value since step {since}, in {share:.0%} of the batches (limit "
            f"{MAX_VANISHED:.0%}){'' if need_not_fall(run) else ', before the model has learned anything'}.",
            when=(began, last[0]),
            value=share,
            limit=MAX_VANISHED,
            causes=CAUSES,
            next_steps=NEXT_STEPS,
        )

    def _without_effect(self, run: Run, vanished: int, began: int, top: float) -> Finding | None:
        since, n = _still_since(run, vanished)
        last = run.lr.steps[-1] if len(run.lr) else since
        share = sum(step >= since for step in run.lr.steps) / max(1, len(run.lr))
        by_plateau = any(one.kind == "ReduceLROnPlateau" for one, _ in run.measured(Schedules).used)
        is_one = run.measured(Steps).n_optimizers <= 1
        if n < MIN_STILL or share < MAX_STILL or by_plateau or not is_one or not _was_learning(run, top):
            return None
        rate = next((rate for step, rate in run.lr if step >= since), math.nan)
        return self.finding(
            f"No weight changes since step {since}, in {share:.0%} of the batches (limit {MAX_STILL:.0%}): "
            f"the learning rate has fallen from {top:.2g} to {rate:.2g} by then, and its steps are lost in "
            "rounding.",
            when=(began, last),
            value=share,
            limit=MAX_STILL,
            causes=CAUSES,
            next_steps=NEXT_STEPS,
        )


def _still_since(run: Run, vanished: int) -> tuple[int, int]:
    """First inspected step since which no weight changes though there are gradients, and their number."""
    moved: dict[int, bool] = {}
    for param in run.params.values():
        for step, x in param.series("update_ratio"):
            moved[step] = moved.get(step, False) or x != 0
    pulled = {step for p in run.params.values() for step, x in p.series("norm") if x > 0}
    steps = list(takewhile(lambda step: not moved[step] and step >= vanished, sorted(moved, reverse=True)))
    return (steps[-1], len(steps)) if steps and pulled.issuperset(steps) else (0, 0)


def _was_learning(run: Run, top: float) -> bool:
    """Whether the loss was still falling while the rate was high, or whether that was too short to tell."""
    end = max(step for step, rate in run.lr if rate >= STEEP * top)
    high = [(step, x) for step, x in run.loss if step <= end and math.isfinite(x)]
    if len(high) < MIN_RATES:
        return True
    late = high[len(high) // 2 :]
    return falls_by(Series([step for step, _ in late], [x for _, x in late]))[0] > 0
