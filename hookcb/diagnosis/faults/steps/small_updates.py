"""update.too_small: steps that barely change the weights."""

from collections.abc import Iterator

from hookcb.diagnosis import rules
from hookcb.diagnosis.advice import MIN_FACTOR, multiplier
from hookcb.diagnosis.fault import Fault, Result, Site, fault, findings_of
from hookcb.diagnosis.faults.steps.scaled_clipping import UNSCALE, is_clipped_while_scaled
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Passed, Run, Skipped

BARELY_LEARNED = 0.9  # share of the first loss that is left
MIN_UPDATE, MIN_UPDATE_WARNING = 1e-5, 1e-6
MAX_SMALL, MAX_SMALL_SUM = rules.USUAL_UPDATE / 10, 0.1  # update ratio, and all together, if the loss is flat
TRAINED = 0.5  # of the loss of a constant; a model that begins below it was trained before
MORE_CERTAIN = ("init.symmetric", "init.zero", "unit.dead")  # of which no learning rate is the cause
MIN_WARM_UP = 80  # batches; a shorter warmup may still be as intended


@fault(
    "update.too_small",
    Site.OPTIMIZER,
    needs="gradients",
    leads_to="loss.flat loss.trivial train.unfinished",
    shown_by="params.update_ratio",
    draws_limit=True,
)
class SmallUpdates(Fault):
    """Steps that barely change the weights, so nothing is learned in reasonable time.

    Formula: median over weights of the median ‖ΔW‖ / ‖W‖ of the last ten records before convergence (at least
    five), each scaled to the largest learning rate, so neither warmup nor the end of a decay counts. Limit:
    1e-5, a hundredth of the usual 1e-3, or 1e-4 if the loss is flat and near guessing and all steps together
    are below 0.1; an error below 1e-6 if the loss falls by less than a tenth. No finding if it falls by a
    fifth. Not judged if it begins below half of that of the best constant: a model that was trained before
    may have little left to learn.

    Source: A. Karpathy, CS231n notes, "Ratio of weights:updates".
    """

    headline = "Steps barely change the weights"
    uses = (Loss, Curves)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        if rules.is_warming_up(run):
            yield from self._never_warm(run)
            return
        if not (recent := rules.recent_updates(run)):
            yield Skipped(f"fewer than {rules.LATEST} steps were inspected before convergence")
            return
        size, left = rules.usual_update(recent), rules.loss_left(run, run.first_loss)
        is_flat = any(f.severity == "warning" for f in findings_of("loss.flat", run))
        # steps of this size cannot have moved the weights far
        limit = MAX_SMALL if is_flat and size * run.n_steps < MAX_SMALL_SUM else MIN_UPDATE
        if size >= limit or left < rules.LEARNED:
            yield Passed(f"learning rate too low (update ratio {size:.1e})", size, limit)
            return
        if run.first_loss < TRAINED * run.measured(Loss).constant:
            yield Skipped("the model was trained before, and may have little left to learn")
            return
        causes, advice = _why_small(run, size)
        spans = [(rules.trailing(series, lambda x: x < limit), series) for series in recent]
        first = min(span.first if span else series.steps[0] for span, series in spans)
        known = [f.step for code in MORE_CERTAIN for f in findings_of(code, run) if f.severity != "info"]
        first = max([first, *(step for step in known if step is not None)])  # as it follows from these
        yield self.finding(
            f"A step changes the median weight by {size:.2g} of its size (limit {limit:g}); "
            f"{rules.USUAL_UPDATE:g} is usual.",
            "error" if size < MIN_UPDATE_WARNING and left > BARELY_LEARNED else "warning",
            when=(first, max(series.steps[-1] for series in recent)),
            value=size,
            limit=limit,
            causes=causes,
            next_steps=advice,
        )

    def _never_warm(self, run: Run) -> Iterator[Result]:
        sizes = [p.series("update_ratio").median(rules.LATEST) for p in rules.weights(run) if p.is_optimized]
        size, lr = rules.median(sizes), rules.rates(run)
        if not (size < MIN_UPDATE_WARNING and run.n_batches >= MIN_WARM_UP):
            yield Skipped("the learning rate is still rising")
            return
        yield self.finding(
            f"The learning rate is still rising after {run.n_batches} batches; at {lr.values[-1]:.1e}, a "
            f"step changes the median weight by {size:.2g} of its size (limit {MIN_UPDATE_WARNING:g}); "
            f"{rules.USUAL_UPDATE:g} is usual.",
            when=lr,
            value=size,
            limit=MIN_UPDATE_WARNING,
            causes=(
                "a warmup that is far too long, or a length that is not in units of the scheduler's steps",
            ),
            next_steps=("Check the number of warmup steps of the scheduler",),
        )


def _why_small(run: Run, size: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Causes and advice; no learning rate helps if all gradients are zero."""
    if size == 0:
        return ("the gradient of most weights is exactly zero, whatever the learning rate",), (
            "Look at the last layers and the loss: a softmax over one unit is constant, and a clamp, a ReLU "
            "or a saturated sigmoid at its limit passes no gradient",
        )
    if is_clipped_while_scaled(run):
        return ("gradients that are clipped while a GradScaler has them multiplied by its scale",), (UNSCALE,)
    n = multiplier(run, size)
    if n < MIN_FACTOR:
        return ("gradients of most weights that are far smaller than those of a few",), (
            "Find out why gradients vanish: the learning rate is already large enough for some weights",
        )
    return ("the learning rate is too low", "gradients that are very small, or clipped"), (
        f"Multiply the learning rate by {n:,}",
        run.advise("rate"),
    )
