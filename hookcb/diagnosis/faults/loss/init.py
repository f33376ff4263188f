"""loss.init: a first loss far above that of guessing."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.advice import begins_large, init_advice
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import ENTROPIES, NEVER_NEGATIVE, Loss
from hookcb.diagnosis.rules import does_well, median, weights, why_unknown
from hookcb.diagnosis.run import WINDOW, Passed, Run, Skipped

MAX_INIT, MAX_INIT_ABOVE = 2.0, 2.0  # cross-entropy: times the loss of guessing, and by how much above it
MAX_INIT_MSE, MAX_INIT_NOTE = 3.0, 5.0  # times the loss of guessing


@fault("loss.init", Site.LOSS, needs="loss", shown_by="run.loss", draws_limit=True)
class FirstLoss(Fault):
    """A first loss far above that of guessing: the model begins confident and wrong.

    Formula: loss of the first batch, before any update / loss of guessing, which is ln C for cross-entropy
    over C classes and the mean square of the targets for MSE. Limit: twice, and 2 above, for cross-entropy;
    three times for MSE. A warning above five times if the loss is still above guessing after ten batches,
    else a note. Also a note if the loss ends below a fifth of that of the best constant, an R² of 0.8.

    Source: A. Karpathy, "A Recipe for Training Neural Networks", 2019, "verify loss @ init".
    """

    headline = "The first loss is far above guessing"
    uses = (Curves, Loss)

    def findings(self, run: Run) -> Iterator[Result]:
        first, loss = run.loss.values[0] if len(run.loss) else math.nan, run.measured(Loss)
        guess, kind = loss.guess, loss.kind
        if not (math.isfinite(first) and 0 < guess < math.inf and kind in NEVER_NEGATIVE):
            yield Skipped(why_unknown(run, "the loss of guessing is not known"))
            return
        is_entropy = kind in ENTROPIES
        limit = max(MAX_INIT * guess, guess + MAX_INIT_ABOVE) if is_entropy else MAX_INIT_MSE * guess
        if first <= limit:
            yield Passed(f"loss at the beginning ({first:.3g}, guessing gives {guess:.3g})", first, limit)
            return
        # a scale that is learned in the first batches does no harm
        is_lasting = median(run.loss.values[WINDOW : 2 * WINDOW]) > guess
        is_harmful = first > MAX_INIT_NOTE * guess and is_lasting and not does_well(run)
        head = [p for p in weights(run)[-1:] if begins_large([p])]
        scale = "inputs" if is_entropy else "inputs and targets"
        yield self.finding(
            f"The first batch has a loss of {first:.3g} (limit {limit:.3g}); guessing gives {guess:.3g}.",
            "warning" if is_harmful else "info",
            when=run.loss.steps[0],
            value=first,
            limit=limit,
            causes=(
                *(("weights of the last layer that are too large",) if head else ()),
                f"{scale} on a large scale",
            ),
            next_steps=(
                *((init_advice(head),) if head else ()),
                f"Normalize {scale} to a standard deviation of 1",
            ),
        )
