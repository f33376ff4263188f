"""grad.attenuated: gradients that fade on the way from the loss to the input."""

import math
from collections.abc import Iterator, Sequence

from hookcb.diagnosis import rules
from hookcb.diagnosis.advice import begins_small, init_advice
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.figure import Figure, over_names
from hookcb.diagnosis.run import Param, Passed, Run, Series, Skipped, Span
from hookcb.diagnosis.verdict import Finding

# RMS of a weight's gradient / that of the largest; the smallest of 75 healthy trainings had 3e-4
MIN_RATIO, MIN_RATIO_WARNING = 1e-4, 1e-6
# share of the largest RMS; if a weight nearer to the input has more, nothing fades on the way to it
MAX_FAINT = 1e-3
MIN_KEPT = 0.01  # share of the RMS of the next layer; below it a single layer takes the gradient away
FLAT = ("Sigmoid", "Tanh", "Softsign", "LogSigmoid")


@fault(
    "grad.attenuated",
    Site.BACKWARD,
    needs="gradients",
    leads_to="update.too_small adam.eps loss.flat loss.trivial param.not_stepped",
    shown_by="params.norm",
)
class Attenuated(Fault):
    """Gradients that fade on the way from the loss to the input, so early layers do not learn.

    Formula: RMS of a weight's gradient / the largest RMS behind it (of all weights if their order is
    unknown), the median of the last five records before convergence, or the value after one backward. Not
    counted are records of zeros, which `unit.dead` finds; records in which one weight explodes, next to which
    all others look small; and weights behind one with more than 1e-3 of the largest RMS, as nothing fades on
    the way to it. Limit: 1e-4, and 1e-6 for an error; healthy trainings have 3e-4 or more, eight sigmoids in
    series 5e-7.

    Source: Glorot & Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    2010.
    """

    headline = "The first layers barely learn"

    def findings(self, run: Run) -> Iterator[Result]:
        until, n = run.converged_at(), rules.records_needed(run)
        sizes = {p.name: rules.gradient_sizes(p, until) for p in rules.weights(run)}
        params = [p for p in rules.weights(run) if len(sizes[p.name]) >= n]
        if len(params) < 2:
            yield Skipped(f"fewer than two weights had a gradient in {n} records before convergence")
            return
        ratios = _ratios(params, sizes)
        usual = [_latest(sizes[p.name]) for p in params]
        spans = [rules.trailing(series, lambda x: x < MIN_RATIO, n) for series in ratios]
        low = [  # weights with small gradients, their ratio to the largest, and records
            (p, _latest(series), span)
            for p, series, span in zip(params, ratios, spans, strict=True)
            if span and _is_faint_before(p, max(usual), run)
        ]
        known = [_latest(series) for series in ratios if len(series)]
        if low:
            latest = {p.name: _latest(x) for p, x in zip(params, ratios, strict=True)}
            title = "gradient (RMS) of each weight / the largest behind it, in the order of the model"
            yield self._attenuated(run, params, usual, low, over_names(title, latest, MIN_RATIO))
        elif known:
            worst = min(known)
            yield Passed(f"vanishing gradients (smallest {worst:.1g} of the largest)", worst, MIN_RATIO)
        else:
            yield Skipped("in each record one weight explodes, next to which all others look small")

    def _attenuated(
        self,
        run: Run,
        params: list[Param],
        usual: list[float],
        low: list[tuple[Param, float, Span]],
        figure: Figure,
    ) -> Finding:
        names, lowest = [p.name for p in params], min(low, key=lambda x: x[1])
        drops = {
            x for x, now, behind in zip(names, usual, usual[1:], strict=False) if now < MIN_KEPT * behind
        }
        # the one nearest to the loss that has far less than the one behind it; without one it is gradual
        steep = next((x for x in reversed(low) if x[0].name in drops), None)
        param, ratio, span = steep or lowest
        at = names.index(param.name)
        top = max(range(at, len(usual)), key=usual.__getitem__)
        largest = names[top if top != at else usual.index(max(usual))]
        how = " It falls at this layer all at once." if steep else ""
        if not steep and (n := top - at) > 1:
            how = f" It falls ×{(usual[at] / usual[top]) ** (1 / n):.2g} per layer over {n} layers."
        causes, steps = _why_attenuated(run, params[at : top + 1])
        return self.finding(
            f"The gradient (RMS) of {param.name} is {ratio:.1e} times that of {largest} (limit "
            f"{MIN_RATIO:.0e}), so the layer barely learns.{how}",
            "error" if lowest[1] < MIN_RATIO_WARNING else "warning",
            at=param,
            when=span,
            value=ratio,
            limit=MIN_RATIO,
            causes=causes,
            next_steps=steps,
            figure=figure,
        )


def _latest(series: Series) -> float:
    return rules.median(series.values[-rules.LATEST :])


def _is_faint_before(param: Param, largest: float, run: Run) -> bool:
    """Whether all parameters nearer to the input have small gradients, too; attention keys always do."""
    before = [p for p in run.params.values() if _comes_before(p, param)]
    return not any(_latest(p.series("rms")) > MAX_FAINT * largest for p in before)


def _comes_before(one: Param, other: Param) -> bool:
    """Whether `one` is nearer to the input, by order of execution, else of definition."""
    if one.place_of_layer is None or other.place_of_layer is None:
        return one.place < other.place
    return one.place_of_layer < other.place_of_layer


def _ratios(params: Sequence[Param], sizes: dict[str, Series]) -> list[Series]:
    """Series of each weight's size / that of the largest weight behind it."""
    table = {p.name: dict(sizes[p.name]) for p in params}
    found = [Series() for _ in params]
    is_ordered = any(p.place_of_layer is not None for p in params)
    for step in sorted({step for row in table.values() for step in row}):
        now = [table[p.name].get(step, math.nan) for p in params]
        most = max(rules.finite(now))
        usual = max(rules.median(now), next(x for x in reversed(now) if math.isfinite(x)))
        if most > rules.MAX_EXCESS * usual:
            continue
        behind = 0.0
        for series, size in zip(reversed(found), reversed(now), strict=True):
            if math.isfinite(size):
                behind = max(behind, size)
                series.add(step, size / (behind if is_ordered else most))
    return found


def _why_attenuated(run: Run, chain: Sequence[Param]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    advice = "Add normalization or residual connections"
    kinds = [layer.kind for layer in run.layers.values() if layer.kind in FLAT]
    if len(kinds) > 2:
        kind = max(sorted(set(kinds)), key=kinds.count)
        slope = ", each of which passes on at most a quarter of the gradient" if kind == "Sigmoid" else ""
        return (f"{kinds.count(kind)} {kind} layers in series{slope}",), (
            f"Use ReLU or GELU instead of {kind}, with normalization or residual connections",
        )
    if any(p.kind in rules.RECURRENT for p in run.params.values()):
        return ("a long sequence, along which the gradient fades", "closed gates"), (
            "Use shorter sequences, and initialize the forget-gate bias to 1",
        )
    deep = "many layers without a shortcut"
    if begins_small(chain):
        return ("weights that are initialized too small", deep), (init_advice(chain), advice)
    return ("saturated units", deep), (advice,)
