"""train.changed: settings that a program changes in mid-run; loss.worse: a loss that is higher since then."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from hookcb.diagnosis.causes import UNFITTING, text_of_limit, undo_from
from hookcb.diagnosis.fault import Fault, Result, Site, fault, findings_of
from hookcb.diagnosis.measurements.changes import (
    CLIPPED,
    FACTOR,
    FACTORS,
    GRADIENT,
    LIMIT,
    LOADED,
    MIN_SPAN,
    OPERATIONS,
    SHAPE,
    when_of,
)
from hookcb.diagnosis.measurements.group_rates import JUMP, RISE, GroupRates
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.schedules import Schedules
from hookcb.diagnosis.measurements.settings import TURN, Settings
from hookcb.diagnosis.measurements.shifts import OTHER_DATA, Shifts, compare_from
from hookcb.diagnosis.measurements.step_scales import StepScales
from hookcb.diagnosis.rules import SIGMA, median, rates
from hookcb.diagnosis.run import Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.processes.groups import name_ranks

N, N_LONG = 32, 128  # losses whose level is compared; and after a change whose effect comes slowly
MIN_RISE = 0.05  # of the level before
# standard errors of the difference of two medians, of a step that is known, and of one that is looked for
SIGMAS_AT, SIGMAS = 4.0, 6.0
FALL = 2 / 3  # of a limit of clipping
SCHEDULE, N_SHOWN = 3, 4  # changes of one setting, and those that are listed
CHANGED, MEANT = "What changed: ", ". This may be as intended."
AS_LOADED = "If this is not meant, train on with the numbers of the state that was loaded"
WEIGHTS = "weights"  # which param.overwritten notes
NEAR = 32  # steps after the first change within which others are told beside it
TOLD = "loss.worse", "loss.spike", "replica.settings"  # what says more than `train.changed`
N_SHARED = 16  # changes that a rank gives, the latest
MAY_BE_MEANT = {
    OPERATIONS,
    SHAPE,
    FACTOR,
    FACTORS,
    "weight_decay",
}  # another loss, or a step against overfitting


class Fact(NamedTuple):
    """A change: its step, that of the last batch before it, a clause on it, and what has changed.

    Of several ranks those on which it has, empty if on all.
    """

    step: int
    last: int
    text: str
    layer: str = ""
    may_be_meant: bool = False
    what: str = ""
    is_of_data: bool = False
    ranks: tuple[int, ...] = ()


@fault(
    "loss.worse",
    Site.RUN,
    needs="loss",
    leads_to="loss.* update.spike update.too_large nonfinite.* valid.*",
    shown_by="run.loss",
)
class WorseLoss(Fault):
    """A loss that is higher since a setting of the training has changed: what, when, and by how much.

    Formula: the median of 32 losses after a change, of 128, or of all, is above that of the 32 before it by
    four standard errors and by 5 %, and that of the last 32 is not below it. A change is a fact: a learning
    rate that has risen by half or more in one step, of all groups or one, or of one step by step to twice
    that of the others; a limit of clipping by torch that has ended or risen by half or more, after 32 steps;
    another setting of a group of the optimizer, such as `betas`, `eps`, `momentum` or `weight_decay`; a
    number in an attribute of a layer or of an object in one, such as `p` of dropout or of a config, or the
    dtype of a buffer, or a write to one that had none; names of its parameters; the shape, names or dtypes of
    the inputs; another optimizer; gradients that something writes to, or no longer, between backward and
    step; weights that `param.overwritten` notes; the number of backwards before a step, of parameters that
    are clipped, the operations of the loss next to it and numbers that scale it or its parts, or the autograd
    graph of the model. All of these had stayed for 32 steps before and stayed for eight. Or the learning rate
    has doubled or more, step by step, since the 32 batches with the lowest median, the first ones excepted,
    and the median of the last 32 is above it by six standard errors and by a twentieth. A note if half of the
    rise is gone, if the kind of the loss is not known, or if the change may be meant: of the loss, of
    `weight_decay`, or in a layer, as of dropout. A rate that rises again by `CosineAnnealingWarmRestarts` or
    `CyclicLR` is meant, and not told. A warning, too, where `update.spike` warns of steps that are too large
    soon after the change, or `loss.trivial` of a model that is no better than a constant. The noise is that
    of differences between losses in a row. Not told where `loss.spike` warns. A change is a fact, too, if
    inputs or targets are others for good, see `loss.spike`; settings come first. It may be meant, as in a
    curriculum, unless that was 128 batches ago and the last 32 losses are as high as the first 32, and float
    targets have not grown, which a model may make.

    Source: J. von Neumann et al., "The mean square successive difference", 1941, for noise around a trend.
    That a change led to the rise is not shown by these facts; the limits are ours.
    """

    headline = "The loss is higher since something has changed"
    severity = "warning"
    uses = (GroupRates, Loss, Schedules, Settings, Shifts, StepScales)

    def __init__(self) -> None:
        super().__init__()
        self._of_ranks: list[list[Fact]] | None = None

    def state(self, run: Run) -> list[Fact]:
        return sorted(_facts(run))[-N_SHARED:]

    def merge(self, run: Run, of_ranks: Sequence[list[Fact]], rank: int) -> None:
        self._of_ranks = [*of_ranks]

    def facts(self, run: Run) -> list[Fact]:
        """Changes that the program has made, in order; on all ranks, if these have told them."""
        if self._of_ranks is None:
            return sorted(_facts(run))
        ranks: dict[Fact, list[int]] = {}
        for rank, facts in enumerate(self._of_ranks):
            for fact in dict.fromkeys(facts):
                ranks.setdefault(fact, []).append(rank)
        return [x if len(on) == len(self._of_ranks) else _on(x, on) for x, on in sorted(ranks.items())]

    def findings(self, run: Run) -> Iterator[Result]:
        if len(run.loss) < 3 * N:
            yield Skipped(f"fewer than {3 * N} batches")
            return
        if any(f.severity != "info" for f in findings_of("loss.spike", run)):
            yield Skipped("loss.spike tells what came first")
            return
        found = self._after_change(run)
        if found is None and not run.measured(Schedules).rises_again:
            found = self._with_rate(run)
        yield found or Passed("a loss that is higher since a setting of the training has changed")

    def _after_change(self, run: Run) -> Finding | None:
        facts = [*self.facts(run), *_facts_of_data(run)]  # what a program sets is known exactly
        for fact in facts:
            if (levels := _risen(run.loss, fact)) is not None:
                near = [x for x in facts if fact.step <= x.step <= fact.step + NEAR]
                return self._told(run, near, levels)
        return None

    def _with_rate(self, run: Run) -> Finding | None:
        """A rate that rises slowly, since the loss was lowest."""
        if (rise := risen_since_lowest(run)) is None:
            return None
        step, low, last = rise
        series = rates(run)
        before = median(x for at, x in series if step <= at < step + N)
        end = series.values[-1] if len(series) else math.nan
        if not 0 < RISE * before <= end:
            return None
        since, rate = _begin_of_rise(series)
        text = f"the learning rate, from {rate:.3g} to {end:.3g} in the steps from {since:,} on"
        is_slow = since <= step + N  # else the rate has moved in other ways as well
        return self._told(run, [Fact(since, since, text)], (low, last, last)) if is_slow else None

    def _told(self, run: Run, facts: list[Fact], levels: tuple[float, float, float]) -> Finding:
        (before, after, last), first = levels, facts[0]
        is_over = last <= (before + after) / 2
        is_harmful = any(
            f.severity != "info" and 0 <= (f.step or 0) - first.last <= NEAR
            for f in findings_of("update.spike", run)
        )
        is_harmful |= not is_over and any(f.severity != "info" for f in findings_of("loss.trivial", run))
        is_sure = run.measured(Loss).kind and not is_over and not all(fact.may_be_meant for fact in facts)
        then = "" if after == last else f"; in the end it is {last:.3g}"
        return self.finding(
            f"The loss has risen from {before:.3g} to {after:.3g}{then}. What changed before: "
            f"{_listed(facts)}.",
            "warning" if is_sure or is_harmful else "info",
            at=first.layer or None,
            when=(first.step, run.loss.steps[-1]),
            value=after,
            limit=before + MIN_RISE * abs(before),
            causes=(OTHER_DATA if first.is_of_data else UNFITTING,),
            next_steps=(compare_from(first.step) if first.is_of_data else undo_from(first.step),),
            ranks=_ranks_of(facts),
        )


def _listed(facts: Sequence[Fact]) -> str:
    texts = [*dict.fromkeys(fact.text for fact in facts)]
    more = [f"and {len(texts) - N_SHOWN} more"] if len(texts) > N_SHOWN else []
    return "; ".join(texts[:N_SHOWN] + more)


def _on(fact: Fact, ranks: Sequence[int]) -> Fact:
    """A change that was seen on some ranks only."""
    return fact._replace(text=f"on {name_ranks(ranks)}, {fact.text}", ranks=tuple(ranks))


def _ranks_of(facts: Sequence[Fact]) -> tuple[int, ...]:
    """The ranks of all of these changes, empty if they differ."""
    ranks = {fact.ranks for fact in facts}
    return ranks.pop() if len(ranks) == 1 else ()


class SinceLowest(NamedTuple):
    """A rise since the lowest level: the step at which that begins, that level, and the last one."""

    step: int
    low: float
    last: float


def risen_since_lowest(run: Run) -> SinceLowest | None:
    """The rise of the median of the last 32 losses above the lowest median of 32, which are not the first."""
    losses = run.loss.values
    starts = range(len(losses) % N, len(losses), N)
    levels = [median(losses[i : i + N]) for i in starts]
    best = min(range(len(levels)), key=levels.__getitem__)
    low, last = levels[best], levels[-1]
    least = _least_rise(losses[starts[best] :], low)
    if min(levels[0], last) < low + least or best == 0:
        return None
    return SinceLowest(run.loss.steps[starts[best]], low, last)


def _risen(loss: Series, fact: Fact) -> tuple[float, float, float] | None:
    """Levels of the loss before a change, after it, and in the end, if it has risen and not come back."""
    before = [x for step, x in loss if step <= fact.last][-N:]
    later = [x for step, x in loss if step > fact.step]
    if len(before) < N or len(later) < N:
        return None
    low, last = median(before), median(later[-N:])
    for n in (N, N_LONG, len(later)):
        after = median(later[:n])
        if after >= low + _least_rise([*before, *later[:n]], low, len(later[:n]), SIGMAS_AT) and last >= low:
            return low, after, last
    return None


def _least_rise(losses: Sequence[float], low: float, n: int = N, sigmas: float = SIGMAS) -> float:
    """Rise of the median of `n` losses above a lower one of 32 that is more than noise."""
    noise = SIGMA / math.sqrt(2) * median(abs(b - a) for a, b in pairwise(losses))
    return max(sigmas * noise * math.sqrt(math.pi / 2 * (1 / N + 1 / n)), MIN_RISE * abs(low))


def _facts(run: Run) -> Iterator[Fact]:
    if not run.measured(Schedules).rises_again:
        for (last, before), (step, rate) in pairwise(rates(run)):
            if 0 < JUMP * before <= rate:
                text = f"the learning rate, from {before:.3g} to {rate:.3g} {when_of(last, step)}"
                yield Fact(step, last, text)
        for jump in run.measured(GroupRates).jumps:
            yield Fact(jump.step, jump.step - 1, jump.text)
        for rise in run.measured(GroupRates).rises:
            step = rise.step if rise.since is None else rise.since
            yield Fact(step, step - 1, rise.text)
    limit = run.measured(StepScales).limit_change(run.n_batches, run.n_batches)
    if limit is not None:
        yield Fact(limit.step, limit.step - 1, text_of_limit(limit))
    for found in findings_of("param.overwritten", run):
        if found.severity == "info" and found.step is not None:
            step, name = found.step, found.param
            text = f"something other than the optimizer writes to {name}, first after step {step:,}"
            yield Fact(step + 1, step, text, found.layer, True, WEIGHTS)
    changes = run.measured(Settings).changes
    clipped = [x.step for x in changes if x.name in (CLIPPED, LIMIT)]
    for change in changes:
        if change.name == GRADIENT and any(abs(step - change.step) <= TURN for step in clipped):
            continue  # by the clipping that has changed
        if change.name == CLIPPED and 0 in (change.before, change.after):
            continue  # its limit has ended
        if change.name == LIMIT and not FALL * change.before >= change.after:
            continue  # likewise, or it has risen
        may_be_meant = change.layer is not None or change.name in MAY_BE_MEANT
        what = f"{change.name} of {change.of}"
        yield Fact(change.step, change.last, change.text, change.layer or "", may_be_meant, what)


def _facts_of_data(run: Run) -> Iterator[Fact]:
    """Data that have changed for good: meant, as in a curriculum or by a model, unless all is lost."""
    shifts, start = run.measured(Shifts), median(run.loss.values[:N])
    is_old = all(x.step <= run.loss.steps[-1] - N_LONG for x in shifts.found)
    is_made = shifts.growth is not None and not shifts.growth.ranks  # else others have it not
    is_lost = is_old and median(run.loss.values[-N:]) >= start and not is_made
    last: dict[tuple[str, tuple[int, ...]], int] = {}
    for x in shifts.found:
        if x.step > last.get((x.of, x.ranks), -math.inf) + NEAR:  # else it is a part of the one before
            yield Fact(x.step, x.last, x.text, may_be_meant=not is_lost, is_of_data=True, ranks=x.ranks)
        last[x.of, x.ranks] = x.step


@fault("train.changed", Site.RUN, needs="batches", exact=True)
class ChangedSettings(Fault):
    """A setting that a program changes in mid-run: what and when, as a note.

    Exact: the facts of `loss.worse` after the first 32 steps, whatever the loss does then. A setting that has
    changed three times or more follows a schedule, and is left out, as is what `loss.worse`, `loss.spike` or
    `replica.settings` names. Of several ranks, those on which it has changed are told, unless these are all.

    Source: none is needed; a program has set these numbers, and it may mean them. That a value had stayed for
    32 steps, and that rates and limits have changed by half or more, are limits of ours.
    """

    headline = "The program changes a setting in mid-run"
    severity = "info"
    uses = WorseLoss.uses
    passed = "settings that change in mid-run"

    def findings(self, run: Run) -> Iterator[Result]:
        if run.n_batches <= MIN_SPAN:
            yield Skipped(f"fewer than {MIN_SPAN + 1} batches")
            return
        told = [x for code in TOLD for x in findings_of(code, run)]
        facts = [x for x in run.measured(WorseLoss).facts(run) if x.what != WEIGHTS]
        facts = [x for x in facts if x.last >= MIN_SPAN or x.last == LOADED]  # not in a warmup
        n_changes = Counter((x.what, x.ranks) for x in facts)
        facts = [x for x in facts if not x.what or n_changes[x.what, x.ranks] < SCHEDULE]
        new = [x for x in facts if not any(_tells(f, x) for f in told)]
        yield self._found(new) if new else Passed(self.passed)

    def _found(self, facts: Sequence[Fact]) -> Finding:
        undo = undo_from(facts[0].step).lower()
        return self.finding(
            f"{CHANGED}{_listed(facts)}{MEANT}",
            at=facts[0].layer or None,
            when=(facts[0].step, facts[-1].step),
            next_steps=(
                AS_LOADED if facts[0].last == LOADED else f"If results are worse since then, {undo}",
            ),
            ranks=_ranks_of(facts),
        )


def _begin_of_rise(series: Series) -> tuple[int, float]:
    """First step of a rise from a constant rate that goes on until the end, and the rate before it."""
    steps, values = series.steps, series.values
    i = len(values) - 1
    while i > 0 and values[i - 1] <= values[i]:
        n = bisect_right(steps, steps[i] - MIN_SPAN)
        if n and values[n - 1] == values[i]:
            break
        i -= 1
    lowest = values[i]
    while i + 1 < len(values) and values[i] == lowest:
        i += 1
    return steps[i], lowest


def _tells(finding: Finding, fact: Fact) -> bool:
    return fact.text in finding.message or fact.last < (finding.step or 0) <= fact.step
