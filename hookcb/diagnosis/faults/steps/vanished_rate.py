"""lr.vanished: a learning rate that falls to almost nothing long before the end."""

from collections.abc import Iterator
from itertools import takewhile

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.rules import finite, has_learned, need_not_fall, rates
from hookcb.diagnosis.run import Passed, Run, Skipped

MIN_RATES, VANISHED, MAX_VANISHED = 50, 1e-3, 0.5  # batches; share of the largest rate; share of batches


@fault(
    "lr.vanished",
    Site.OPTIMIZER,
    needs="loss",
    leads_to="loss.flat loss.trivial update.too_small train.unfinished",
    shown_by="run.lr",
)
class VanishedRate(Fault):
    """A learning rate that falls to almost nothing long before the end, while the model has learned nothing.

    Formula: share of the batches after the largest rate with one below a thousandth of it. Limit: half of all
    batches, 50 or more, if the loss has not fallen by a fifth or is no better than that of a constant. A
    cosine is below a thousandth in the last 2 % of its steps only.

    Source: Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, for the cosine;
    torch.optim.lr_scheduler, whose `step` counts its calls: of batches, or of epochs.
    """

    headline = "The learning rate vanishes too early"
    uses = (Curves,)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        lr = rates(run)
        top = max(finite(lr.values), default=0.0)
        if len(lr) < MIN_RATES or not top:
            yield Skipped(f"the learning rate of fewer than {MIN_RATES} batches is known")
            return
        tiny = list(takewhile(lambda pair: pair[1] < VANISHED * top, reversed(list(lr))))
        share = len(tiny) / len(lr)
        if share <= MAX_VANISHED or has_learned(run, run.first_loss):
            yield Passed(f"a learning rate that vanishes ({share:.0%} of the batches)", share, MAX_VANISHED)
            return
        began = max(step for step, rate in lr if rate == top)  # of the fall
        since, last = tiny[-1][0], tiny[0]
        yield self.finding(
            f"The learning rate has fallen from {top:.2g} to {last[1]:.2g}, and has been below a "
            f"thousandth of its largest value since step {since}, in {share:.0%} of the batches (limit "
            f"{MAX_VANISHED:.0%}){'' if need_not_fall(run) else ', before the model has learned anything'}.",
            when=(began, last[0]),
            value=share,
            limit=MAX_VANISHED,
            causes=(
                "a scheduler that is stepped in each batch, but counts epochs",
                "a decay that is too fast",
            ),
            next_steps=("Call scheduler.step() once per epoch, or give the scheduler the number of batches",),
        )
