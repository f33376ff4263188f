"""Check of parameters that do not move."""

import math
from collections.abc import Iterator
from itertools import takewhile

from hookcb.diagnosis.checks.observed import passed_on
from hookcb.diagnosis.fault import Result, Site
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import (
    LATEST,
    VISIBLE_UPDATE,
    finding,
    finite,
    rates,
    ratio,
)
from hookcb.diagnosis.run import SPARSE_KINDS, Param, Passed, Run, Skipped, Span
from hookcb.diagnosis.verdict import Finding

MAX_PEAK = 30.0  # max |gradient| / RMS, which is 5 for normally distributed numbers
SAMPLE_SIZE = 1024  # elements of a weight from which updates are read
MIN_RESOLVED = 8  # expected update in units of the dtype's resolution
N_NO_RATE, MIN_NO_RATE_SHARE, MIN_NO_RATE = 10, 0.1, 20  # batches with a learning rate of 0


@check(
    "param.not_stepped",
    site=Site.OPTIMIZER,
    shown_by="params.update_ratio",
    needs=("gradients",),
    exact=True,
    leads_to=("loss.flat", "loss.trivial"),
)
def unmoved_parameters(evidence: Run) -> Iterator[Result]:
    """Parameters that never change: no step is made, the learning rate is 0, or steps do nothing.

    Exact: no step in twenty batches with a backward, and no sampled element of any weight has changed. Or a
    weight that is bit-identical after the last five or more steps that should have changed it, by
    lr · ‖g‖ / ‖W‖ above 1e-6 and above eight times the resolution of its dtype; gradients with zero rows, or
    so sparse that the sample of 1,024 elements may miss them, are left out. Or a learning rate of exactly 0
    over the last ten batches if they are a tenth of the run, or over the last twenty, before convergence;
    neither the very end of a decay nor the first step of a warmup is one.
    """
    if any(observation.code == "param.not_stepped" for observation in evidence.observations):
        yield from passed_on(evidence, "param.not_stepped", "error", "steps that are never made")
        return
    lr = dict(rates(evidence))
    unmoved = [(p, span) for p in evidence.params.values() if (span := _unmoved(p, lr))]
    if stop := _without_rate(evidence):
        yield _no_rate(evidence, stop)
    elif unmoved:
        yield _not_stepped(unmoved)
    elif not any(len(p.series("update_ratio")) >= LATEST for p in evidence.params.values()):
        yield Skipped(f"fewer than {LATEST} steps were inspected")
    else:
        yield Passed("parameters that do not move (0)")


def _unmoved(param: Param, lr: dict[int, float]) -> Span | None:
    """The last steps that should have changed the parameter and did not."""
    if not param.is_optimized or param.kind in SPARSE_KINDS:
        return None
    table = {name: dict(series) for name, series in param.stats.items()}

    def at(name: str, step: int) -> float:
        return table.get(name, {}).get(step, math.nan)

    visible = max(VISIBLE_UPDATE, MIN_RESOLVED * param.resolution)
    is_large = math.prod(param.shape) > SAMPLE_SIZE
    moves: list[tuple[int, float]] = []
    for step, x in param.series("update_ratio"):
        expected = lr.get(step, math.nan) * ratio(at("clipped_norm", step), at("weight_norm", step))
        is_peaked = not at("abs_max", step) <= MAX_PEAK * at("rms", step)  # True if it was not read
        is_sparse = at("zero_rows", step) > 0 or (is_large and is_peaked)
        if visible < expected < math.inf and not is_sparse:
            moves.append((step, x))
    still = [step for step, _ in takewhile(lambda move: move[1] == 0, reversed(moves))]
    return Span(still[-1], still[0], len(still)) if len(still) >= LATEST else None


def _not_stepped(unmoved: list[tuple[Param, Span]]) -> Finding:
    (param, span), *others = unmoved
    more = (
        f"; {len(others)} more {'parameters are' if len(others) > 1 else 'parameter is'}, too"
        if others
        else ""
    )
    return finding(
        "param.not_stepped",
        "error",
        at=param,
        when=span,
        value=0.0,
        limit=0.0,
        message=f"Parameter {param.name} has gradients and a learning rate, but is bit-identical after "
        f"{span.n} steps{more}.",
        causes=("the optimizer has a copy of it, or is never stepped", "something puts the old value back"),
        next_steps=("Create the optimizer after the model is moved or changed, and call its step()",),
    )


def _without_rate(evidence: Run) -> Span | None:
    """The last batches if their learning rate was 0 for too long to be the end of a decay."""
    lr = rates(evidence)
    zeros = [step for step, _ in takewhile(lambda pair: pair[1] == 0, reversed(list(lr)))]
    n = len(zeros)
    is_long = n >= N_NO_RATE and (n >= MIN_NO_RATE_SHARE * len(lr) or n >= MIN_NO_RATE)
    if not is_long or evidence.converged_at() <= zeros[-1]:
        return None
    return Span(zeros[-1], zeros[0], n)


def _no_rate(evidence: Run, span: Span) -> Finding:
    top = max(finite(rates(evidence).values), default=0.0)
    past = f"; before, it was up to {top:.2g}" if top > 0 else ""
    return finding(
        "param.not_stepped",
        "error",
        when=span,
        value=0.0,
        limit=0.0,
        message=f"The learning rate has been 0 since step {span.first}{past}. Nothing is learned.",
        causes=("a schedule that ends too early" if top > 0 else "a learning rate of 0",),
        next_steps=(
            "Check the scheduler: its number of steps, and whether it counts batches or epochs"
            if top > 0
            else "Set the learning rate",
        ),
    )
