"""Checks of the size of optimizer steps relative to the weights."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.advice import MIN_FACTOR, lower_rate, multiplier
from hookcb.diagnosis.checks.dead_units import dead_units
from hookcb.diagnosis.checks.layers import collapsed_activations
from hookcb.diagnosis.fault import Result, Site
from hookcb.diagnosis.fault import findings_of as found_by
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import (
    LATEST,
    LEARNED,
    MAX_FIRST_UPDATE,
    MAX_UPDATE,
    N_FIRST,
    N_LARGE,
    N_WINDOW,
    USUAL_UPDATE,
    before,
    finding,
    findings_of,
    format_factor,
    has_learned,
    is_warming_up,
    loss_left,
    median,
    need_not_fall,
    persistent,
    persistent_max,
    rates,
    recent_updates,
    trailing,
    updates,
    usual_update,
    weights,
)
from hookcb.diagnosis.run import Param, Passed, Run, Series, Skipped, Span
from hookcb.diagnosis.verdict import Finding

N_LARGE_FIRST = 3  # of the first ten records
LARGER_THAN_WEIGHTS = 1.0
FAR_LARGER = 10.0  # one such step is enough
LEARNED_WELL, BARELY_LEARNED = 0.05, 0.9  # share of the first loss that is left
MIN_UPDATE, MIN_UPDATE_WARNING = 1e-5, 1e-6
MAX_SMALL, MAX_SMALL_SUM = USUAL_UPDATE / 10, 0.1  # update ratio, and all together, if the loss is flat
TRAINED = 0.5  # of the loss of a constant; a model that begins below it was trained before
MIN_WARM_UP = 80  # batches; a shorter warmup may still be as intended


@check(
    "update.too_large",
    site=Site.OPTIMIZER,
    shown_by="params.update_ratio",
    draws_limit=True,
    needs=("gradients",),
    leads_to=(
        "unit.*",
        "act.*",
        "loss.*",
        "nonfinite.*",
        "grad.*",
        "attn.collapse",
        "update.lost_to_rounding",
    ),
)
def large_updates(evidence: Run) -> Iterator[Result]:
    """Steps that change a weight by a large part of its size.

    Formula: max over weights of ‖ΔW‖ / ‖W‖, with ‖W‖ at least that of torch's default initialization, a std
    of 1/sqrt(3 fan in), so weights that begin near zero and grow (a zero-initialized last layer, LoRA) do not
    count as changed by much. Limit: 0.2 in three of the first ten records, 0.05 in five of eight later ones;
    1e-3 is usual. 0.05 in three of ten records is enough before units die, or the outputs become the same for
    all samples, that were not so at first. An error if two of the first ten steps are larger than the
    weights, or if the loss rises. Left out are embeddings of tokens and positions, which are added, and
    trainings with a loss that falls by a fifth, or, with steps larger than the weights, to a twentieth, if
    the model is better than a constant; and, with smaller steps, those with a loss of an unknown kind, which
    need not fall. It begins with the first of the inspected steps in a row, up to the large ones, that change
    any weight by more than 0.05. The advice is computed from the first steps, up to the one after which the
    loss is higher.

    Source: A. Karpathy, CS231n notes, "Ratio of weights:updates".
    """
    until = evidence.converged_at()
    sizes = [(p, updates(p, until)) for p in weights(evidence)]
    sizes = [(p, series) for p, series in sizes if len(series)]
    if max((len(series) for _, series in sizes), default=0) < N_LARGE_FIRST:
        yield Skipped(f"fewer than {N_LARGE_FIRST} steps were inspected before convergence")
        return
    start = evidence.loss.values[0] if len(evidence.loss) else math.nan
    left = loss_left(evidence, start)
    is_idle = not (math.isnan(left) or has_learned(evidence, start) or need_not_fall(evidence))
    huge = [x for x in (_huge(p, series) for p, series in sizes) if x]
    large = [x for x in (_large(p, series) for p, series in sizes) if x and is_idle]
    if not large:
        death = _death(evidence)
        large = [x for x in (_large_before(p, series, death) for p, series in sizes) if x]
    if huge and not has_learned(evidence, start, LEARNED_WELL):
        yield _too_large(evidence, huge, _step_sizes(sizes), is_error=True)
    elif large:  # large steps that are not known to do harm may be intended
        yield _too_large(evidence, large, _step_sizes(sizes), is_error=left > 1)
    else:
        worst = max(median(series.values) for _, series in sizes)
        yield Passed(f"large updates (at most {worst:.1e} of a weight)", *_nearest(sizes, is_idle))


_Large = tuple[Param, float, Span, float]  # with the size of the update and its limit


def _huge(param: Param, series: Series) -> _Large | None:
    first = Series(series.steps[:N_FIRST], series.values[:N_FIRST])
    span = persistent(first, lambda x: x > LARGER_THAN_WEIGHTS, 2, N_FIRST)
    span = span or persistent(first, lambda x: x > FAR_LARGER, 1, N_FIRST)
    return (param, max(first.values), span, LARGER_THAN_WEIGHTS) if span else None


def _large(param: Param, series: Series) -> _Large | None:
    first = Series(series.steps[:N_FIRST], series.values[:N_FIRST])
    if span := persistent(first, lambda x: x > MAX_FIRST_UPDATE, N_LARGE_FIRST, N_FIRST):
        return param, median(first.between(span.first, span.last).values), span, MAX_FIRST_UPDATE
    later = Series(series.steps[N_FIRST:], series.values[N_FIRST:])
    if span := persistent(later, lambda x: x > MAX_UPDATE, N_LARGE, N_WINDOW):
        return param, median(later.between(span.first, span.last).values), span, MAX_UPDATE
    return None


def _death(evidence: Run) -> int:
    """First step after which units are dead, or outputs the same for all samples; 0 if none, or at once."""
    found = [*findings_of(dead_units, evidence), *findings_of(collapsed_activations, evidence)]
    return min((f.step or 0 for f in found), default=0)


def _large_before(param: Param, series: Series, death: int) -> _Large | None:
    early = before(series, death)
    if span := persistent(early, lambda x: x > MAX_UPDATE, N_LARGE_FIRST, N_FIRST):
        return param, median(early.between(span.first, span.last).values), span, MAX_UPDATE
    if span := persistent(early, lambda x: x > MAX_FIRST_UPDATE, 1, N_FIRST):  # one or two steps may do
        return param, max(early.values), span, MAX_FIRST_UPDATE
    return None


def _nearest(updates_of: list[tuple[Param, Series]], is_idle: bool) -> tuple[float, float]:
    """The update nearest to a limit, and that limit; two of three limits apply only if nothing is learned."""
    sizes = []
    for _, series in updates_of:
        first = Series(series.steps[:N_FIRST], series.values[:N_FIRST])
        later = Series(series.steps[N_FIRST:], series.values[N_FIRST:])
        sizes.append((persistent_max(first, 2, N_FIRST), LARGER_THAN_WEIGHTS))
        if is_idle:
            sizes.append((persistent_max(first, N_LARGE_FIRST, N_FIRST), MAX_FIRST_UPDATE))
            sizes.append((persistent_max(later, N_LARGE, N_WINDOW), MAX_UPDATE))
    known = [(size, limit) for size, limit in sizes if math.isfinite(size)]
    return max(known, key=lambda pair: pair[0] / pair[1], default=(math.nan, math.nan))


def _step_sizes(sizes: list[tuple[Param, Series]]) -> dict[int, float]:
    """The largest update of a weight, by inspected step; a NaN does not count."""
    largest: dict[int, float] = {}
    for _, series in sizes:
        for step, x in series:
            largest[step] = max(largest.get(step, 0.0), x if x > 0 else 0.0)
    return largest


def _beginning(large: list[_Large], largest: dict[int, float]) -> int:
    """First of the inspected steps in a row, up to the first large one, with an update above 0.05."""
    first = min(span.first for _, _, span, _ in large)
    for step in sorted((step for step in largest if step < first), reverse=True):
        if largest[step] <= MAX_UPDATE:
            break
        first = step
    return first


def _too_large(evidence: Run, large: list[_Large], largest: dict[int, float], is_error: bool) -> Finding:
    param, size, span, limit = max(large, key=lambda x: x[1])
    return finding(
        "update.too_large",
        "error" if is_error else "warning",
        at=param,
        when=(_beginning(large, largest), span.last),
        value=size,
        limit=limit,
        message=f"A step changes {param.name} by {format_factor(size)} times its size (limit {limit:g}); "
        f"{USUAL_UPDATE:g} is usual.",
        causes=("the learning rate is too high", "no warmup"),
        next_steps=(
            *(lower_rate(evidence) or (evidence.advise("rate"),)),
            "Add a learning rate warmup, or clip gradients",
        ),
    )


@check(
    "update.too_small",
    site=Site.OPTIMIZER,
    shown_by="params.update_ratio",
    draws_limit=True,
    needs=("gradients",),
    leads_to=("loss.flat", "loss.trivial", "train.unfinished"),
)
def small_updates(evidence: Run) -> Iterator[Result]:
    """Steps that barely change the weights, so nothing is learned in reasonable time.

    Formula: median over weights of the median ‖ΔW‖ / ‖W‖ of the last ten records before convergence (at least
    five), each scaled to the largest learning rate, so neither warmup nor the end of a decay counts. Limit:
    1e-5, a hundredth of the usual 1e-3, or 1e-4 if the loss is flat and near guessing and all steps together
    are below 0.1; an error below 1e-6 if the loss falls by less than a tenth. No finding if it falls by a
    fifth. Not judged if it begins below half of that of the best constant: a model that was trained before
    may have little left to learn.

    Source: A. Karpathy, CS231n notes, "Ratio of weights:updates".
    """
    if is_warming_up(evidence):
        yield from _never_warm(evidence)
        return
    recent = recent_updates(evidence)
    if not recent:
        yield Skipped(f"fewer than {LATEST} steps were inspected before convergence")
        return
    size, left = usual_update(recent), loss_left(evidence, evidence.first_loss)
    limit = MAX_SMALL if _has_barely_moved(evidence, size) else MIN_UPDATE
    if size >= limit or left < LEARNED:
        yield Passed(f"learning rate too low (update ratio {size:.1e})", size, limit)
        return
    if evidence.first_loss < TRAINED * evidence.measured(Loss).constant:
        yield Skipped("the model was trained before, and may have little left to learn")
        return
    causes, advice = _why_small(evidence, size)
    small = [trailing(series, lambda x: x < limit) for series in recent]
    first = min(span.first if span else series.steps[0] for span, series in zip(small, recent, strict=True))
    yield finding(
        "update.too_small",
        "error" if size < MIN_UPDATE_WARNING and left > BARELY_LEARNED else "warning",
        when=(first, max(series.steps[-1] for series in recent)),
        value=size,
        limit=limit,
        message=f"A step changes the median weight by {size:.2g} of its size (limit {limit:g}); "
        f"{USUAL_UPDATE:g} is usual.",
        causes=causes,
        next_steps=advice,
    )


def _has_barely_moved(evidence: Run, size: float) -> bool:
    """Whether steps of this size cannot have moved the weights far, and the loss has not fallen."""
    is_flat = any(f.severity == "warning" for f in found_by("loss.flat", evidence))
    return is_flat and size * evidence.n_steps < MAX_SMALL_SUM


def _why_small(evidence: Run, size: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Causes and advice; no learning rate helps if all gradients are zero."""
    if size == 0:
        return ("the gradient of most weights is exactly zero, whatever the learning rate",), (
            "Look at the last layers and the loss: a softmax over one unit is constant, and a clamp, a ReLU "
            "or a saturated sigmoid at its limit passes no gradient",
        )
    n = multiplier(evidence, size)
    if n < MIN_FACTOR:
        return ("gradients of most weights that are far smaller than those of a few",), (
            "Find out why gradients vanish: the learning rate is already large enough for some weights",
        )
    return ("the learning rate is too low", "gradients that are very small, or clipped"), (
        f"Multiply the learning rate by {n:,}",
        evidence.advise("rate"),
    )


def _never_warm(evidence: Run) -> Iterator[Result]:
    """Finding on a warmup that has lasted long and has barely moved the weights yet."""
    sizes = [p.series("update_ratio").median(LATEST) for p in weights(evidence) if p.is_optimized]
    size, lr = median(sizes), rates(evidence)
    if not (size < MIN_UPDATE_WARNING and evidence.n_batches >= MIN_WARM_UP):
        yield Skipped("the learning rate is still rising")
        return
    yield finding(
        "update.too_small",
        "warning",
        when=lr,
        value=size,
        limit=MIN_UPDATE_WARNING,
        message=f"The learning rate is still rising after {evidence.n_batches} batches; at "
        f"{lr.values[-1]:.1e}, a step changes the median weight by {size:.2g} of its size (limit "
        f"{MIN_UPDATE_WARNING:g}); {USUAL_UPDATE:g} is usual.",
        causes=("a warmup that is far too long, or a length that is not in units of the scheduler's steps",),
        next_steps=("Check the number of warmup steps of the scheduler",),
    )
