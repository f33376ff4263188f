"""Checks of the gradient flow: vanishing gradients, exploding gradients, and units without a gradient."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from hookcb.diagnosis.checks.finding import finding
from hookcb.diagnosis.checks.updates import begins_large, begins_small, init_advice, lower_rate
from hookcb.diagnosis.evidence import WINDOW, Evidence, Layer, Param, Series
from hookcb.diagnosis.registry import Passed, Result, Site, Skipped, check
from hookcb.diagnosis.trends import (
    LATEST,
    Span,
    before,
    finite,
    format_factor,
    median,
    place,
    ratio,
    records_needed,
    trailing,
    weights,
)
from hookcb.diagnosis.verdict import Finding

# Limits next to the worst of 75 healthy trainings (those of tests/gradients, five seeds each).
ATTENUATED, ATTENUATED_ERROR = 1e-4, 1e-6  # RMS of a weight's gradient / that of the largest: 3e-4
FAINT = (
    1e-3  # of the largest RMS; a gradient above it nearer to the input means that nothing fades on the way
)
DROP = 0.01  # of the RMS of the next layer; below it a single layer takes the gradient away
# RMS / the larger of those of the median and of the last layer: 600, in the first steps of branches that
# begin with zeros.
EXPLODING = 1e3
REACHES = 1 / 30  # an exploding gradient reaches the layer before it, with at least this share of its size
JUMP, JUMP_BEFORE, MIN_BEFORE = 10.0, 50, 5  # total norm / its median over the records before
RISEN, MIN_AFTER = 2.0, 3  # loss after a jump / loss before it, and the number of batches after it
DEAD, DEAD_ERROR = 0.6, 0.8  # share of units; healthy trainings have up to 0.44
DEAD_LOOKS, DEAD_EXAMPLES, MIN_UNITS = 8, 512, 8
LEFT, LARGE_STEP = 0.05, 0.2  # share of the first loss; an update ratio that may have killed all units
ALL_DEAD, NO_DIAGNOSE, SILENT = 0.999, 0.99, 0.95  # share of rows, of rows in records, of zero activations
RECURRENT = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")
FLAT = ("Sigmoid", "Tanh", "Softsign", "LogSigmoid")


@dataclass(frozen=True, slots=True)
class _Low:
    """A weight with small gradients, their share of the largest behind it, and the records with them."""

    param: Param
    ratio: float
    span: Span


def _rms(param: Param, until: float) -> Series:
    """RMS of its gradient up to a step, without records of zeros: an expert is not used in each batch."""
    series = before(param.series("rms"), until)
    pairs = [(step, x) for step, x in series if x > 0]
    return Series([step for step, _ in pairs], [x for _, x in pairs])


@check(
    "grad.attenuated",
    site=Site.BACKWARD,
    needs=("gradients",),
    leads_to=("update.too_small", "loss.flat", "param.not_stepped"),
)
def attenuated_gradients(evidence: Evidence) -> Iterator[Result]:
    """Gradients that fade on the way from the loss to the input, so that early layers do not learn.

    Formula: RMS of a weight's gradient / that of the largest weight behind it (of all weights if their order
    is unknown), the median of the last five records before convergence, or of one backward. Records of zeros
    belong to `unit.dead` and are left out, as are records in which one weight explodes, since all others look
    small next to it. Limit: 1e-4, and 1e-6 for an error; healthy trainings came down to 3e-4, eight sigmoids
    in series to 5e-7.

    Source: Glorot & Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    2010.
    """
    until, n = evidence.converged_at(), records_needed(evidence)
    sizes = {p.name: _rms(p, until) for p in weights(evidence)}
    params = [p for p in weights(evidence) if len(sizes[p.name]) >= n]
    if len(params) < 2:
        yield Skipped(f"fewer than two weights had a gradient in {n} records before convergence")
        return
    ratios = _ratios(params, sizes)
    usual = max(median(sizes[p.name].values[-LATEST:]) for p in params)
    low = [
        _Low(p, median(series.values[-LATEST:]), span)
        for p, series in zip(params, ratios, strict=True)
        if (span := trailing(series, lambda x: x < ATTENUATED, n)) and _is_faint_before(p, usual, evidence)
    ]
    if low:
        yield _attenuated(evidence, params, sizes, low)
        return
    worst = min((median(series.values[-LATEST:]) for series in ratios if len(series)), default=math.nan)
    yield Passed(f"vanishing gradients (smallest {worst:.1g} of the largest)", worst, ATTENUATED)


def _is_faint_before(param: Param, largest: float, evidence: Evidence) -> bool:
    """Whether all weights nearer to the input have small gradients, too; attention keys always have."""
    others = [p for p in evidence.params.values() if _comes_before(p, param)]
    strongest = [median(p.series("rms").values[-LATEST:]) for p in others]
    return not any(x > FAINT * largest for x in strongest)


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
        most = max(finite(now))
        usual = max(median(now), next(x for x in reversed(now) if math.isfinite(x)))
        if most > EXPLODING * usual:
            continue
        behind = 0.0
        for series, size in zip(reversed(found), reversed(now), strict=True):
            if math.isfinite(size):
                behind = max(behind, size)
                series.add(step, size / (behind if is_ordered else most))
    return found


def _attenuated(
    evidence: Evidence, params: Sequence[Param], sizes: dict[str, Series], low: Sequence[_Low]
) -> Finding:
    usual = [median(sizes[p.name].values[-LATEST:]) for p in params]
    lowest = min(low, key=lambda found: found.ratio)
    names = [p.name for p in params]
    # the one nearest to the loss that has far less than the one behind it; without one the fall is gradual
    steep = [x for x in reversed(low) if (i := names.index(x.param.name)) + 1 < len(usual)
             and usual[i] < DROP * usual[i + 1]]  # fmt: skip
    named = steep[0] if steep else lowest
    at = names.index(named.param.name)
    top = max(range(at, len(usual)), key=lambda i: usual[i])
    largest = names[top] if top != at else names[max(range(len(usual)), key=lambda i: usual[i])]
    n = top - at
    falls = (
        f" It falls ×{(usual[at] / usual[top]) ** (1 / n):.2g} per layer over {n} layers." if n > 1 else ""
    )
    where = " It falls at this layer all at once." if steep else falls
    causes, steps = _why_attenuated(evidence, params[at : top + 1])
    return finding(
        "grad.attenuated",
        "error" if lowest.ratio < ATTENUATED_ERROR else "warning",
        at=named.param,
        when=named.span,
        value=named.ratio,
        limit=ATTENUATED,
        message=f"The gradient (RMS) of {named.param.name} is {named.ratio:.1e} times that of {largest}; "
        f"below {ATTENUATED:.0e} a layer barely learns.{where}",
        causes=causes,
        next_steps=steps,
    )


def _why_attenuated(evidence: Evidence, chain: Sequence[Param]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    kinds = [layer.kind for layer in evidence.layers.values() if layer.kind in FLAT]
    if len(kinds) > 2:
        kind = max(sorted(set(kinds)), key=kinds.count)
        slope = ", each of which passes on at most a quarter of the gradient" if kind == "Sigmoid" else ""
        return (f"{kinds.count(kind)} {kind} layers in series{slope}",), (
            f"Use ReLU or GELU instead of {kind}, or residual connections or normalization",
        )
    if any(p.kind in RECURRENT for p in evidence.params.values()):
        return ("a long sequence, along which the gradient fades step by step", "closed gates"), (
            "Use shorter sequences, and initialize the forget-gate bias to 1",
        )
    advice = "Add normalization or residual connections"
    if begins_small(chain):
        return ("weights that are initialized too small", "many layers without a shortcut"), (
            init_advice(chain),
            advice,
        )
    return ("saturated units", "many layers without a shortcut"), (advice,)


@check(
    "grad.exploding",
    site=Site.BACKWARD,
    needs=("gradients",),
    leads_to=(
        "update.too_large",
        "nonfinite.first",
        "loss.diverging",
        "loss.spike",
        "act.scale",
        "unit.dead",
        "param.*",
    ),
)
def exploding_gradients(evidence: Evidence) -> Iterator[Result]:
    """Gradients that grow on the way from the loss to the input, or from one step to the next.

    Formula: (a) RMS of a layer's largest weight gradient / the larger of those of the median and of the last
    layer, the median of five records, or of one backward. Limit: 1,000; healthy trainings came up to 600.
    Only layers count whose gradient is at most thirty times that of the layer before, since an explosion goes
    on to the input. (b) The norm of all gradients is above ten times its median over up to 50 records before,
    and the loss is twice as high in the ten batches after it as in the ten before: a rare batch alone is not
    a fault. Both before convergence.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
    """
    until, n = evidence.converged_at(), records_needed(evidence)
    layers = _by_layer(evidence, until)
    norms = before(evidence.steps.get("total_norm", Series()), until)
    if max((len(series) for _, series in layers), default=0) < n and len(norms) <= MIN_BEFORE:
        yield Skipped(f"fewer than {n} records of gradients before convergence")
    elif excess := _excess(layers, n):
        yield _exploding([p for p, _ in layers], *excess)
    elif jump := _jump(evidence, norms):
        yield _jumping(evidence, *jump)
    elif math.isnan(largest := _largest(layers, n)):
        yield Skipped("there is only one layer with weights")
    else:
        yield Passed(
            f"exploding gradients (largest ×{format_factor(largest)} of the usual)", largest, EXPLODING
        )


def _by_layer(evidence: Evidence, until: float) -> list[tuple[Param, Series]]:
    """The weight with the largest gradient in each layer, and the series of its RMS, in order."""
    layers: dict[str, list[tuple[Param, Series]]] = {}
    for p in weights(evidence):
        if len(series := _rms(p, until)):
            layers.setdefault(p.layer, []).append((p, series))
    return [max(pairs, key=lambda pair: median(pair[1].values)) for pairs in layers.values()]


def _windows(layers: list[tuple[Param, Series]], n: int) -> Iterator[tuple[int, int, list[float]]]:
    """First and last step of each `n` records in a row, and the median of each layer over them."""
    table = [dict(series) for _, series in layers]
    steps = sorted({step for row in table for step in row})
    for i, last in enumerate(steps[n - 1 :]):
        window = steps[i : i + n]
        yield window[0], last, [median(row.get(step, math.nan) for step in window) for row in table]


def _times_usual(sizes: list[float]) -> tuple[int, float]:
    """Index of the layer with the largest gradient, and its factor to the usual gradient; NaN if unknown."""
    known = sorted(finite(sizes))
    last = next((x for x in reversed(sizes) if math.isfinite(x)), math.nan)
    if len(known) < 2:
        return 0, math.nan
    usual = max(known[(len(known) - 1) // 2], last)  # of two layers the smaller one
    i = max(_passed_on(sizes), key=lambda i: sizes[i])
    return i, ratio(sizes[i], usual)


def _passed_on(sizes: list[float]) -> Iterator[int]:
    """Indices of layers whose gradient is not far above that of the layer before, as in an explosion.

    That of a value head next to a policy is: its gradient is large because its loss is.
    """
    previous = math.inf
    for i, size in enumerate(sizes):
        if math.isfinite(size):
            if previous >= REACHES * size:
                yield i
            previous = size


def _excess(layers: list[tuple[Param, Series]], n: int) -> tuple[Param, float, Span] | None:
    """The layer that exceeds the others, in the first `n` records in which one does."""
    for first, last, sizes in _windows(layers, n):
        i, excess = _times_usual(sizes)
        if excess > EXPLODING:
            return layers[i][0], excess, Span(first, last, n)
    return None


def _largest(layers: list[tuple[Param, Series]], n: int) -> float:
    factors = (_times_usual(sizes)[1] for *_, sizes in _windows(layers, n))
    return max((x for x in factors if x > 0), default=math.nan)


def _exploding(params: Sequence[Param], param: Param, excess: float, span: Span) -> Finding:
    is_recurrent = param.kind in RECURRENT
    cause = "a recurrent layer that multiplies the gradient at each time step" if is_recurrent else ""
    first = "Clip the norm of the gradients: GradientClip(1.0)"
    is_large = begins_large(params)
    second = "Initialize with smaller weights, or add normalization" if is_large else "Add normalization"
    return finding(
        "grad.exploding",
        "error",
        at=param,
        when=span,
        value=excess,
        limit=EXPLODING,
        message=f"The gradient (RMS) of {param.name} is {format_factor(excess)} times that of the median "
        f"layer and of the last layer; up to {EXPLODING:,.0f} times is healthy.",
        causes=(cause or "layers that each multiply the gradient",),
        next_steps=(first, second) if is_recurrent else (second, first),
    )


def _jump(evidence: Evidence, norms: Series) -> tuple[int, float] | None:
    """The first step whose total norm is far above those before, and after which the loss is higher."""
    values = norms.values
    for i in range(MIN_BEFORE, len(values)):
        usual = median(values[max(0, i - JUMP_BEFORE) : i])
        if values[i] > JUMP * usual > 0 and _rises(evidence, norms.steps[i]):
            return norms.steps[i], values[i] / usual
    return None


def _rises(evidence: Evidence, step: int) -> bool:
    """Whether the loss is twice as high in the ten batches after a step as in the ten before."""
    before_it = [x for at, x in evidence.loss if at <= step][-WINDOW:]
    after = sorted([x for at, x in evidence.loss if at > step][:WINDOW])
    if len(after) < MIN_AFTER or not finite(before_it):
        return False
    usual = median(before_it)
    return after[len(after) // 2] > usual + (RISEN - 1) * abs(usual)  # an infinite loss is high, too


def _jumping(evidence: Evidence, step: int, jump: float) -> Finding:
    norms = [(dict(p.series("norm")).get(step, math.nan), p) for p in evidence.params.values()]
    param = max(((x, p) for x, p in norms if x > 0), key=lambda pair: pair[0], default=(0.0, None))[1]
    most = f" Most of it comes from {param.name}." if param else ""
    return finding(
        "grad.exploding",
        "warning",
        at=param,
        when=step,
        value=jump,
        limit=JUMP,
        message=f"The norm of all gradients at step {step} is {format_factor(jump)} times its median before "
        f"(limit {JUMP:.0f}), and the loss is higher after it.{most}",
        causes=("a learning rate that is too high", "a batch with unusual samples"),
        next_steps=(
            "Clip the norm of the gradients: GradientClip(1.0)",
            f"Look at the batch of step {step}",
            *lower_rate(evidence),
        ),
    )


@check(
    "unit.dead",
    site=Site.MODULES,
    needs=("gradients",),
    leads_to=(
        "grad.attenuated",
        "update.too_small",
        "loss.flat",
        "act.collapse",
        "param.not_stepped",
        "param.unreachable",
    ),
)
def dead_units(evidence: Evidence) -> Iterator[Result]:
    """Units that no sample activates, so that their weights get no gradient and stay as they are.

    Formula: share of rows of a weight whose gradient was exactly zero each time, over 8 looks and 512
    examples. Without `Diagnose` the number of examples is unknown: then it is the smallest share of zero rows
    in 8 records, from 0.99 on, and nothing is ruled out below. Or no weight of the model has
    a gradient at all, in five records or after one backward.
    Limit: 0.6, and 0.8 for an error; healthy ReLU networks came to 0.44 in narrow layers. A layer is not dead
    if one of its weights gets gradients, such as an LSTM that sees sequences of one element. If whole layers
    are dead, those before them get no gradient either; the finding then names the layer at which the
    activations become zero.

    Source: Lu et al., "Dying ReLU and Initialization", 2019.
    """
    if silent := _silent_since(evidence):
        yield _all_silent(evidence, silent, f"All gradients are exactly zero since step {silent.first}")
        return
    shares = _dead_shares(evidence, has_converged=evidence.converged_at() < math.inf)
    if not shares and (silent := _silent_weights(evidence)):
        yield _all_silent(evidence, silent, "The gradients of all weights are exactly zero")
        return
    if not shares:
        yield Skipped(f"no weight was looked at {DEAD_LOOKS} times and at {DEAD_EXAMPLES} examples")
        return
    worst = max(share for _, share in shares.values())
    if worst < DEAD and all(math.isnan(p.dead) for p, _ in shares.values()):
        yield Skipped("dead units are counted by Diagnose, which knows the number of examples")
        return
    if worst < DEAD:
        yield Passed(f"dead units ({worst:.0%})", worst, DEAD)
        return
    all_dead = [p for p, share in shares.values() if share >= ALL_DEAD]
    if all_dead and _is_silent_throughout(evidence):
        begins = _first_silent(evidence, shares)
        if begins is None:
            yield Skipped("every gradient is exactly zero, so that no layer differs from another")
            return
    else:
        begins = _first_silent(evidence, shares) or _last_dead(evidence, all_dead) if all_dead else None
    param = begins or next(p for p, share in shares.values() if share == worst)
    others = sum(share >= DEAD for _, share in shares.values()) - (shares[param.layer][1] >= DEAD)
    yield _dead(evidence, param, max(worst if begins else 0.0, shares[param.layer][1]), others)


def _silent_since(evidence: Evidence) -> Span | None:
    """The last records, if all gradients are zero in them and a small loss does not explain it."""
    norms = list(evidence.steps.get("total_norm", Series()))
    silent = [step for step, _ in takewhile(lambda at: at[1] == 0, reversed(norms))]
    if len(silent) < LATEST or len(silent) == len(norms):
        return None
    if len(evidence.loss):
        is_left = abs(evidence.loss.values[-1]) > LEFT * abs(evidence.first_loss)
        return Span(silent[-1], silent[0], len(silent)) if is_left else None
    ratios = [x for p in weights(evidence) for step, x in p.series("update_ratio") if step < silent[-1]]
    return Span(silent[-1], silent[0], len(silent)) if max(ratios, default=0.0) > LARGE_STEP else None


def _silent_weights(evidence: Evidence) -> Span | None:
    """All records, if all weights have zero gradients; in a training, others must have a gradient."""
    norms = [p.series("norm") for p in weights(evidence) if p.stats]
    if min(map(len, norms), default=0) < records_needed(evidence) or any(any(x.values) for x in norms):
        return None
    if not evidence.is_one_backward and _is_silent_throughout(evidence):
        return None
    return Span(norms[0].steps[0], norms[0].steps[-1], len(norms[0]))


def _all_silent(evidence: Evidence, span: Span, what: str) -> Finding:
    shares = {p.layer: (p, 1.0) for p in weights(evidence)}
    param = _first_silent(evidence, shares)
    where = f", and all outputs from {param.layer} on are zero" if param else ""
    return finding(
        "unit.dead",
        "error",
        at=param,
        when=span,
        value=1.0,
        limit=DEAD,
        message=f"{what}{where}: the model learns nothing.",
        causes=(
            "a step that was too large, after which no unit is active",
            "an output or a loss that is constant",
        ),
        next_steps=(
            *lower_rate(evidence),
            "Look at the outputs and the loss at this step: they no longer depend on the weights",
        ),
    )


def _dead_shares(evidence: Evidence, has_converged: bool) -> dict[str, tuple[Param, float]]:
    """By layer, in order, the weight with the fewest dead units, and their share; in a list, the most."""
    shares: dict[str, tuple[Param, float]] = {}
    for p in weights(evidence):
        share = _dead_share(p, has_converged)
        before = shares[p.layer][1] if p.layer in shares else math.nan
        is_list = p.kind.startswith("Parameter")  # its weights have nothing else in common
        if not math.isnan(share) and not (share <= before if is_list else share >= before):
            shares[p.layer] = p, share
    return shares


def _dead_share(param: Param, has_converged: bool) -> float:
    if param.shape[0] < MIN_UNITS:
        return math.nan
    if not math.isnan(param.dead):
        is_enough = param.n_looked >= DEAD_LOOKS and param.n_examples >= DEAD_EXAMPLES
        share = param.never_alive if has_converged and not math.isnan(param.never_alive) else param.dead
        return share if is_enough else math.nan
    rows = finite(param.series("zero_rows").values)
    if len(rows) < DEAD_LOOKS:
        return math.nan
    return min(rows) if min(rows) >= NO_DIAGNOSE else 0.0


def _is_silent_throughout(evidence: Evidence) -> bool:
    """Whether no parameter has ever had a gradient, as with a constant loss."""
    return not any(x > 0 for p in evidence.params.values() for x in p.series("norm").values)


def _first_silent(evidence: Evidence, shares: dict[str, tuple[Param, float]]) -> Param | None:
    """Weight of the first layer after which, before the next layer with weights, all outputs are zero."""
    last: Param | None = None
    with_weights = {p.layer for p in weights(evidence)}
    for layer in sorted(evidence.layers.values(), key=lambda layer: layer.place):
        if layer.name in with_weights:
            last = shares[layer.name][0] if layer.name in shares else None
        if last and _is_silent(layer):
            return last
    return None


def _is_silent(layer: Layer) -> bool:
    return layer.series("zeros").median() >= SILENT


def _last_dead(evidence: Evidence, dead: list[Param]) -> Param | None:
    """The dead weight nearest to the loss, except those that only get zeros: their bias has a gradient."""
    with_bias = {
        p.layer
        for p in evidence.params.values()
        if len(p.shape) == 1 and any(x > 0 for x in p.series("norm").values)
    }
    ordered = sorted(dead, key=place)
    return next((p for p in reversed(ordered) if p.layer not in with_bias), ordered[-1])


def _dead(evidence: Evidence, param: Param, share: float, others: int) -> Finding:
    rows = param.series("zero_rows")
    span = trailing(rows, lambda x: x >= min(share, DEAD_ERROR))
    more = f", and {others} more layer{'s' * (others > 1)} with such units" if others else ""
    n = round(min(1.0, share) * param.shape[0])
    looks = (
        f"{param.n_looked} looks at {param.n_examples:,} examples"
        if param.n_looked
        else f"{len(rows)} records"
    )
    return finding(
        "unit.dead",
        "error" if share >= DEAD_ERROR else "warning",
        at=param,
        when=(
            param.dead_since if param.dead_since is not None else span.first if span else None,
            span.last if span else None,
        ),
        value=share,
        limit=DEAD,
        message=f"{share:.0%} of the units of {param.layer or param.name} ({n} of {param.shape[0]}) had no "
        f"gradient in {looks}; from {DEAD:.0%} on too few are left to learn{more}.",
        causes=("a bias far below zero or weights that are too large", "a step that was too large"),
        next_steps=(
            f"Look at the bias of {param.layer or param.name}, and at the inputs of the layer",
            *lower_rate(evidence),
            "Use LeakyReLU or GELU instead of ReLU",
        ),
    )
