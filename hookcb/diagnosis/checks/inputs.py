"""Checks of what goes in: the scale of the inputs, and the balance of two networks in a game."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.evidence import WINDOW, Evidence, Series
from hookcb.diagnosis.registry import Result, RuledOut, Site, Unable, check
from hookcb.diagnosis.trends import median, times
from hookcb.diagnosis.verdict import Finding

RECURRENT = ("RNN", "LSTM", "GRU")
INPUT_SCALE = 100.0  # standard deviation, or its inverse
AT_FIRST = 3  # records
LARGE_STEP, LARGE_LOSS, HALF = 0.2, 3.0, 0.5  # update ratio; times the loss of guessing; of units
FALLEN = 100.0  # times that gradients of one network fall, and those of the other do not
WON = 0.05  # loss of the discriminator
ENDS = 5  # records at the beginning; at the end they are rare


@check(
    "input.scale",
    site=Site.INPUT,
    needs=("batch", "gradients"),
    leads_to=("act.*", "attn.*", "grad.*", "loss.*", "nonfinite.*", "unit.*", "update.*"),
)
def input_scale(evidence: Evidence) -> Iterator[Result]:
    """Inputs on a scale far from 1, and a first step that is far too large for it.

    Formula: median standard deviation of the first three batches looked at above 100, and in the first three
    records an update above a fifth of a weight, a first loss above three times that of guessing, or units
    that are saturated or dead; or a recurrent layer that takes them in, whose gates saturate without being
    seen.

    Source: LeCun et al., Efficient BackProp, 1998, section 4.3.
    """
    std = median(evidence.input_std.values[:AT_FIRST])
    if math.isnan(std):
        yield Unable("no float input was looked at")
        return
    harm = _harm(evidence)
    if std <= INPUT_SCALE or not harm:
        yield RuledOut(f"scale of the inputs (std {std:.2g})", std, INPUT_SCALE)
        return
    yield Finding(
        "input.scale",
        "error",
        step=evidence.input_std.steps[0],
        value=std,
        limit=INPUT_SCALE,
        message=f"the inputs have a standard deviation of {std:.3g} (limit {INPUT_SCALE:g}), and {harm}.",
        causes=("inputs that are not normalised",),
        next_steps=("subtract the mean of the training inputs and divide by their standard deviation",),
        last_step=evidence.input_std.steps[-1],
    )


def _harm(evidence: Evidence) -> str:
    """What large inputs have done, "" where nothing is seen of it."""
    params = [p for p in evidence.params.values() if p.is_weight]
    ratios = [x for p in params for x in p.series("update_ratio").values[:AT_FIRST] if math.isfinite(x)]
    largest = max(ratios, default=0.0)
    first = evidence.loss.values[0] if len(evidence.loss) else math.nan
    saturated = [layer.series("saturated").values[:AT_FIRST] for layer in evidence.layers.values()]
    if largest > LARGE_STEP:
        return f"a step changes weights by {times(largest)} of their size"
    if first > LARGE_LOSS * evidence.guess:
        return f"the first loss is {first:.3g}, where guessing has {evidence.guess:.3g}"
    if any(p.kind in RECURRENT and p.place == 0 for p in params):
        return "they go to a recurrent layer, whose gates they drive to their ends"
    if any(median(values) > HALF for values in saturated):
        return "they drive units to their flat ends"
    return "units get no gradient" if any(p.dead > HALF for p in params) else ""


@check("gan.balance", site=Site.RUN, needs=("gradients", "steps", "loss"), subject="players")
def balance(evidence: Evidence) -> Iterator[Result]:
    """A discriminator so good that its generator learns nothing any more.

    Formula: of two networks with an optimizer each, the loss of one comes below 0.05, while the gradient norm
    of the other falls to a hundredth of what it began with, and its loss is no lower than at the beginning.

    Source: Arjovsky & Bottou, Towards Principled Methods for Training Generative Adversarial Networks, 2017.
    """
    norms = _norms_by_optimizer(evidence)
    if len(norms) != 2 or set(norms) != set(evidence.losses):
        yield Unable("there are no two optimizers, each with a loss")
        return
    a, b = norms
    for winner, loser in ((a, b), (b, a)):
        fall = _fall(norms[loser])
        if fall > FALLEN and _has_won(evidence.losses[winner]) and not _has_fallen(evidence.losses[loser]):
            yield _lost(evidence, loser, fall, norms[loser])
            return
    yield RuledOut("balance of two networks", max(_fall(norms[a]), _fall(norms[b])), FALLEN)


def _norms_by_optimizer(evidence: Evidence) -> dict[int, Series]:
    """The largest gradient norm of what an optimizer has."""
    found: dict[int, dict[int, float]] = {}
    for p in evidence.params.values():
        if p.optimizer is not None:
            of = found.setdefault(p.optimizer, {})
            for step, x in p.series("norm"):
                of[step] = max(of.get(step, 0.0), x)
    return {i: Series(list(of), list(of.values())) for i, of in found.items() if len(of) > ENDS}


def _fall(series: Series) -> float:
    """How many times smaller the last is than the first ones; where the one before it is near that."""
    first, last = median(series.values[:ENDS]), max(series.values[-1], series.values[-2] / 10)
    return first / last if last > 0 else math.inf if first > 0 else 1.0


def _has_won(loss: Series) -> bool:
    return max((abs(x) for x in loss.values[-WINDOW:]), default=math.inf) < WON


def _has_fallen(loss: Series) -> bool:
    return median(loss.values[-WINDOW:]) < median(loss.values[:WINDOW])


def _lost(evidence: Evidence, loser: int, fall: float, norms: Series) -> Finding:
    params = [p for p in evidence.params.values() if p.optimizer == loser and p.stats]
    tops = list(dict.fromkeys(p.name.partition(".")[0] for p in params))
    limit = median(norms.values[:ENDS]) / FALLEN
    return Finding(
        "gan.balance",
        "warning",
        layer=tops[0] if len(tops) == 1 and "." in params[0].name else "",
        step=next((step for step, x in norms if x < limit), None),
        value=fall,
        limit=FALLEN,
        message=f"the gradients of {tops[0]} have fallen {times(fall)}-fold (limit {FALLEN:g}), and the loss "
        f"of what it plays against is below {WON}: that has won, and {tops[0]} learns nothing any more.",
        causes=("a discriminator that learns much faster than its generator",),
        next_steps=("lower the learning rate of the discriminator, or use the non-saturating loss",),
        last_step=norms.steps[-1],
    )
