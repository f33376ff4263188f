"""lr.schedule: schedules of the learning rate whose length or optimizer is not that of the training."""

import math
from collections.abc import Iterator
from typing import Any

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.schedules import Scheduler, Schedules, Use
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.rules import finite, rates, ratio
from hookcb.diagnosis.run import Run, Skipped
from hookcb.diagnosis.verdict import Finding, Severity

MIN_BATCHES, MIN_STEPS = 20, 2  # of a training; of a schedule
PER_BATCH, SAME = 0.9, 0.02  # steps of a schedule per batch; relative difference of two counts
MAX_ENDED, TINY = 0.25, 1e-3  # share of a training after which its rate is this share of the largest
MAX_OVER, MAX_RISEN = 1.1, 0.1  # steps of a cosine beyond its end; rate at the end, of the largest
MIN_HALVES, MAX_SHORT = 10, 200  # halves of a cosine; batches in each, as a number of epochs has
MAX_EPOCHS = 300  # a length that is such a round number may count epochs
MAX_CUT, MIN_EPOCHS = 0.5, 2  # share of a schedule; epochs without a step of one
PER_EPOCH = "a scheduler that is stepped in each batch, but whose length is in epochs"


@fault(
    "lr.schedule",
    Site.OPTIMIZER,
    needs="steps",
    leads_to="lr.vanished param.not_stepped loss.* update.* train.unfinished",
    exact=True,
    shown_by="run.lr",
)
class WrongSchedule(Fault):
    """A scheduler that counts batches but is stepped once per epoch, or the reverse; or of no use at all.

    Exact: its length (`total_steps`, `T_max`, the last of `milestones`, `total_iters`) and the number of its
    steps contradict each other; of several optimizers, each with its own steps. It is as long as the training
    has batches, to 2 %, but half of it or less was stepped; or it ended in the first quarter of the training,
    with a thousandth of the rate; or a cosine was stepped beyond its end, where it rises again, to a tenth of
    the rate or more at the end of training, or up and down ten times in 200 batches each. Or its optimizer
    has parameters of the model, but makes no step, while the rate of the one that does stays the same; or it
    is never stepped in two epochs or more. A note if a cosine rises and falls several times, as that may be
    meant, or if the first step of the schedule comes before that of the optimizer. A schedule that is cut
    short otherwise is not told.

    Source: torch.optim.lr_scheduler, whose `step` counts its calls: of batches, or of epochs.
    """

    headline = "The learning rate schedule does not fit"
    uses = (Schedules, Steps)
    severity = "warning"
    passed = "schedules that do not fit the training"

    def findings(self, run: Run) -> Iterator[Result]:
        schedules = run.measured(Schedules)
        used = [(one, use) for one, use in schedules.used if not (one.is_inner or one.is_set)]
        values = finite(rates(run).values)
        if run.n_batches < MIN_BATCHES or max(values, default=0.0) <= 0:
            yield Skipped(f"the learning rate of fewer than {MIN_BATCHES} batches is known")
            return
        stepped = [(one, use) for one, use in used if one.n - use.n_before >= MIN_STEPS]
        found = [x for one, use in stepped for x in self._judged(run, one, use)]
        has_several = run.measured(Steps).n_optimizers > 1
        for one, use in used:
            low, high, _ = use.rates if has_several else (min(values), max(values), 0.0)
            others = (x for x, y in used if not has_several or y.key == use.key)
            if use.is_ours and low == high and not any(x.n for x in others):
                found += self._never(one, schedules.n_epochs, schedules.n_validations)
        yield from self.told(run, found, "" if stepped else "fewer than two steps of a scheduler were seen")

    def _judged(self, run: Run, one: Scheduler, use: Use) -> Iterator[Finding]:
        n, n_batches, values = one.n - use.n_before, run.n_batches, finite(rates(run).values)
        rate, what = values[-1] / max(values), "batches"
        if use.is_foreign and min(values) == max(values):
            yield self._told(
                f"{one.kind} was stepped {n} times, but its optimizer makes no step: another one trains the "
                f"same parameters, at {values[-1]:.2g} in all {n_batches} batches.",
                float(n),
                0.0,
                "an optimizer that was created anew after the scheduler",
                "Create the scheduler after the optimizer, with the one whose step() is called",
            )
        if not use.is_ours:
            return
        if run.measured(Steps).n_optimizers > 1:
            _, high, last = use.rates
            n_batches, rate, what = use.n_steps, ratio(last, high), "steps of its optimizer"
            if n_batches < MIN_BATCHES or math.isnan(rate):
                return
        is_per_batch, length = n >= PER_BATCH * n_batches, one.length
        if length and abs(length - n_batches) <= SAME * n_batches and n <= MAX_CUT * length:
            may_be_epochs = one.kind != "OneCycleLR" and length <= MAX_EPOCHS and length % 10 == 0
            yield self._told(
                f"{one.kind} has {one.length_name} of {length}, about the number of {what} ({n_batches}), "
                f"but was stepped {n} times: at the end it is at {one.at / length:.0%} of its length (limit "
                f"{MAX_CUT:.0%}), and the learning rate at {rate:.0%} of its largest value.",
                one.at / length,
                MAX_CUT,
                "a schedule that counts batches, but is stepped once per epoch or once per optimizer step",
                f"Step the scheduler in each batch, or give it {one.length_name}={n}",
                "info" if may_be_epochs else "warning",
            )
        elif length and one.period:
            yield from self._rising(one, length, is_per_batch, rate)
        elif length and is_per_batch and length < MAX_ENDED * n and rate <= 1.001 * TINY:
            yield self._told(
                f"{one.kind} has {one.length_name} of {length}, but was stepped in each of {n_batches} "
                f"{what}: it ended after {length / n:.1%} of the training (limit {MAX_ENDED:.0%}), with "
                f"{rate:.1g} of the largest learning rate.",
                length / n,
                MAX_ENDED,
                PER_EPOCH,
                f"Step the scheduler once per epoch, or give {one.length_name} in batches",
            )
        if use.is_early:
            yield self._told(
                f"{one.kind} was stepped before the first step of its optimizer, so the first learning rate "
                "of the schedule is left out.",
                math.nan,
                math.nan,
                "scheduler.step() before optimizer.step()",
                "Call scheduler.step() after optimizer.step()",
                "info",
            )

    def _rising(self, one: Scheduler, length: int, is_per_batch: bool, rate: float) -> Iterator[Finding]:
        halves = (one.at - length + one.period) / one.period
        is_mistaken = is_per_batch and halves >= MIN_HALVES and one.period <= MAX_SHORT
        ends_high = halves <= 2 and rate >= MAX_RISEN
        if halves > MAX_OVER and (ends_high or halves > 2):
            how = (
                f"has moved up or down {halves:.0f} times" if halves > 2 else f"ends at {rate:.0%} of its top"
            )
            yield self._told(
                f"{one.kind} has T_max of {one.period}, but was stepped {one.at} times: after T_max the "
                f"learning rate rises again, and {how}.",
                halves,
                1.0,
                PER_EPOCH if is_per_batch else "T_max that is smaller than the number of steps",
                f"Use T_max={one.at}, or step the scheduler once per epoch if T_max counts epochs",
                "warning" if is_mistaken or ends_high else "info",
            )

    def _never(self, one: Scheduler, n_epochs: int, n_validations: int) -> Iterator[Finding]:
        if max(n_epochs, n_validations - 1) >= MIN_EPOCHS:
            n, of = (n_epochs, "epochs") if n_epochs >= MIN_EPOCHS else (n_validations, "validations")
            yield self._told(
                f"{one.kind} was created, but in a training with {n} {of} it was never stepped: the learning "
                "rate is constant.",
                0.0,
                math.nan,
                "scheduler.step() is missing, or is in a branch that is never taken",
                "Call scheduler.step() after each batch or epoch, as its length counts them",
                "warning" if n_epochs >= MIN_EPOCHS else "info",
            )

    def _told(
        self, what: str, value: float, limit: float, cause: str, advice: str, severity: Severity = "warning"
    ) -> Finding:
        about: dict[str, Any] = {"value": value, "limit": limit, "when": 0}
        return self.finding(what, severity, causes=(cause,), next_steps=(advice,), **about)
