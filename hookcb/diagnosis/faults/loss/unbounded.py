"""loss.unbounded: a negative loss of a kind that is never negative, or one that falls without end."""

from collections.abc import Iterator
from itertools import pairwise

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import NEVER_NEGATIVE, Loss
from hookcb.diagnosis.rules import MIN_BATCHES, finite, format_factor, median
from hookcb.diagnosis.run import WINDOW, Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding

BELOW_ZERO = -1e-6  # leaves room for rounding
FAR_BELOW = 1e4  # times the size of the first loss, or 1
N_PARTS, FASTER = 5, 1.2  # parts of the way, and ratio of the falls from part to part


@fault(
    "loss.unbounded",
    Site.LOSS,
    needs="loss",
    leads_to="loss.diverging update.* act.* grad.* nonfinite.* unit.*",
    shown_by="run.loss",
    draws_limit=True,
)
class UnboundedLoss(Fault):
    """A negative loss of a kind that is never negative, such as cross-entropy or MSE, or of a sum of such.

    Formula: the smallest loss. Limit: -1e-6, which leaves room for rounding. A loss of any other kind, of 50
    batches or more, must not end below -1e4 times the size of its first value, or 1, after it has fallen
    faster and faster: on the way to half of that, by 1.2 times as much from each fifth to the next. That is a
    warning. A likelihood of narrow densities is negative too, but falls ever more slowly. A negated loss has
    no minimum, and training makes the model as wrong as it can; `nll_loss` is negative, too, if it gets
    probabilities rather than log-probabilities.
    Not checked if the last layer before the loss is not the model's, as in a GAN's generator, whose loss may
    be negated on purpose.

    Source: Goodfellow, Bengio & Courville, Deep Learning, 2016, section 6.2: these are negative logarithms of
    probabilities, or squares and distances.
    """

    headline = "The loss is below its minimum"
    uses = (Curves, Loss)

    def findings(self, run: Run) -> Iterator[Result]:
        loss, values = run.measured(Loss), finite(run.loss.values)
        kinds = loss.kinds or (loss.kind,)
        if loss.is_of_others:
            yield Skipped("the loss is that of another model's output")
        elif not set(kinds).issubset(NEVER_NEGATIVE) or not values:
            is_endless = len(values) >= MIN_BATCHES and _is_endless(values)
            yield self._endless(run) if is_endless else Skipped("the kind of the loss is not known")
        elif below := [(step, x) for step, x in run.loss if x < BELOW_ZERO]:
            yield self._below_zero(kinds, below)
        else:
            yield Passed(f"loss below zero (smallest {min(values):.3g})", min(values), 0.0)

    def _below_zero(self, kinds: tuple[str, ...], below: list[tuple[int, float]]) -> Finding:
        (step, value), kind = below[0], " + ".join(kinds)
        causes: tuple[str, ...] = ("an extra minus sign: the loss is maximized",)
        advice = "Look for a minus sign in the loss function, and for targets that are out of range"
        if kind == "nll":
            causes = ("probabilities are passed where log-probabilities are expected", *causes)
            advice = "Put log_softmax before nll_loss, or use cross_entropy on the raw outputs"
        elif "binary cross-entropy" in kinds:
            causes += ("targets outside 0 to 1",)
        return self.finding(
            f"The loss is {value:.3g} at step {step}, but {kind} is never below 0.",
            when=(step, below[-1][0]),
            value=value,
            limit=0.0,
            causes=causes,
            next_steps=(advice,),
        )

    def _endless(self, run: Run) -> Finding:
        values, limit = finite(run.loss.values), _limit(finite(run.loss.values))
        first, last = values[0], values[-1]
        return self.finding(
            f"The loss fell from {first:.3g} to {last:.3g}, and fell faster and faster: it has no minimum "
            f"(limit {limit:.3g}, {format_factor(FAR_BELOW)} times its size at the beginning).",
            "warning",
            when=run.loss,
            value=last,
            limit=limit,
            causes=("a term with the wrong sign, which is maximized", "a distance or score without a bound"),
            next_steps=("Print each term of the loss, and look for the one that falls without end",),
        )


def _limit(values: list[float]) -> float:
    return -FAR_BELOW * max(1.0, abs(values[0]))


def _is_endless(values: list[float]) -> bool:
    """Whether a loss is far below its first value, and fell more from each part to the next on the way there.

    The way is to half of its depth, as units may saturate or numbers overflow then.
    """
    if not median(values[-WINDOW:]) < _limit(values):
        return False
    half = min(values) / 2
    way = values[: next(i for i, x in enumerate(values) if x <= half) + 1]
    if len(way) < N_PARTS:
        return False
    n = len(way) // N_PARTS
    parts = [median(way[len(way) - (i + 1) * n : len(way) - i * n]) for i in reversed(range(N_PARTS))]
    falls = [before - after for before, after in pairwise(parts)][-3:]
    return all(0 < a * FASTER < b for a, b in pairwise(falls))
