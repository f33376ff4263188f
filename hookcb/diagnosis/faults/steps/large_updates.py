"""update.too_large: steps that change a weight by a large part of its size."""

import math
from collections.abc import Iterator
from itertools import takewhile

from hookcb.diagnosis import rules
from hookcb.diagnosis.advice import lower_rate
from hookcb.diagnosis.fault import Fault, Result, Site, fault, findings_of
from hookcb.diagnosis.run import Param, Passed, Run, Series, Skipped, Span
from hookcb.diagnosis.verdict import Finding

N_LARGE_FIRST = 3  # of the first ten records
LARGER_THAN_WEIGHTS = 1.0
FAR_LARGER = 10.0  # one such step is enough
LEARNED_WELL = 0.05  # share of the first loss that is left

_Large = tuple[Param, float, Span, float]  # with the size of the update and its limit
_Sizes = list[tuple[Param, Series]]


@fault(
    "update.too_large",
    Site.OPTIMIZER,
    needs="gradients",
    leads_to="unit.* act.* loss.* nonfinite.* grad.* attn.* head.logits update.lost_to_rounding",
    shown_by="params.update_ratio",
    draws_limit=True,
)
class LargeUpdates(Fault):
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

    headline = "Steps are too large"

    def findings(self, run: Run) -> Iterator[Result]:
        until = run.converged_at()
        sizes = [(p, series) for p in rules.weights(run) if len(series := rules.updates(p, until))]
        if all(len(series) < N_LARGE_FIRST for _, series in sizes):
            yield Skipped(f"fewer than {N_LARGE_FIRST} steps were inspected before convergence")
            return
        start = run.loss.values[0] if len(run.loss) else math.nan
        left = rules.loss_left(run, start)
        is_idle = not (math.isnan(left) or rules.has_learned(run, start) or rules.need_not_fall(run))
        huge = [x for p, series in sizes if (x := _huge(p, series))]
        if not (large := [x for p, series in sizes if is_idle and (x := _large(p, series))]):
            # first step after which units are dead, or outputs the same for all samples; 0 if there is none
            deaths = [*findings_of("unit.dead", run), *findings_of("act.collapse", run)]
            death = min((x.step or 0 for x in deaths), default=0)
            large = [x for p, series in sizes if (x := _large_before(p, series, death))]
        if huge and not rules.has_learned(run, start, LEARNED_WELL):
            yield self._too_large(run, huge, sizes, is_error=True)
        elif large:  # large steps that are not known to do harm may be intended
            yield self._too_large(run, large, sizes, is_error=left > 1)
        else:
            worst = max(rules.median(series.values) for _, series in sizes)
            yield Passed(f"large updates (at most {worst:.1e} of a weight)", *_nearest(sizes, is_idle))

    def _too_large(self, run: Run, large: list[_Large], sizes: _Sizes, is_error: bool) -> Finding:
        param, size, span, limit = max(large, key=lambda x: x[1])
        return self.finding(
            f"A step changes {param.name} by {rules.format_factor(size)} times its size (limit {limit:g}); "
            f"{rules.USUAL_UPDATE:g} is usual.",
            "error" if is_error else "warning",
            at=param,
            when=(_beginning(large, sizes), span.last),
            value=size,
            limit=limit,
            causes=("the learning rate is too high", "no warmup"),
            next_steps=(
                *(lower_rate(run) or (run.advise("rate"),)),
                "Add a learning rate warmup, or clip gradients",
            ),
        )


def _halves(series: Series) -> tuple[Series, Series]:
    """The first ten records, and the later ones."""
    n = rules.N_FIRST
    return Series(series.steps[:n], series.values[:n]), Series(series.steps[n:], series.values[n:])


def _huge(param: Param, series: Series) -> _Large | None:
    first, _ = _halves(series)
    span = rules.persistent(first, lambda x: x > LARGER_THAN_WEIGHTS, 2, rules.N_FIRST)
    span = span or rules.persistent(first, lambda x: x > FAR_LARGER, 1, rules.N_FIRST)
    return (param, max(first.values), span, LARGER_THAN_WEIGHTS) if span else None


def _large(param: Param, series: Series) -> _Large | None:
    first, later = _halves(series)
    early = _above(rules.MAX_FIRST_UPDATE, param, first, N_LARGE_FIRST, rules.N_FIRST)
    return early or _above(rules.MAX_UPDATE, param, later, rules.N_LARGE, rules.N_WINDOW)


def _large_before(param: Param, series: Series, death: int) -> _Large | None:
    early = rules.before(series, death)  # in which one or two very large steps may do
    if large := _above(rules.MAX_UPDATE, param, early, N_LARGE_FIRST, rules.N_FIRST):
        return large
    span = rules.persistent(early, lambda x: x > rules.MAX_FIRST_UPDATE, 1, rules.N_FIRST)
    return (param, max(early.values), span, rules.MAX_FIRST_UPDATE) if span else None


def _above(limit: float, param: Param, series: Series, n: int, window: int) -> _Large | None:
    """Updates above a limit in `n` of `window` records, with their median."""
    span = rules.persistent(series, lambda x: x > limit, n, window)
    return (param, rules.median(series.between(span.first, span.last).values), span, limit) if span else None


def _nearest(sizes: _Sizes, is_idle: bool) -> tuple[float, float]:
    """The update nearest to a limit, and that limit; two of three limits apply only if nothing is learned."""
    every = []
    for _, series in sizes:
        first, later = _halves(series)
        every.append((rules.persistent_max(first, 2, rules.N_FIRST), LARGER_THAN_WEIGHTS))
        if is_idle:
            every.append((rules.persistent_max(first, N_LARGE_FIRST, rules.N_FIRST), rules.MAX_FIRST_UPDATE))
            every.append((rules.persistent_max(later, rules.N_LARGE, rules.N_WINDOW), rules.MAX_UPDATE))
    known = [(size, limit) for size, limit in every if math.isfinite(size)]
    return max(known, key=lambda pair: pair[0] / pair[1], default=(math.nan, math.nan))


def _beginning(large: list[_Large], sizes: _Sizes) -> int:
    """First of the inspected steps in a row, up to the first large one, with an update above 0.05."""
    first, largest = min(span.first for _, _, span, _ in large), dict[int, float]()
    for step, x in (record for _, series in sizes for record in series):
        largest[step] = max(largest.get(step, 0.0), x if x > 0 else 0.0)  # a NaN does not count
    before = sorted((step for step in largest if step < first), reverse=True)
    return [first, *takewhile(lambda step: largest[step] > rules.MAX_UPDATE, before)][-1]
