"""train.unfinished: a loss that is far from its end."""

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean

from hookcb.diagnosis import rules
from hookcb.diagnosis.advice import MIN_FACTOR, divisor, multiplier
from hookcb.diagnosis.fault import Fault, Result, Site, fault, findings_of
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Passed, Run, Skipped

# expected fall in as many batches again / fall so far; a tenth of the healthy trainings have more
MAX_TO_COME = 0.25
MAX_MOTION = 0.3  # of the size of a weight, by all steps together: too little to have learned much
MIN_FALLS = 4  # batches; three falls in a row happen by chance once in 24
MAX_OF_CONSTANT_EARLY = 0.9  # of a training of a few batches that has learned something
SMALL_UPDATE = rules.USUAL_UPDATE / 10


@fault("train.unfinished", Site.RUN, needs="loss", subject="end", shown_by="run.loss")
class UnfinishedTraining(Fault):
    """A loss that is far from its end: a note, never an alarm.

    Formula: fall to be expected in as many batches again, at the median slope of the last half of 50 batches
    or more (Theil and Sen, below zero by three standard deviations) / fall so far. Limit: a quarter. Or a
    flat loss that is near guessing, while all steps together change the median weight by less than 0.3 of its
    size. Of fewer batches, at least four, each loss must be below the one before, or the mean of the last
    quarter above 0.9 of the loss of the best constant. The advice is to raise the learning rate if the median
    update ratio is below 1e-4, a tenth of the usual one, and none was above 0.02 at the beginning; else to
    train longer.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968.
    """

    headline = "The training ends too early"
    uses = (Curves, Loss)
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        loss, n = run.loss, len(run.loss)
        if n < rules.MIN_BATCHES:
            yield self._few(run)
            return
        first, last, fall = run.first_loss, rules.final_loss(run), rules.expected_fall(run)
        share, limit = fall / (first - last) if first > last else 0.0, MAX_TO_COME
        moved = n * rules.usual_update(rules.recent_updates(run))
        if share > limit:
            message = (
                f"The loss fell from {first:.3g} to {last:.3g} in {n:,} batches, and still falls: by its "
                f"slope, {fall:.2g} more in as many again."
            )
        elif moved < MAX_MOTION and any(f.severity == "warning" for f in findings_of("loss.flat", run)):
            share, limit = moved, MAX_MOTION
            message = (
                f"The loss has not fallen, but all {n:,} steps together change the median weight by at most "
                f"{moved:.1%} of its size."
            )
        else:
            passed = f"training that was stopped too early (to come: {share:.0%} of its fall)"
            yield Passed(passed, share, limit)
            return
        yield self.finding(
            message,
            when=loss,
            value=share,
            limit=limit,
            causes=("a training that is too short", "a learning rate that is too low"),
            next_steps=_advice(run),
        )

    def _few(self, run: Run) -> Result:
        values, n, known = run.loss.values, len(run.loss), run.measured(Loss)
        falls = n >= MIN_FALLS and all(x > y for x, y in pairwise(values))
        last = fmean(values[-max(1, n // 4) :]) if n >= MIN_FALLS else math.nan
        if not (falls or last > MAX_OF_CONSTANT_EARLY * known.constant > 0):
            return Skipped(f"fewer than {rules.MIN_BATCHES} batches")
        each = f"fell with each of them, from {values[0]:.3g} to {values[-1]:.3g}"
        constant = f"; {known.constant_in_words()}" if known.constant > 0 else ""
        return self.finding(
            f"Only {n} batches were trained, and the loss {each if falls else f'is {last:.3g}'}{constant}.",
            when=run.loss,
            value=float(n),
            limit=rules.MIN_BATCHES,
            causes=("a training that is too short",),
            next_steps=_advice(run),
        )


def _advice(run: Run) -> tuple[str, ...]:
    """Advice to raise the learning rate, if steps are small by the records, or else to train longer."""
    usual = rules.usual_update(rules.recent_updates(run))
    n = multiplier(run, usual) if 0 < usual < SMALL_UPDATE else 1
    if n < MIN_FACTOR or divisor(run) >= MIN_FACTOR:
        return ("Train longer",)
    return (
        f"Multiply the learning rate by {n:,}: a step changes the median weight by {usual:.1g} of its size, "
        f"and {rules.USUAL_UPDATE:g} is usual",
        "Train longer",
    )
