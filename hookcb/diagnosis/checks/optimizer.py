"""Checks of what the optimizer does: size of updates, clipping, weight decay, weights that stay."""

import math
from collections.abc import Iterator
from itertools import takewhile

from hookcb.diagnosis.checks.finding import finding
from hookcb.diagnosis.checks.observed import passed_on
from hookcb.diagnosis.checks.updates import LEAST, lower_rate, multiplier, updates
from hookcb.diagnosis.evidence import SPARSE_KINDS, WINDOW, Evidence, Param, Series
from hookcb.diagnosis.registry import Passed, Result, Site, Skipped, check
from hookcb.diagnosis.trends import (
    LATEST,
    Span,
    before,
    finite,
    format_factor,
    held,
    is_warming_up,
    loss_left,
    median,
    persistent,
    rates,
    ratio,
    trailing,
    weights,
)
from hookcb.diagnosis.verdict import Finding

TOO_LARGE_AT_FIRST, N_FIRST, PERSISTS_AT_FIRST = 0.2, 10, 3  # Adam with lr 1e-2 begins with 0.1 to 0.2
TOO_LARGE, PERSISTS, OF = 0.05, 5, 8  # later; 1e-3 is usual
LARGER_THAN_WEIGHTS = 1.0
FAR_LARGER = 10.0  # one such step is enough
LONG_WARM_UP = 80  # batches
LEARNED, LEARNED_WELL = 0.8, 0.05  # share of the first loss that is left; below it the updates do their work
TOO_SMALL, TOO_SMALL_ERROR = 1e-5, 1e-6
HARDLY = 0.9  # share of the first loss that is left
CLIPPED, CLIPPED_SHARE, CLIPPED_TO, CLIPPED_TO_NOTHING = 0.999, 0.95, 0.01, 1e-4
LARGE_NORM = 100.0  # of all gradients; a limit of clipping is 0.1 to 10 as a rule
DECAY, DECAY_RECORDS = 0.9, 20  # share of the decay in the step
USUAL_DECAY = 0.1  # what AdamW is given as a rule is no more
SHRUNK, DECAYED = 0.1, 2.0  # to 1/sqrt(fan in); sum of lr · weight decay that explains it, e**-2
SPARSE = 30.0  # max |gradient| to its RMS, which of normal numbers is 5
SKETCH = 1024  # elements of a weight that updates are read from
VISIBLE, RESOLVED = 1e-6, 8  # of a step lr · gradient to the weight, and in units of its resolution
NO_RATE, NO_RATE_SHARE, NO_RATE_MANY = 10, 0.1, 20  # batches with a learning rate of 0
SKIPPED, MOST_SKIPPED = 0.1, 4  # a scaler that begins too high skips a few steps, and should


@check(
    "update.too_large",
    site=Site.OPTIMIZER,
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
def large_updates(evidence: Evidence) -> Iterator[Result]:
    """Steps that change a weight by much of its size.

    Formula: max over weights of ‖ΔW‖ / ‖W‖, where ‖W‖ counts at least as with torch's own initialization, a
    std of 1/sqrt(3 fan in): weights that begin near zero and grow (a last layer of zeros, LoRA) are not
    changed by much. Limit: 0.2 in three of the first ten records, 0.05 in five of eight later ones; 1e-3 is
    usual. An error where two of the first ten steps are larger than the weights, or the loss rises. Left out:
    tokens and positions, which are added, and trainings whose loss falls all the same by a fifth, or, with
    steps larger than the weights, to a twentieth. The advice is computed from the first steps, up to the one
    after which the loss is higher.

    Source: A. Karpathy, CS231n notes, "Ratio of weights:updates".
    """
    until = evidence.converged_at()
    found = [(p, updates(p, until)) for p in weights(evidence)]
    found = [(p, series) for p, series in found if len(series)]
    if max((len(series) for _, series in found), default=0) < PERSISTS_AT_FIRST:
        yield Skipped(f"fewer than {PERSISTS_AT_FIRST} steps were looked at before convergence")
        return
    left = loss_left(evidence, evidence.loss.values[0] if len(evidence.loss) else math.nan)
    huge = [x for x in (_huge(p, series) for p, series in found) if x]
    large = [x for x in (_large(p, series) for p, series in found) if x]
    if huge and not left < LEARNED_WELL:
        yield _too_large(evidence, max(huge, key=lambda x: x[1]), is_error=True)
    elif large and left >= LEARNED:  # what is not known to harm may be meant
        yield _too_large(evidence, max(large, key=lambda x: x[1]), is_error=left > 1)
    else:
        worst = max(median(series.values) for _, series in found)
        yield Passed(f"large updates (at most {worst:.1e} of a weight)", *_nearest(found, left >= LEARNED))


_Large = tuple[Param, float, Span, float]


def _huge(param: Param, series: Series) -> _Large | None:
    first = Series(series.steps[:N_FIRST], series.values[:N_FIRST])
    span = persistent(first, lambda x: x > LARGER_THAN_WEIGHTS, 2, N_FIRST)
    span = span or persistent(first, lambda x: x > FAR_LARGER, 1, N_FIRST)
    return (param, max(first.values), span, LARGER_THAN_WEIGHTS) if span else None


def _large(param: Param, series: Series) -> _Large | None:
    first = Series(series.steps[:N_FIRST], series.values[:N_FIRST])
    if span := persistent(first, lambda x: x > TOO_LARGE_AT_FIRST, PERSISTS_AT_FIRST, N_FIRST):
        return param, median(first.between(span.first, span.last).values), span, TOO_LARGE_AT_FIRST
    later = Series(series.steps[N_FIRST:], series.values[N_FIRST:])
    if span := persistent(later, lambda x: x > TOO_LARGE, PERSISTS, OF):
        return param, median(later.between(span.first, span.last).values), span, TOO_LARGE
    return None


def _nearest(found: list[tuple[Param, Series]], is_idle: bool) -> tuple[float, float]:
    """The updates that come nearest to a limit, and that; there are three only where the loss stays."""
    sizes = []
    for _, series in found:
        first = Series(series.steps[:N_FIRST], series.values[:N_FIRST])
        later = Series(series.steps[N_FIRST:], series.values[N_FIRST:])
        sizes.append((held(first, 2, N_FIRST), LARGER_THAN_WEIGHTS))
        if is_idle:
            sizes.append((held(first, PERSISTS_AT_FIRST, N_FIRST), TOO_LARGE_AT_FIRST))
            sizes.append((held(later, PERSISTS, OF), TOO_LARGE))
    known = [(size, limit) for size, limit in sizes if math.isfinite(size)]
    return max(known, key=lambda of: of[0] / of[1], default=(math.nan, math.nan))


def _too_large(evidence: Evidence, found: _Large, is_error: bool) -> Finding:
    param, size, span, limit = found
    return finding(
        "update.too_large",
        "error" if is_error else "warning",
        at=param,
        when=span,
        value=size,
        limit=limit,
        message=f"A step changes {param.name} by {format_factor(size)} times its size; {limit:g} is too much, 0.001 "
        "is usual.",
        causes=("the learning rate is too high", "no warm-up"),
        next_steps=(
            *(lower_rate(evidence) or ("Find a learning rate: learn.lr_find()",)),
            "Begin with a warm-up, or clip gradients",
        ),
    )


@check(
    "update.too_small",
    site=Site.OPTIMIZER,
    needs=("gradients",),
    leads_to=("loss.flat",),
)
def small_updates(evidence: Evidence) -> Iterator[Result]:
    """Steps that hardly change the weights, so that nothing is learned in reasonable time.

    Formula: median over weights of the median ‖ΔW‖ / ‖W‖ of the last ten records before convergence, five or
    more, each for the largest learning rate: neither warm-up nor the end of a decay counts. Limit: 1e-5,
    a hundredth of the usual 1e-3; an error below 1e-6 where the loss hardly falls. Nothing is said where it
    falls by a fifth.

    Source: A. Karpathy, CS231n notes, "Ratio of weights:updates".
    """
    until, lr = evidence.converged_at(), dict(rates(evidence))
    if is_warming_up(evidence):
        yield from _never_warm(evidence)
        return
    top = max(finite(lr.values()), default=math.nan)
    sizes, spans = [], []
    for p in weights(evidence):
        ratios = [
            (step, x * ratio(top, lr.get(step, top))) for step, x in before(p.series("update_ratio"), until)
        ]
        steps = [(step, x) for step, x in ratios if math.isfinite(x)]
        if p.is_optimized and len(steps) >= LATEST:
            sizes.append(median(x for _, x in steps[-WINDOW:]))
            small = trailing(Series(*map(list, zip(*steps, strict=True))), lambda x: x < TOO_SMALL)
            spans.append((small.first if small else steps[0][0], steps[-1][0]))
    if not sizes or top == 0:
        yield Skipped(f"fewer than {LATEST} steps were looked at before convergence")
        return
    size, left = median(sizes), loss_left(evidence, evidence.first_loss)
    if size >= TOO_SMALL or left < LEARNED:
        yield Passed(f"learning rate too low (update ratio {size:.1e})", size, TOO_SMALL)
        return
    causes, advice = _why_small(evidence, size)
    yield finding(
        "update.too_small",
        "error" if size < TOO_SMALL_ERROR and left > HARDLY else "warning",
        when=(min(first for first, _ in spans), max(last for _, last in spans)),
        value=size,
        limit=TOO_SMALL,
        message=f"A step changes the usual weight by {size:.1e} of its size; below {TOO_SMALL:.0e} "
        "hardly anything is learned, 1e-03 is usual.",
        causes=causes,
        next_steps=advice,
    )


def _why_small(evidence: Evidence, size: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Causes and advice: a learning rate changes nothing where there is no gradient to multiply."""
    if size == 0:
        return ("the gradient of most weights is exactly zero, whatever the learning rate",), (
            "Look at what the model ends in, and at the loss: a softmax over one unit is constant, and an "
            "output that a clamp, a ReLU or a saturated sigmoid holds fast passes no gradient",
        )
    n = multiplier(evidence, size)
    if n < LEAST:
        return ("gradients of most weights that are very small beside those of the largest",), (
            "Look at why gradients fade: the learning rate already moves some weights as much as it should",
        )
    return ("the learning rate is too low", "gradients that are very small, or clipped"), (
        f"Multiply the learning rate by {n:,}, or find one: learn.lr_find()",
    )


def _never_warm(evidence: Evidence) -> Iterator[Result]:
    """A rate that rises all the time, and has come to nothing yet."""
    sizes = [p.series("update_ratio").median(LATEST) for p in weights(evidence) if p.is_optimized]
    size, lr = median(sizes), rates(evidence)
    if not (size < TOO_SMALL_ERROR and evidence.n_batches >= LONG_WARM_UP):
        yield Skipped("the learning rate still rises")
        return
    yield finding(
        "update.too_small",
        "warning",
        when=lr,
        value=size,
        limit=TOO_SMALL_ERROR,
        message=f"The learning rate still rises after {evidence.n_batches} batches, to {lr.values[-1]:.1e}, "
        f"where a step changes the usual weight by {size:.1e} of its size; 1e-03 is usual.",
        causes=("a warm-up that is far too long, or counts in other units than it is stepped in",),
        next_steps=("look at the number of warm-up steps of the scheduler",),
    )


@check("clip.always", site=Site.GRADIENTS, needs=("gradients",), leads_to=("update.too_small", "loss.flat"))
def constant_clipping(evidence: Evidence) -> Iterator[Result]:
    """Clipping that cuts nearly each gradient to a small part: only the learning rate is changed by it.

    Formula: share of records with clipped norm / norm below 1, and the median of that. Limit: above 95 % of
    ten records or more, and a median below 0.01. An error for optimizers like SGD, a warning for those like
    Adam, which divide by the size of gradients anyway. Nothing is said where the loss falls by a fifth,
    unless the median is below 1e-4.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, who take the mean
    norm of a while for the limit.
    """
    coefs = before(evidence.steps.get("clip_coef", Series()), evidence.converged_at())
    if len(coefs) < WINDOW:
        yield Skipped(f"fewer than {WINDOW} records of clipping before convergence")
        return
    share, usual = sum(x < CLIPPED for x in coefs.values) / len(coefs), coefs.median()
    left = loss_left(evidence, evidence.first_loss)
    if share <= CLIPPED_SHARE or usual >= CLIPPED_TO or (left < LEARNED and usual >= CLIPPED_TO_NOTHING):
        yield Passed(f"clipping ({share:.0%} of steps, median ×{usual:.2g})", usual, CLIPPED_TO)
        return
    is_adaptive = any(p.is_adaptive for p in evidence.params.values())
    note = (
        " The optimizer divides by the size of gradients, so that this may do little." if is_adaptive else ""
    )
    yield finding(
        "clip.always",
        "warning" if is_adaptive or left < LEARNED else "error",
        when=coefs,
        value=usual,
        limit=CLIPPED_TO,
        message=f"{share:.0%} of the gradients are clipped, to {usual:.1e} of their norm as a rule (limit "
        f"{CLIPPED_TO:g}): the learning rate is that much lower than it seems.{note}",
        causes=("a limit of clipping that is too low", "gradients that are summed rather than averaged"),
        next_steps=(_clip_advice(evidence),),
    )


def _clip_advice(evidence: Evidence) -> str:
    """A limit near the usual norm, unless that is what clipping protects from."""
    norm = median(evidence.steps.get("total_norm", Series()).values)
    if norm > LARGE_NORM:
        return f"Look at why gradients have a norm of {norm:.2g}: a summed loss, or inputs on a large scale"
    usual = f"{norm:.2g}, the median norm" if norm > 0 else "the median norm of the gradients"
    return f"Set the limit of clipping to {usual}, or leave it out"


@check(
    "wd.dominates",
    site=Site.OPTIMIZER,
    needs=("gradients", "optimizers"),
    leads_to=("loss.flat", "act.collapse", "unit.*", "grad.attenuated", "update.*"),
)
def dominating_decay(evidence: Evidence) -> Iterator[Result]:
    """Weight decay that moves the weights more than the loss does, to zero.

    Formula: share of the decay in a step, in the median weight. Where it is added to the gradient (SGD,
    Adam): wd ‖W‖ / (wd ‖W‖ + ‖g‖). Of adaptive optimizers, which may take it apart from the gradient (AdamW),
    at most lr · wd / (‖ΔW‖ / ‖W‖), the part of the step it can have. Limit: 0.9 in 20 records in a row, or in
    all of ten or more. Or else the outcome of it: the median weight has less than a tenth of the usual size
    1/sqrt(fan in), has not got there from nothing (a drift of 1), and either decay comes to e**-2 or had such
    a share in ten records.

    Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019, for the two kinds.
    """
    until, lr = evidence.converged_at(), dict(rates(evidence))
    params = [p for p in weights(evidence) if p.is_optimized and p.weight_decay > 0]
    if not params:
        is_known = any(p.optimizer is not None for p in evidence.params.values())
        unknown = Skipped("the optimizer of these parameters is not known")
        yield Passed("weight decay (none)") if is_known else unknown
        return
    shares = _usual_share([_decay_shares(p, lr, until) for p in params])
    if len(shares) < WINDOW:
        yield Skipped(f"fewer than {WINDOW} steps with weight decay were looked at before convergence")
        return
    n = min(DECAY_RECORDS, len(shares))
    span = persistent(shares, lambda x: x > DECAY, n, n)
    if span or _has_decayed(params, evidence, until):
        yield _decayed(params, shares, span or Span(shares.steps[0], shares.steps[-1], len(shares)))
    else:
        yield Passed(f"weight decay ({shares.median():.0%} of a step)", held(shares, n, n), DECAY)


def _coupled(param: Param, norm: float, gradient: float) -> float:
    decay = param.weight_decay * norm
    return ratio(decay, decay + gradient)


def _decay_shares(param: Param, lr: dict[int, float], until: float) -> Series:
    """Of the records of one weight the share of the decay in the step."""
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


def _usual_share(found: list[Series]) -> Series:
    """Of each record the median over weights."""
    table = [dict(series) for series in found]
    steps = sorted({step for row in table for step in row})
    return Series(steps, [median(row.get(step, math.nan) for row in table) for step in steps])


def _has_decayed(params: list[Param], evidence: Evidence, until: float) -> bool:
    """Whether the median weight has shrunk to nothing, and decay explains it."""
    size, drift, share, decay = [], [], [], []
    lr = median(x for x in rates(evidence).values if x > 0)
    for p in params:
        norms = before(p.series("weight_norm"), until)
        by_step = dict(norms)
        gradients = before(p.series("clipped_norm"), until)
        shares = [_coupled(p, by_step.get(step, math.nan), gradient) for step, gradient in gradients]
        size.append(norms.median(LATEST) / math.sqrt(max(1, p.shape[0])))
        drift.append(before(p.series("drift"), until).median(LATEST))
        share.append(sum(x > DECAY for x in shares))
        n_steps = min(evidence.n_steps or math.inf, norms.steps[-1] + 1 if len(norms) else 0)
        decay.append(n_steps * p.weight_decay * (lr if math.isfinite(lr) else p.lr))
    is_gone = median(size) < SHRUNK and abs(median(drift) - 1) < SHRUNK
    return is_gone and (median(decay) > DECAYED or median(share) >= WINDOW)


def _decayed(params: list[Param], shares: Series, span: Span) -> Finding:
    decay = max(p.weight_decay for p in params)
    share = median(shares.between(span.first, span.last).values)
    return finding(
        "wd.dominates",
        "error",
        when=span,
        value=share,
        limit=DECAY,
        message=f"Weight decay of {decay:g} makes up {share:.0%} of a step of the usual weight (limit "
        f"{DECAY:.0%}), or "
        "has shrunk it to almost nothing: the weights follow it rather than the loss.",
        causes=(
            f"a weight decay of {decay:g}, which is too high"
            if decay > USUAL_DECAY
            else "gradients that are very small, beside which even a usual weight decay is much",
        ),
        next_steps=(
            "Set weight_decay to 0.01, or to 0 for a trial"
            if decay > USUAL_DECAY
            else "Set weight_decay to 0 for a trial, and look at why gradients are smaller than the decay",
        ),
    )


@check("param.not_stepped", site=Site.OPTIMIZER, needs=("gradients",), exact=True, leads_to=("loss.flat",))
def unmoved_parameters(evidence: Evidence) -> Iterator[Result]:
    """Parameters that stay as they are: no step is made, the learning rate is 0, or steps do nothing.

    Exact: no step in twenty batches with a backward, and no element of any weight looked at has changed. Or
    not changed by a bit in the last five steps or more that should have changed it, by lr · ‖g‖ / ‖W‖ above
    1e-6 and eight times the resolution of its dtype; gradients with zero rows or so sparse that the sample of
    1,024 elements may miss them are left out. Or a learning rate of exactly 0 over the last ten batches that
    are a tenth of the run, or over twenty, before convergence; the very end of a decay and the first step of
    a warm-up are none.
    """
    if any(observation.code == "param.not_stepped" for observation in evidence.observations):
        yield from passed_on(evidence, "param.not_stepped", "error", "steps that are never made")
        return
    lr = dict(rates(evidence))
    found = [(p, span) for p in evidence.params.values() if (span := _unmoved(p, lr))]
    if stop := _without_rate(evidence):
        yield _no_rate(evidence, stop)
    elif found:
        yield _not_stepped(found)
    elif not any(len(p.series("update_ratio")) >= LATEST for p in evidence.params.values()):
        yield Skipped(f"fewer than {LATEST} steps were looked at")
    else:
        yield Passed("parameters that do not move (0)")


def _unmoved(param: Param, lr: dict[int, float]) -> Span | None:
    """The last steps that should have changed it and have not."""
    if not param.is_optimized or param.kind in SPARSE_KINDS:
        return None
    table = {name: dict(series) for name, series in param.stats.items()}

    def at(name: str, step: int) -> float:
        return table.get(name, {}).get(step, math.nan)

    visible = max(VISIBLE, RESOLVED * param.resolution)
    is_large = math.prod(param.shape) > SKETCH
    moves: list[tuple[int, float]] = []
    for step, x in param.series("update_ratio"):
        asked = lr.get(step, math.nan) * ratio(at("clipped_norm", step), at("weight_norm", step))
        is_sparse = at("zero_rows", step) > 0 or (is_large and at("abs_max", step) > SPARSE * at("rms", step))
        if visible < asked < math.inf and not is_sparse:
            moves.append((step, x))
    still = [step for step, _ in takewhile(lambda move: move[1] == 0, reversed(moves))]
    return Span(still[-1], still[0], len(still)) if len(still) >= LATEST else None


def _not_stepped(found: list[tuple[Param, Span]]) -> Finding:
    param, span = found[0]
    more = f", and {len(found) - 1} more do neither" if len(found) > 1 else ""
    return finding(
        "param.not_stepped",
        "error",
        at=param,
        when=span,
        value=0.0,
        limit=0.0,
        message=f"{param.name} has gradients and a learning rate, and has not changed by a bit in "
        f"{span.n} steps"
        f"{more}.",
        causes=("the optimizer has a copy of it, or is never stepped", "something puts the old value back"),
        next_steps=("Make the optimizer after the model is moved or changed, and call its step()",),
    )


def _without_rate(evidence: Evidence) -> Span | None:
    """The last batches, where their learning rate was 0 too long to be the end of a decay."""
    lr = rates(evidence)
    zeros = [step for step, _ in takewhile(lambda at: at[1] == 0, reversed(list(lr)))]
    is_long = len(zeros) >= NO_RATE and (len(zeros) >= NO_RATE_SHARE * len(lr) or len(zeros) >= NO_RATE_MANY)
    if not is_long or evidence.converged_at() <= zeros[-1]:
        return None
    return Span(zeros[-1], zeros[0], len(zeros))


def _no_rate(evidence: Evidence, span: Span) -> Finding:
    top = max(finite(rates(evidence).values), default=0.0)
    was = f"; it was up to {top:.2g} before" if top > 0 else ", as from the beginning"
    return finding(
        "param.not_stepped",
        "error",
        when=span,
        value=0.0,
        limit=0.0,
        message=f"The learning rate is 0 since step {span.first}{was}: nothing is learned.",
        causes=("a schedule that ends too early" if top > 0 else "a learning rate of 0",),
        next_steps=(
            "Look at the scheduler: its number of steps, and whether it counts batches or epochs"
            if top > 0
            else "Set the learning rate",
        ),
    )


@check(
    "amp.scale_collapse",
    site=Site.GRADIENTS,
    needs=("gradients",),
    exact=True,
    leads_to=("param.not_stepped", "update.too_small", "loss.flat"),
    subject="scaler",
)
def collapsed_scale(evidence: Evidence) -> Iterator[Result]:
    """A GradScaler that skips many steps, or has come below 1: gradients overflow whatever the scale.

    Formula: above 10 % of steps skipped and five of them or more (a scaler that begins too high skips a few),
    or a scale below 1.

    Source: torch.amp.GradScaler, which begins at 65,536 and halves at each overflow.
    """
    scales = evidence.steps.get("scale", Series())
    low = next(((step, x) for step, x in scales if 0 <= x < 1), None)
    share = ratio(evidence.n_skipped, evidence.n_steps)
    if low:
        text = (
            f"The GradScaler has come down to a scale of {low[1]:.2g}: gradients overflow whatever the scale."
        )
        yield _scale_collapse(low[0], low[1], 1.0, text)
    elif evidence.n_skipped > MOST_SKIPPED and share > SKIPPED:
        skipped = next((step for step, x in evidence.steps.get("skipped", Series()) if x > 0), None)
        text = (
            f"The GradScaler has skipped {evidence.n_skipped:,} of {evidence.n_steps:,} steps "
            f"({share:.0%}; limit "
            f"{SKIPPED:.0%}), as gradients were NaN or infinite."
        )
        yield _scale_collapse(skipped, share, SKIPPED, text)
    elif evidence.n_steps or len(scales):
        yield Passed(f"skipped steps ({evidence.n_skipped:,})")
    else:
        yield Skipped("no step was looked at")


def _scale_collapse(step: int | None, value: float, limit: float, text: str) -> Finding:
    return finding(
        "amp.scale_collapse",
        "error",
        when=(step, None),
        value=value,
        limit=limit,
        message=text,
        causes=("activations or gradients beyond 65,504, where float16 ends", "NaN in the loss"),
        next_steps=(
            "Use bfloat16, which overflows where float32 does",
            *(("Begin with GradScaler(init_scale=2**12)",) if limit == SKIPPED else ()),
        ),
    )
