"""param.not_stepped, param.restored: parameters that never change, or that something puts back."""

import math
from collections.abc import Iterator
from itertools import takewhile

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.held import HeldWeights
from hookcb.diagnosis.measurements.parameters import Parameters
from hookcb.diagnosis.measurements.steps import ClearedGradients, Steps
from hookcb.diagnosis.rules import LATEST, VISIBLE_UPDATE, finite, rates, ratio
from hookcb.diagnosis.run import SPARSE_KINDS, Param, Passed, Run, Skipped, Span
from hookcb.diagnosis.verdict import Finding

MIN_BATCHES, MIN_STEPS = 20, 20  # with a backward, or steps without one; steps of the run
MIN_IDLE = 2  # inspected steps without effect
MAX_PEAK = 30.0  # max |gradient| / RMS, which is 5 for normally distributed numbers
SAMPLE_SIZE = 1024  # elements of a weight from which updates are read
MIN_RESOLVED = 8  # expected update in units of the dtype's resolution
N_NO_RATE, MIN_NO_RATE_SHARE, MIN_NO_RATE = 10, 0.1, 20  # batches with a learning rate of 0


@fault(
    "param.not_stepped",
    Site.OPTIMIZER,
    needs="gradients",
    leads_to="update.* loss.* train.unfinished",
    exact=True,
    shown_by="params.update_ratio",
)
class NotStepped(Fault):
    """Parameters that never change: no step is made, the learning rate is 0, or steps do nothing.

    Exact: no step in twenty batches with a backward, and no sampled element of any weight has changed; or
    none any more in as many batches as before, with twenty or more. Or the last two or more inspected steps
    have changed none of up to 1,024 elements of a weight, nor has anything between them, although its rate
    and the gradient of some elements are not zero and the update of these is above the resolution of the
    dtype, by the rule of the optimizer; steps that a GradScaler may have skipped are left out. Or a weight
    that is bit-identical after the last five or more steps that should have changed it, by lr · ‖g‖ / ‖W‖
    above 1e-6 and above eight times the resolution of its dtype; gradients with zero rows, or so sparse that
    the sample of 1,024 elements may miss them, are left out. Or a learning rate of exactly 0 over the last
    ten batches if they are a tenth of the run, or over the last twenty, before convergence; neither the very
    end of a decay nor the first step of a warmup is one.
    """

    headline = "Parameters never change"
    uses = (ClearedGradients, HeldWeights, Parameters, Steps)

    def tell(self, run: Run) -> None:
        cleared, steps, self.seen = run.measured(ClearedGradients), run.measured(Steps), []
        if cleared.has_found:
            self.see(
                f"Gradients were cleared after the backward and before the step in all {cleared.n_steps} "
                "steps, so the optimizer changes nothing.",
                when=0,
                value=float(cleared.n_cleared),
                causes=("zero_grad() between backward() and step()",),
                next_steps=("Call zero_grad() after optimizer.step(), or before backward()",),
            )
        if run.measured(Parameters).is_still:
            self._see_still(run, steps)
        before, step = steps.latest
        if MIN_BATCHES <= before < steps.n_backward - before and not (steps.n_alone or steps.n_given):
            self._see_end(steps.n_backward - before, step)

    def _see_end(self, n: int, step: int) -> None:
        self.see(
            f"In {n} batches with a backward pass since step {step} no optimizer of the model has made a "
            "step.",
            "warning",
            when=step,
            value=float(n),
            causes=("the optimizer step is in a branch that is no longer taken",),
            next_steps=("Call optimizer.step() after each loss.backward(), as before that step",),
        )

    def _see_still(self, run: Run, steps: Steps) -> None:
        n_steps, n, severity = run.n_steps - steps.n_alone, steps.n_backward, self.severity
        if not (n or steps.is_beside) and n_steps >= MIN_BATCHES:
            what = (
                f"No backward was seen to reach the model before any of {n_steps} optimizer steps, and all "
                "weights are bit-identical."
            )
            causes: tuple[str, ...] = (
                "loss.backward() is missing, or is in a branch that is never taken",
                "the loss does not depend on the model, as after a .detach()",
            )
            advice = "Call loss.backward() before optimizer.step()"
        elif n < MIN_BATCHES or run.n_steps:
            return
        elif 2 * steps.n_given > n:
            severity = "info"
            what = (
                f"In {n} batches the backward of another model's loss gave gradients to all weights, which "
                "no optimizer has: nothing uses them."
            )
            causes = ("a network that gives targets or features, and is not frozen",)
            advice = (
                "Freeze it with requires_grad_(False), or call it under torch.no_grad() if it only gives "
                "targets"
            )
        else:
            what = (
                f"In {n} batches with a backward pass no optimizer of the model has made a step, and all "
                "weights are bit-identical."
            )
            causes = (
                "the optimizer step is missing, or is in a branch that is never taken",
                "the optimizer was created with the parameters of another model",
            )
            advice = "Call optimizer.step() after loss.backward(), with an optimizer of model.parameters()"
        self.see(what, severity, when=0, value=0.0, causes=causes, next_steps=(advice,))

    def findings(self, run: Run) -> Iterator[Result]:
        lr = dict(rates(run))
        held = run.measured(HeldWeights)
        idle = {name: steps for name, steps in held.without_effect(run).items() if len(steps) >= MIN_IDLE}
        unmoved = [
            (p, span) for p in run.params.values() if (span := _unmoved(p, lr) or _span(idle.get(p.name)))
        ]
        if self.seen:
            yield from self.told(run, self.seen)
        elif stop := _without_rate(run):
            yield self._no_rate(run, stop)
        elif unmoved:
            yield self._still(unmoved)
        elif not any(len(p.series("update_ratio")) >= MIN_IDLE for p in run.params.values()):
            yield Skipped(f"fewer than {MIN_IDLE} steps were inspected")
        else:
            yield Passed("parameters that do not move (0)")

    def _still(self, unmoved: list[tuple[Param, Span]]) -> Finding:
        (param, span), *others = unmoved
        are = "parameters are" if len(others) > 1 else "parameter is"
        more = f"; {len(others)} more {are}, too" if others else ""
        causes = "the optimizer has a copy of it, or is never stepped", "something puts the old value back"
        advice = "Create the optimizer after the model is moved or changed, and call its step()"
        if span.first > 0:
            causes = "a step() that returns early, or works on copies of the weights", causes[1]
            advice = (
                f"Find out what has changed at step {span.first}: what step() calls, and which weights it has"
            )
        return self.finding(
            f"Parameter {param.name} has gradients and a learning rate, but is bit-identical after each of "
            f"the last {span.n} inspected steps that should have changed it{more}.",
            at=param,
            when=span,
            value=0.0,
            limit=0.0,
            causes=causes,
            next_steps=(advice,),
        )

    def _no_rate(self, run: Run, span: Span) -> Finding:
        top = max(finite(rates(run).values), default=0.0)
        past, cause, advice = "", "a learning rate of 0", "Set the learning rate"
        if top > 0:
            past, cause = f"; before, it was up to {top:.2g}", "a schedule that ends too early"
            advice = "Check the scheduler: its number of steps, and whether it counts batches or epochs"
        return self.finding(
            f"The learning rate has been 0 since step {span.first}{past}. Nothing is learned.",
            when=span,
            value=0.0,
            limit=0.0,
            causes=(cause,),
            next_steps=(advice,),
        )


@fault(
    "param.restored",
    Site.OPTIMIZER,
    needs="gradients batches",
    leads_to="loss.flat loss.trivial",
    exact=True,
    shown_by="params.update_ratio",
)
class Restored(Fault):
    """A weight that steps change, but that ends bit-identical to how it began.

    Formula: the median update ratio of at least five inspected steps is above 1e-6, there were twenty steps
    or more, and none of 1,024 elements has changed.
    """

    headline = "A weight is put back after each step"
    uses = (Parameters,)

    def findings(self, run: Run) -> Iterator[Result]:
        ratios = [(p, p.series("update_ratio")) for p in run.params.values() if p.is_weight]
        moving = [
            p
            for p, sizes in ratios
            if p.is_optimized and len(sizes) >= LATEST and sizes.median() > max(VISIBLE_UPDATE, p.resolution)
        ]
        if run.n_steps < MIN_STEPS or not moving:
            yield Skipped(f"fewer than {MIN_STEPS} steps, or no inspected step changed a weight")
            return
        if not (unchanged := [p for p in moving if not p.has_moved]):
            yield Passed("weights that are put back after each step")
            return
        first, *others = unchanged
        also = f"; the same is true of {join_names([p.name for p in others], 3)}" if others else ""
        yield self.finding(
            f"Steps change {first.name}, but after {run.n_steps} steps it is bit-identical to how "
            f"it began{also}.",
            at=first,
            when=(first.series("update_ratio").steps[0], None),
            value=0.0,
            limit=0.0,
            causes=("something puts the old value back after each step",),
            next_steps=("Look for code that copies or loads weights inside the loop",),
        )


def _span(steps: list[int] | None) -> Span | None:
    return Span(steps[0], steps[-1], len(steps)) if steps else None


def _unmoved(param: Param, lr: dict[int, float]) -> Span | None:
    """The last steps that should have changed the parameter and did not."""
    if not param.is_optimized or param.lr == 0 or param.kind in SPARSE_KINDS:
        return None
    table = {name: dict(series) for name, series in param.stats.items()}

    def at(name: str, step: int) -> float:
        return table.get(name, {}).get(step, math.nan)

    visible = max(VISIBLE_UPDATE, MIN_RESOLVED * param.resolution)
    is_large = math.prod(param.shape) > SAMPLE_SIZE
    moves = []
    for step, x in param.series("update_ratio"):
        expected = lr.get(step, math.nan) * ratio(at("clipped_norm", step), at("weight_norm", step))
        is_peaked = not at("abs_max", step) <= MAX_PEAK * at("rms", step)  # True if it was not read
        is_sparse = at("zero_rows", step) > 0 or (is_large and is_peaked)
        if visible < expected < math.inf and not is_sparse:
            moves.append((step, x))
    still = [step for step, _ in takewhile(lambda move: move[1] == 0, reversed(moves))]
    return Span(still[-1], still[0], len(still)) if len(still) >= LATEST else None


def _without_rate(run: Run) -> Span | None:
    """The last batches if their learning rate was 0 for too long to be the end of a decay."""
    lr = rates(run)
    zeros = [step for step, _ in takewhile(lambda pair: pair[1] == 0, reversed(list(lr)))]
    n = len(zeros)
    is_long = n >= N_NO_RATE and (n >= MIN_NO_RATE_SHARE * len(lr) or n >= MIN_NO_RATE)
    return Span(zeros[-1], zeros[0], n) if is_long and run.converged_at() > zeros[-1] else None
