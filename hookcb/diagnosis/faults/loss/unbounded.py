"""loss.unbounded: a negative loss of a kind that is never negative."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import NEVER_NEGATIVE, Loss
from hookcb.diagnosis.rules import finite
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.diagnosis.verdict import Finding

BELOW_ZERO = -1e-6  # leaves room for rounding


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

    Formula: the smallest loss. Limit: -1e-6, which leaves room for rounding. A negated loss has no minimum,
    and training makes the model as wrong as it can; `nll_loss` is negative, too, if it gets probabilities
    rather than log-probabilities. Not checked if the last layer before the loss is not the model's, as in a
    GAN's generator, whose loss may be negated on purpose.

    Source: Goodfellow, Bengio & Courville, Deep Learning, 2016, section 6.2: these are negative logarithms of
    probabilities, or squares and distances.
    """

    headline = "The loss is below its minimum"
    uses = (Curves, Loss)

    def findings(self, run: Run) -> Iterator[Result]:
        loss, values = run.measured(Loss), finite(run.loss.values)
        kinds = loss.kinds or (loss.kind,)
        if not set(kinds).issubset(NEVER_NEGATIVE) or not values:
            yield Skipped("the kind of the loss is not known")
        elif loss.is_of_others:
            yield Skipped("the loss is that of another model's output")
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
