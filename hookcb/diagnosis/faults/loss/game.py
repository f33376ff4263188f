"""gan.balance: two networks that train against each other."""

import math
from collections.abc import Iterator

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.rules import format_factor, median, series_of
from hookcb.diagnosis.run import WINDOW, Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding

MAX_FALL = 100.0  # factor by which the gradients of one network fall
WON = 0.05  # loss of a discriminator that has won
N_FIRST = 5  # records in the median of the beginning; the end is a single one, as records get rare


@fault("gan.balance", Site.RUN, needs="gradients steps loss", subject="players", shown_by="run.loss")
class Balance(Fault):
    """A discriminator so good that its generator no longer learns.

    Formula: of two networks with an optimizer each, the loss of one is below 0.05, while the gradient norm of
    the other falls to a hundredth of its first value and its loss is not lower than at the beginning.

    Source: Arjovsky & Bottou, Towards Principled Methods for Training Generative Adversarial Networks, 2017.
    """

    headline = "The discriminator beats the generator"
    uses = (Curves,)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        norms = _norms_by_optimizer(run)
        if len(norms) != 2 or set(norms) != set(losses := run.measured(Curves).losses):
            yield Skipped("the training does not have two optimizers with a loss each")
            return
        a, b = norms
        for winner, loser in ((a, b), (b, a)):
            fall, own = _fall(norms[loser]), losses[loser].values
            has_won = max(map(abs, losses[winner].values[-WINDOW:]), default=math.inf) < WON
            if fall > MAX_FALL and has_won and not median(own[-WINDOW:]) < median(own[:WINDOW]):
                yield self._unbalanced(run, loser, fall, norms[loser])
                return
        yield Passed("balance of two networks", max(_fall(norms[a]), _fall(norms[b])), MAX_FALL)

    def _unbalanced(self, run: Run, loser: int, fall: float, norms: Series) -> Finding:
        params = [p for p in run.params.values() if p.optimizer == loser and p.stats]
        names = list(dict.fromkeys(p.name.partition(".")[0] for p in params))
        own, limit = as_layer(names[0]), median(norms.values[:N_FIRST]) / MAX_FALL
        return self.finding(
            f"The gradients of {own} have fallen by a factor of {format_factor(fall)} (limit "
            f"{MAX_FALL:g}), and the loss of its opponent is below {WON}: the opponent has won, and {own} "
            "no longer learns.",
            at=names[0] if len(names) == 1 and "." in params[0].name else "",
            when=(next((step for step, x in norms if x < limit), None), norms.steps[-1]),
            value=fall,
            limit=MAX_FALL,
            causes=("a discriminator that learns much faster than its generator",),
            next_steps=("Lower the learning rate of the discriminator, or use the non-saturating loss",),
        )


def _norms_by_optimizer(run: Run) -> dict[int, Series]:
    """Largest gradient norm among the parameters of each optimizer, by step."""
    by_optimizer: dict[int, dict[int, float]] = {}
    for p in run.params.values():
        if p.optimizer is not None:
            norms = by_optimizer.setdefault(p.optimizer, {})
            for step, x in p.series("norm"):
                norms[step] = max(norms.get(step, 0.0), x)
    every = by_optimizer.items()
    return {i: series_of(own.items()) for i, own in every if len(own) > N_FIRST}


def _fall(series: Series) -> float:
    """Factor between the first records and the last, which counts if the record before it is similar."""
    first, last = median(series.values[:N_FIRST]), max(series.values[-1], series.values[-2] / 10)
    return first / last if last > 0 else math.inf if first > 0 else 1.0
