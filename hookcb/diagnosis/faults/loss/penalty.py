"""loss.penalty: a penalty on parameters that is nearly all of the loss."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.rules import is_trivial, loss_of_constant
from hookcb.diagnosis.run import Absent, Passed, Run, Skipped

MAX_PENALTY = 0.9  # of the loss


@fault(
    "loss.penalty",
    Site.LOSS,
    needs="loss batch graph",
    leads_to="loss.trivial loss.flat",
    shown_by="run.loss",
)
class DominantPenalty(Fault):
    """A penalty on parameters that is nearly all of the loss.

    Formula: (loss - mean error of the batch) / loss, the largest share in a batch. Limit: 0.9. A
    warning if the model is no better than a constant at the end, as `loss.trivial` finds; a note if that is
    unknown, as before 50 batches; nothing is said if it is better.

    Source: Goodfellow, Bengio & Courville, Deep Learning, 2016, section 7.1.
    """

    headline = "A penalty is nearly all of the loss"
    uses = (Curves, Loss)

    def findings(self, run: Run) -> Iterator[Result]:
        totals, known = dict(run.loss), run.measured(Loss)
        seen = [(step, x, totals[step]) for step, x in known.penalty if totals.get(step, 0.0) > x > 0]
        if not seen:
            unknown = Skipped("the size of the penalty is unknown")
            yield unknown if known.has_penalty else Absent("the loss has no penalty")
            return
        step, penalty, total = max(seen, key=lambda row: row[1] / row[2])
        share, is_harmful = penalty / total, is_trivial(run)
        if share <= MAX_PENALTY or not (is_harmful or math.isnan(loss_of_constant(run)[1])):
            yield Passed(f"a penalty that is nearly all of the loss ({share:.0%})", share, MAX_PENALTY)
            return
        end = "; in the end, the rest of the loss is no better than that of a constant" if is_harmful else ""
        yield self.finding(
            f"The penalty on the weights is {penalty:.3g} of a loss of {total:.3g}, {share:.1%} (limit "
            f"{MAX_PENALTY:.0%}){end}.",
            "warning" if is_harmful else "info",
            when=(seen[0][0], step),
            value=share,
            limit=MAX_PENALTY,
            causes=("a penalty with too large a weight", "a sum over all weights where a mean is meant"),
            next_steps=(f"Divide the weight of the penalty by {10 * penalty / (total - penalty):,.0f}",),
        )
