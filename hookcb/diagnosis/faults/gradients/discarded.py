"""grad.discarded: gradients of most backwards that are cleared before a step uses them."""

from collections import Counter

from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.measurements.intervals import Intervals
from hookcb.diagnosis.run import Run

MIN_STEPS = 5
MIN_SHARE = 2 / 3  # of the steps: a skipped step is an exception, and the last one of an epoch may be short


@fault(
    "grad.discarded",
    Site.GRADIENTS,
    needs="batches steps",
    leads_to="loss.flat loss.trivial loss.unfinished train.unfinished update.too_small",
    exact=True,
)
class DiscardedGradients(Fault):
    """Gradients that are cleared before any step has used them, so of several backwards a step one counts.

    Exact: in five steps or more, and in two of three, gradients were there when a backward had ended, and
    cleared when the next one began, with no step of any optimizer between, and as many backwards in each.
    All are called on the same line, the weights do not move between them, no input requires a gradient, and
    the step gets what the last backwards have left, up to a factor: an inner step, as of sharpness-aware
    minimization, an adversarial example, gradients that are copied and combined, and steps that are skipped
    now and then are none. Zeros on a GPU are seen if zero_grad has made them.
    """

    headline = "Gradients are thrown away before a step uses them"
    uses = (Intervals,)
    severity = "warning"
    passed = "gradients that are thrown away before a step"
    unless = f"fewer than {MIN_STEPS} steps were seen"

    def tell(self, run: Run) -> None:
        seen = run.measured(Intervals)
        past, self.seen, self.unless = seen.past, [], type(self).unless
        if len(past) < MIN_STEPS:
            return
        n, often = Counter(x.n for x in past).most_common(1)[0]
        wasted, self.unless = [x for x in past if x.is_wasted], ""
        if len(wasted) < MIN_SHARE * len(past) or often < MIN_SHARE * len(past) or len(wasted) < MIN_STEPS:
            return
        counted = n - Counter(x.n_thrown for x in wasted if x.n == n).most_common(1)[0][0]
        by = f" ({seen.place})" if seen.place else ""
        of_last = "only the last one counts" if counted == 1 else f"only the last {counted} count"
        self.see(
            f"Of {n} backwards before each step {of_last}: gradients are cleared between them{by}, so those "
            f"of the other {n - counted} are computed and thrown away.",
            when=0,
            value=float(counted),
            limit=float(n),
            causes=("zero_grad() is called before each backward, and step() only after several of them",),
            next_steps=("Call zero_grad() only after step(), so that the gradients of all backwards add up",),
        )
