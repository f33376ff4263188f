"""Checks of what goes in: the scale of the inputs, and the balance of two networks in a game."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.evidence import Evidence, Series
from hookcb.diagnosis.registry import Result, RuledOut, Site, Unable, check
from hookcb.diagnosis.trends import median, times
from hookcb.diagnosis.verdict import Finding

INPUT_SCALE = 100.0  # standard deviation, or its inverse
AT_FIRST = 3  # records
LARGE_STEP, LARGE_LOSS = 0.2, 3.0  # update ratio, and times the loss of guessing
FALLEN = 100.0  # times that gradients of one network fall, and those of the other do not
WON = 0.05  # loss of the discriminator
ENDS = 5  # records at the beginning and at the end


@check(
    "input.scale",
    site=Site.INPUT,
    needs=("batches", "gradients"),
    leads_to=("act.*", "attn.*", "grad.*", "loss.*", "nonfinite.*", "unit.*", "update.*"),
)
def input_scale(evidence: Evidence) -> Iterator[Result]:
    """Inputs on a scale far from 1, and a first step that is far too large for it.

    Median standard deviation of the first three batches looked at above 100, and in the first three records
    an update above a fifth of a weight, or a first loss above three times that of guessing.

    Source: LeCun et al., Efficient BackProp, 1998, section 4.3.
    """
    std = median(evidence.input_std.values[:AT_FIRST])
    if math.isnan(std):
        yield Unable("no float input was looked at")
        return
    ratios = [
        x for p in evidence.params.values() if p.is_weight for x in p.series("update_ratio").values[:AT_FIRST]
    ]
    largest = max((x for x in ratios if math.isfinite(x)), default=0.0)
    first = evidence.loss.values[0] if len(evidence.loss) else math.nan
    too_large = largest > LARGE_STEP or first > LARGE_LOSS * evidence.guess
    if std <= INPUT_SCALE or not too_large:
        yield RuledOut(f"scale of the inputs (std {std:.2g})")
        return
    told = f"a step changes weights by {times(largest)} of their size"
    told = (
        told if largest > LARGE_STEP else f"the first loss is {first:.3g}, guessing has {evidence.guess:.3g}"
    )
    yield Finding(
        "input.scale",
        "error",
        step=evidence.input_std.steps[0],
        value=std,
        limit=INPUT_SCALE,
        message=f"the inputs have a standard deviation of {std:.3g} (limit {INPUT_SCALE:g}), and {told}.",
        causes=("inputs that are not normalised",),
        next_steps=("subtract the mean of the training inputs and divide by their standard deviation",),
        last_step=evidence.input_std.steps[-1],
    )


@check("gan.balance", site=Site.RUN, needs=("gradients", "steps"))
def balance(evidence: Evidence) -> Iterator[Result]:
    """A discriminator so good that its generator learns nothing any more.

    Of two networks with an optimizer each, the gradient norm of one falls to a hundredth of what it began
    with, while losses that were told come below 0.05, a quarter of the last twenty at least.

    Source: Arjovsky & Bottou, Towards Principled Methods for Training Generative Adversarial Networks, 2017.
    """
    norms = _norms_by_optimizer(evidence)
    if len(norms) != 2 or any(len(series) < 2 * ENDS for series in norms.values()):
        yield Unable("there are no two optimizers of which ten steps were looked at")
        return
    falls = {i: _fall(series) for i, series in norms.items()}
    fallen = max(falls, key=lambda i: falls[i])
    last = sorted(abs(x) for x in evidence.loss.values[-20:])
    is_won = not last or last[len(last) // 4] < WON
    if falls[fallen] < FALLEN or not is_won:
        yield RuledOut(f"balance of two networks (gradients fall ×{times(max(falls.values()))})")
        return
    params = [p for p in evidence.params.values() if p.optimizer == fallen and p.stats]
    name = params[0].name.partition(".")[0]
    yield Finding(
        "gan.balance",
        "warning",
        layer=name if name in {p.layer.partition(".")[0] for p in params} else "",
        step=_since(norms[fallen]),
        value=falls[fallen],
        limit=FALLEN,
        message=f"the gradients of {name} have fallen {times(falls[fallen])}-fold, and the loss of what "
        f"it plays against has come below {WON}: it has won, and {name} learns nothing any more.",
        causes=("a discriminator that learns much faster than its generator",),
        next_steps=("lower the learning rate of the discriminator, or use the non-saturating loss",),
        last_step=norms[fallen].steps[-1],
    )


def _norms_by_optimizer(evidence: Evidence) -> dict[int, Series]:
    """The gradient norm of all that an optimizer has, at the larger of two records, as they take turns."""
    squares: dict[int, dict[int, float]] = {}
    for p in evidence.params.values():
        if p.optimizer is not None:
            of = squares.setdefault(p.optimizer, {})
            for step, x in p.series("norm"):
                of[step] = max(of.get(step, 0.0), x)
    return {i: Series(list(of), list(of.values())) for i, of in squares.items()}


def _fall(series: Series) -> float:
    first, last = median(series.values[:ENDS]), median(series.values[-ENDS:])
    return first / last if last > 0 else math.inf if first > 0 else 1.0


def _since(series: Series) -> int:
    """The first step from which on it is below a hundredth."""
    limit = median(series.values[:ENDS]) / FALLEN
    since = series.steps[-1]
    for step, x in reversed(list(series)):
        if x > limit:
            break
        since = step
    return since
