"""loss.flat: a loss that has not fallen."""

import math
from collections.abc import Iterator

from hookcb.diagnosis import rules
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.opponents import Opponents
from hookcb.diagnosis.run import WINDOW, Passed, Run, Skipped


@fault("loss.flat", Site.RUN, needs="loss", shown_by="run.loss", draws_limit=True)
class FlatLoss(Fault):
    """A loss that has not fallen since the beginning.

    Formula: over 50 batches or more, the moving average is never below 0.95 of the first ten, and the
    confidence interval of the slope (Theil-Sen, three standard deviations) contains zero but no fall of 5 %.
    A loss that certainly falls is not flat, however slowly it falls and however close to guessing it is; a
    loss too noisy to tell is not judged, nor is one of an unknown kind, as an objective of reinforcement
    learning need not fall; nor is one of a game, as the loss of a GAN in balance stays at that of guessing. A
    warning if the loss is no better than 0.8 of guessing; else a note, as a
    pretrained model may have nothing left to learn.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968.
    """

    headline = "The loss does not fall"
    uses = (Curves, Loss, Opponents)

    def findings(self, run: Run) -> Iterator[Result]:
        loss, values, first = run.loss, rules.finite(run.loss.values), run.first_loss
        if len(values) < rules.MIN_BATCHES or not math.isfinite(first) or rules.is_warming_up(run):
            yield Skipped(f"fewer than {rules.MIN_BATCHES} batches, or the learning rate is still rising")
            return
        if rules.need_not_fall(run):
            why = rules.why_unknown(run, "the kind of the loss is not known")
            yield Skipped(f"{why}, and an objective need not fall")
            return
        if why := run.measured(Opponents).why:
            yield Skipped(f"{why}: in a game a loss need not fall")
            return
        lowest, limit = rules.lowest_loss(run)
        smallest_fall, largest_fall = rules.falls_by(loss)
        if lowest <= limit or smallest_fall > 0:
            yield Passed(f"flat loss (from {first:.3g} down to {lowest:.3g})", lowest, limit)
            return
        if largest_fall > first - limit:
            yield Skipped("the loss is too noisy to tell from so few batches whether it falls")
            return
        is_guessing = rules.guesses(run)
        guess = f"; guessing gives {run.measured(Loss).guess:.3g}" if is_guessing else ""
        yield self.finding(
            f"The loss has not fallen in {len(values):,} batches: it began at {first:.3g}, and its "
            f"moving average was never below {lowest:.3g}{guess}.",
            "warning" if is_guessing else "info",
            when=(loss.steps[WINDOW], loss.steps[-1]),
            value=lowest,
            limit=limit,
            causes=(
                "a learning rate that is too low or too high",
                "targets that do not belong to the inputs",
            ),
            next_steps=(
                "Overfit a single batch: if that fails, the model or the loss is at fault, else the data",
                run.advise("rate"),
            ),
        )
