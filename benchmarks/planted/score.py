"""How good a verdict is: what came of each case and seed, and the score of them together. Pure."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from case import Case

from hookcb.diagnosis.registry import check_of
from hookcb.diagnosis.verdict import Finding, Verdict

ALARMS = ("error", "warning")
INFO_CODES = frozenset({"data.labels", "hook.silent"})  # of findings that are notes, as a rule
SOON = 20  # steps within which a fault is to be seen
BROKEN = "broke"  # status of a case that could not be run


@dataclass(frozen=True)
class Outcome:
    """What came of one case with one seed.

    Attributes:
        case, seed: which.
        is_control: whether nothing was planted.
        status: of the verdict; `BROKEN` where the case itself failed, and `error` has what it raised.
        primary, layer, step: of the finding taken for the cause; "" and None where there is none.
        extra: codes of the other findings that stand by themselves.
        is_flagged: whether there is any error or warning.
        is_named: whether any finding, info too, has a code of the case.
        is_cause_first: whether the primary has one, or any finding where the case has codes of info only.
        is_layer_right: of the primary or one with a code of the case; None where no layer is asked for.
        is_soon: whether one with a code of the case comes at most 20 steps after the fault.
        n_wrong: number of errors that are neither of the case's codes nor a consequence.
        has_learned: whether a control has reached its target.
    """

    case: str
    seed: int
    is_control: bool
    status: str
    primary: str = ""
    layer: str = ""
    step: int | None = None
    extra: tuple[str, ...] = ()
    is_flagged: bool = False
    is_named: bool = False
    is_cause_first: bool = False
    is_layer_right: bool | None = None
    is_soon: bool = False
    n_wrong: int = 0
    has_learned: bool = True
    error: str = ""

    @property
    def counts(self) -> bool:
        """Whether it is part of the score: a control that has not learned says nothing."""
        return self.status == BROKEN or not self.is_control or self.has_learned

    @property
    def is_right(self) -> bool:
        """A control that has learned and is found healthy, or a fault with cause first and layer right."""
        if self.is_control:
            return self.status == "healthy" and self.has_learned
        return self.is_cause_first and self.is_layer_right is not False


def broken(case: Case, seed: int, error: str) -> Outcome:
    """Of a case that could not be run."""
    return Outcome(case.name, seed, not case.codes, BROKEN, error=error)


def outcome(case: Case, seed: int, verdict: Verdict, losses: Sequence[float]) -> Outcome:
    """Compares a verdict with what was planted."""
    own = [finding for finding in verdict.findings if finding.code in case.codes]
    others = [f for f in verdict.findings if f is not verdict.primary and not f.consequence_of]
    primary = verdict.primary
    wrong = [
        f
        for f in verdict.findings
        if f.severity == "error" and not f.consequence_of and f.code not in case.codes
    ]
    return Outcome(
        case.name,
        seed,
        is_control=not case.codes,
        status=verdict.status,
        primary="" if primary is None else primary.code,
        layer="" if primary is None else primary.layer or primary.param,
        step=None if primary is None else primary.step,
        extra=tuple(dict.fromkeys(f.code for f in others)),
        is_flagged=any(f.severity in ALARMS for f in verdict.findings),
        is_named=bool(own),
        is_cause_first=_is_cause_first(case, primary, own),
        is_layer_right=_is_layer_right(case, primary, own),
        is_soon=any(_is_soon(f, case.planted_at) for f in own),
        n_wrong=len(wrong),
        has_learned=_has_learned(case, losses),
    )


def _is_cause_first(case: Case, primary: Finding | None, own: Sequence[Finding]) -> bool:
    if case.codes and case.codes <= INFO_CODES:
        return bool(own)
    return primary is not None and primary.code in case.codes


def _is_layer_right(case: Case, primary: Finding | None, own: Sequence[Finding]) -> bool | None:
    if not case.layers:
        return None
    looked_at = [*own, *([primary] if primary is not None else [])]
    return any(f.layer in case.layers or _lies_in(f.param, case.layers) for f in looked_at)


def _is_soon(finding: Finding, planted_at: int) -> bool:
    """An exact finding without a step is of what was there before the first one, as an optimizer's groups."""
    if finding.step is None:
        return planted_at == 0 and check_of(finding.code).exact
    return 0 <= finding.step - planted_at <= SOON


def _lies_in(param: str, layers: Iterable[str]) -> bool:
    return any(param.startswith(f"{layer}.") for layer in layers)


def _has_learned(case: Case, losses: Sequence[float]) -> bool:
    return math.isnan(case.target) or (len(losses) > 0 and fmean(losses[-10:]) < case.target)


@dataclass(frozen=True)
class Score:
    """Of all cases with one seed; shares are in 0..1, NaN of nothing.

    Attributes:
        false_alarms: names of controls that are not healthy, of `n_controls` that have learned.
        not_learned: names of the other controls.
        recall: share of the faults with an error or a warning, of `n_faults`.
        named: share with a finding of their codes.
        cause_first, layer_right, soon: shares, see `Outcome`; the layer where there is one.
        wrong: number of wrong errors on faults.
    """

    seed: int
    n_controls: int
    false_alarms: tuple[str, ...]
    not_learned: tuple[str, ...]
    n_faults: int
    recall: float
    named: float
    cause_first: float
    layer_right: float
    soon: float
    wrong: int


def score(seed: int, outcomes: Iterable[Outcome]) -> Score:
    """Of the outcomes of this seed among all."""
    of_seed = [of for of in outcomes if of.seed == seed]
    controls = [of for of in of_seed if of.is_control]
    faults = [of for of in of_seed if not of.is_control]
    counted = [of for of in controls if of.counts]
    return Score(
        seed,
        n_controls=len(counted),
        false_alarms=tuple(of.case for of in counted if of.status != "healthy"),
        not_learned=tuple(of.case for of in controls if not of.counts),
        n_faults=len(faults),
        recall=share(of.is_flagged for of in faults),
        named=share(of.is_named for of in faults),
        cause_first=share(of.is_cause_first for of in faults),
        layer_right=share(of.is_layer_right for of in faults if of.is_layer_right is not None),
        soon=share(of.is_soon for of in faults),
        wrong=sum(of.n_wrong for of in faults),
    )


def share(of: Iterable[bool]) -> float:
    """Of those that are so; NaN of none."""
    return fmean(values) if (values := list(map(float, of))) else math.nan


# ---- the rules of others


@dataclass(frozen=True)
class Flags:
    """The rules that fired on one case with one seed, by name of the baseline."""

    case: str
    seed: int
    is_control: bool
    fired: Mapping[str, tuple[str, ...]]
    has_learned: bool = True


@dataclass(frozen=True)
class BaselineScore:
    """Of one baseline, with one seed or with all.

    Attributes:
        faults, controls: number of those on which any rule fired.
        silent: number of the faults on which one fired that fires on no control: the rules a user would keep
            who knew these controls.
    """

    name: str
    n_faults: int
    faults: int
    n_controls: int
    controls: int
    silent: int


def misfiring(name: str, flags: Iterable[Flags]) -> set[str]:
    """Rules of a baseline that fired on a control."""
    return {rule for fired in _fired(name, flags)[1] for rule in fired}


def baseline_score(name: str, flags: Iterable[Flags], noisy: Collection[str]) -> BaselineScore:
    """Counts what fired, `noisy` are the rules that misfire; controls that have not learned are left out."""
    of_faults, of_controls = _fired(name, flags)
    return BaselineScore(
        name,
        n_faults=len(of_faults),
        faults=sum(map(bool, of_faults)),
        n_controls=len(of_controls),
        controls=sum(map(bool, of_controls)),
        silent=sum(any(rule not in noisy for rule in fired) for fired in of_faults),
    )


def rule_counts(name: str, flags: Iterable[Flags]) -> list[tuple[str, int, int]]:
    """By rule of a baseline on how many faults, and on how many controls it fired; the most faults first."""
    of_faults, of_controls = (Counter(rule for of in part for rule in of) for part in _fired(name, flags))
    rules = sorted(of_faults | of_controls, key=lambda rule: (-of_faults[rule], of_controls[rule], rule))
    return [(rule, of_faults[rule], of_controls[rule]) for rule in rules]


def _fired(name: str, flags: Iterable[Flags]) -> tuple[list[Collection[str]], list[Collection[str]]]:
    """What fired on each fault, and on each control that has learned."""
    there = list(flags)
    of_faults: list[Collection[str]] = [of.fired[name] for of in there if not of.is_control]
    return of_faults, [of.fired[name] for of in there if of.is_control and of.has_learned]


# ---- a row of the table


@dataclass(frozen=True)
class Row:
    """One case over its seeds: the worst outcome, in the form that most of the worst have."""

    shown: Outcome
    n_right: int
    n_seeds: int

    @property
    def fails(self) -> bool:
        """Whether it is wrong with any seed."""
        return self.n_right < self.n_seeds


def rows(outcomes: Iterable[Outcome]) -> list[Row]:
    """One for each case, in the order in which they come."""
    by_case: dict[str, list[Outcome]] = {}
    for of in outcomes:
        by_case.setdefault(of.case, []).append(of)
    return [_row(of) for of in by_case.values()]


def _row(of: Sequence[Outcome]) -> Row:
    wrong = [x for x in of if not x.is_right]
    shown = wrong or list(of)
    forms = [(x.status, x.primary, x.layer) for x in shown]
    usual = Counter(forms).most_common(1)[0][0]
    return Row(shown[forms.index(usual)], len(of) - len(wrong), len(of))
