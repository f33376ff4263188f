"""grad.exploding: gradients that grow from layer to layer, or from one step to the next."""

import math
from collections.abc import Iterator, Sequence

from hookcb.diagnosis import rules
from hookcb.diagnosis.advice import begins_large, lower_rate
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.figure import over_names, over_steps
from hookcb.diagnosis.run import WINDOW, Param, Passed, Run, Series, Skipped, Span
from hookcb.diagnosis.verdict import Finding

MIN_REACHING = 1 / 30  # share of an exploding gradient that reaches the layer before it
MAX_JUMP, N_BEFORE, MIN_BEFORE = 10.0, 50, 5  # total norm / its median over the records before
MAX_RISE, MIN_AFTER = 2.0, 3  # loss after a jump / loss before it, and the number of batches after it


@fault(
    "grad.exploding",
    Site.BACKWARD,
    needs="gradients",
    leads_to="update.too_large nonfinite.first loss.diverging loss.spike act.scale unit.dead param.*",
    shown_by="params.norm",
)
class Exploding(Fault):
    """Gradients that grow on the way from the loss to the input, or from one step to the next.

    Formula: (a) RMS of a layer's largest weight gradient / the RMS of the median layer or of the last one,
    whichever is larger, the median of five records, or the value after one backward. Limit: 1,000; healthy
    trainings reach 600. Layers with more than thirty times the gradient of the layer before do not count, as
    an explosion continues to the input. (b) Norm of all gradients / its median over up to 50 records before.
    Limit: ten, if the median loss of the ten batches after it is also twice that of the ten before: a rare
    batch alone is not a fault. Both before convergence.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
    """

    headline = "Gradients explode"

    def findings(self, run: Run) -> Iterator[Result]:
        until, n = run.converged_at(), rules.records_needed(run)
        layers = _by_layer(run, until)
        norms = rules.before(run.steps.get("total_norm", Series()), until)
        if max((len(series) for _, series in layers), default=0) < n and len(norms) <= MIN_BEFORE:
            yield Skipped(f"fewer than {n} records of gradients before convergence")
            return
        excesses = [(*_excess(sizes), span, sizes) for span, sizes in _windows(layers, n)]
        above = next((excess for excess in excesses if excess[1] > rules.MAX_EXCESS), None)
        if above is not None:
            yield self._exploding(run, [p for p, _ in layers], *above)
        elif jump := _jump(run, norms):
            yield self._jumping(run, norms, *jump)
        elif known := [x for _, x, *_ in excesses if x > 0]:
            text = f"exploding gradients (largest {rules.format_factor(max(known))} times the usual)"
            yield Passed(text, max(known), rules.MAX_EXCESS)
        else:
            yield Skipped("fewer than two layers had a gradient other than 0")

    def _exploding(
        self, run: Run, params: Sequence[Param], i: int, excess: float, span: Span, sizes: list[float]
    ) -> Finding:
        param, usual = params[i], sizes[i] / excess
        shares = {p.name: rules.ratio(size, usual) for p, size in zip(params, sizes, strict=True)}
        is_recurrent, clip = param.kind in rules.RECURRENT, run.advise("clip")
        cause = "a recurrent layer that multiplies the gradient at each time step"
        is_large = begins_large(params)
        scale = "Initialize with smaller weights, or add normalization" if is_large else "Add normalization"
        return self.finding(
            f"The gradient (RMS) of {param.name} is {rules.format_factor(excess)} times that of the median "
            f"layer and of the last layer (limit {rules.MAX_EXCESS:,.0f}).",
            at=param,
            when=span,
            value=excess,
            limit=rules.MAX_EXCESS,
            causes=(cause if is_recurrent else "layers that each multiply the gradient",),
            next_steps=(clip, scale) if is_recurrent else (scale, clip),
            figure=over_names(
                "gradient (RMS) of each layer / that of the median or the last one", shares, rules.MAX_EXCESS
            ),
        )

    def _jumping(self, run: Run, total: Series, step: int, jump: float) -> Finding:
        norms = {name: dict(p.series("norm")).get(step, math.nan) for name, p in run.params.items()}
        known = [name for name, x in norms.items() if x > 0]
        title = "norm of all gradients"
        param = run.params[max(known, key=lambda name: norms[name])] if known else None
        most = f" Most of it comes from {param.name}." if param else ""
        return self.finding(
            f"The norm of all gradients at step {step} is {rules.format_factor(jump)} times its median "
            f"before that (limit {MAX_JUMP:.0f}), and the loss is higher afterwards.{most}",
            "warning",
            at=param,
            when=step,
            value=jump,
            limit=MAX_JUMP,
            causes=("a learning rate that is too high", "a batch with unusual samples"),
            next_steps=(run.advise("clip"), f"Look at the batch of step {step}", *lower_rate(run)),
            figure=over_steps(title, {title: total}, MAX_JUMP * dict(total)[step] / jump),
        )


def _by_layer(run: Run, until: float) -> list[tuple[Param, Series]]:
    """The weight with the largest gradient in each layer, and the series of its RMS, in order."""
    layers: dict[str, list[tuple[Param, Series]]] = {}
    for p in rules.weights(run):
        if len(series := rules.gradient_sizes(p, until)):
            layers.setdefault(p.layer, []).append((p, series))
    return [max(pairs, key=lambda pair: rules.median(pair[1].values)) for pairs in layers.values()]


def _windows(layers: list[tuple[Param, Series]], n: int) -> Iterator[tuple[Span, list[float]]]:
    """All runs of `n` records in a row, and the median of each layer over them."""
    table = [dict(series) for _, series in layers]
    steps = sorted({step for row in table for step in row})
    for i, last in enumerate(steps[n - 1 :]):
        window = steps[i : i + n]
        sizes = [rules.median(row.get(step, math.nan) for step in window) for row in table]
        yield Span(window[0], last, n), sizes


def _excess(sizes: list[float]) -> tuple[int, float]:
    """Index of the layer with the largest gradient, and its factor to the usual gradient; NaN if unknown."""
    known = sorted(rules.finite(sizes))
    last = next((x for x in reversed(sizes) if math.isfinite(x)), math.nan)
    if len(known) < 2:
        return 0, math.nan
    usual = max(known[(len(known) - 1) // 2], last)  # of two layers the smaller one
    i = max(_passed_on(sizes), key=lambda i: sizes[i])
    return i, rules.ratio(sizes[i], usual)


def _passed_on(sizes: list[float]) -> Iterator[int]:
    """Indices of layers with a gradient that is not far above that of the layer before, as in an explosion.

    The gradient of a value head next to a policy is far above, as its loss is large.
    """
    previous = math.inf
    for i, size in enumerate(sizes):
        if math.isfinite(size):
            if previous >= MIN_REACHING * size:
                yield i
            previous = size


def _jump(run: Run, norms: Series) -> tuple[int, float] | None:
    """The first step with a total norm far above those before it, after which the loss is higher."""
    for i in range(MIN_BEFORE, len(values := norms.values)):
        usual = rules.median(values[max(0, i - N_BEFORE) : i])
        if values[i] > MAX_JUMP * usual > 0 and _rises(run, norms.steps[i]):
            return norms.steps[i], values[i] / usual
    return None


def _rises(run: Run, step: int) -> bool:
    """Whether the loss is twice as high in the ten batches after a step as in the ten before."""
    before_it = [x for at, x in run.loss if at <= step][-WINDOW:]
    after = sorted([x for at, x in run.loss if at > step][:WINDOW])
    if len(after) < MIN_AFTER or not rules.finite(before_it):
        return False
    usual = rules.median(before_it)
    return after[len(after) // 2] > usual + (MAX_RISE - 1) * abs(usual)  # an infinite loss is high, too
