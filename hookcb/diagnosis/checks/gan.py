"""Checks of two networks that train against each other."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.checks.finding import finding
from hookcb.diagnosis.evidence import WINDOW, Evidence, Series
from hookcb.diagnosis.registry import Passed, Result, Site, Skipped, check
from hookcb.diagnosis.trends import format_factor, median
from hookcb.diagnosis.verdict import Finding

FALLEN = 100.0  # times that gradients of one network fall, and those of the other do not
WON = 0.05  # loss of the discriminator
ENDS = 5  # records at the beginning; at the end they are rare


@check("gan.balance", site=Site.RUN, needs=("gradients", "steps", "loss"), subject="players")
def balance(evidence: Evidence) -> Iterator[Result]:
    """A discriminator so good that its generator learns nothing any more.

    Formula: of two networks with an optimizer each, the loss of one comes below 0.05, while the gradient norm
    of the other falls to a hundredth of what it began with, and its loss is no lower than at the beginning.

    Source: Arjovsky & Bottou, Towards Principled Methods for Training Generative Adversarial Networks, 2017.
    """
    norms = _norms_by_optimizer(evidence)
    if len(norms) != 2 or set(norms) != set(evidence.losses):
        yield Skipped("there are no two optimizers, each with a loss")
        return
    a, b = norms
    for winner, loser in ((a, b), (b, a)):
        fall = _fall(norms[loser])
        if fall > FALLEN and _has_won(evidence.losses[winner]) and not _has_fallen(evidence.losses[loser]):
            yield _lost(evidence, loser, fall, norms[loser])
            return
    yield Passed("balance of two networks", max(_fall(norms[a]), _fall(norms[b])), FALLEN)


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
    return finding(
        "gan.balance",
        "warning",
        at=tops[0] if len(tops) == 1 and "." in params[0].name else "",
        when=(next((step for step, x in norms if x < limit), None), norms.steps[-1]),
        value=fall,
        limit=FALLEN,
        message=f"the gradients of {tops[0]} have fallen {format_factor(fall)}-fold (limit {FALLEN:g}), and the loss "
        f"of what it plays against is below {WON}: that has won, and {tops[0]} learns nothing any more.",
        causes=("a discriminator that learns much faster than its generator",),
        next_steps=("lower the learning rate of the discriminator, or use the non-saturating loss",),
    )
