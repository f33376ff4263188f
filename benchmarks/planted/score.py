"""Quality of the verdicts: the outcome of each case and seed, and the score over all of them. Pure."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from case import Case

from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.verdict import Finding, Verdict

ALARMS = ("error", "warning")
INFO_CODES = frozenset({"data.labels", "hook.silent"})  # codes of findings that are usually notes
SOON = 20  # number of steps within which a fault should be detected
BROKEN = "broke"  # status of a case that could not be run


@dataclass(frozen=True)
class Outcome:
    """Outcome of one case with one seed.

    Attributes:
        case, seed: name of the case, and the seed.
        is_control: whether nothing was planted.
        status: status of the verdict; `BROKEN` if the case itself failed, and `error` has its exception.
        primary, layer, step: code, layer, and step of the primary finding; "" and None if there is none.
        extra: codes of the other findings that are not consequences.
        is_flagged: whether there is any error or warning, or a note that is enough.
        is_named: whether any finding, including info, has a code of the case.
        is_cause_first: whether the primary finding has one; if a note is enough, any finding.
        is_layer_right: whether the primary finding or one with a code of the case names the right layer; None
            if no layer is required.
        is_soon: whether one with a code of the case comes at most 20 steps after the fault.
        n_wrong: number of errors that neither have a code of the case nor are a consequence.
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
        """Whether it is part of the score; a control that has not learned is not."""
        return self.status == BROKEN or not self.is_control or self.has_learned

    @property
    def is_right(self) -> bool:
        """Whether a control has learned and is found healthy, or a fault has cause first and layer right."""
        if self.is_control:
            return self.status == "healthy" and self.has_learned
        return self.is_cause_first and self.is_layer_right is not False


def broken(case: Case, seed: int, error: str) -> Outcome:
    """Outcome of a case that could not be run."""
    return Outcome(case.name, seed, not case.codes, BROKEN, error=error)


def outcome(case: Case, seed: int, verdict: Verdict, losses: Sequence[float]) -> Outcome:
    """Compare a verdict with what was planted."""
    matching = [finding for finding in verdict.findings if finding.code in case.codes]
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
        is_flagged=any(f.severity in ALARMS for f in verdict.findings) or _is_noted(case, matching),
        is_named=bool(matching),
        is_cause_first=_is_cause_first(case, primary, matching),
        is_layer_right=_is_layer_right(case, primary, matching),
        is_soon=any(_is_soon(f, case.planted_at) for f in matching),
        n_wrong=len(wrong),
        has_learned=_has_learned(case, losses),
    )


def _is_cause_first(case: Case, primary: Finding | None, matching: Sequence[Finding]) -> bool:
    return _is_noted(case, matching) or (primary is not None and primary.code in case.codes)


def _is_noted(case: Case, matching: Sequence[Finding]) -> bool:
    """Whether a finding has a code of a case that a note is enough to name."""
    return (case.note_suffices or case.codes <= INFO_CODES) and len(matching) > 0


def _is_layer_right(case: Case, primary: Finding | None, matching: Sequence[Finding]) -> bool | None:
    if not case.layers:
        return None
    looked_at = [*matching, *([primary] if primary is not None else [])]
    return any(f.layer in case.layers or _lies_in(f.param, case.layers) for f in looked_at)


def _is_soon(finding: Finding, planted_at: int) -> bool:
    """Whether a finding is soon; an exact one without a step was visible before the first step."""
    if finding.step is None:
        return planted_at == 0 and FAULTS[finding.code].exact
    return 0 <= finding.step - planted_at <= SOON


def _lies_in(param: str, layers: Iterable[str]) -> bool:
    return any(param.startswith(f"{layer}.") for layer in layers)


def _has_learned(case: Case, losses: Sequence[float]) -> bool:
    return math.isnan(case.target) or (len(losses) > 0 and fmean(losses[-10:]) < case.target)


@dataclass(frozen=True)
class Score:
    """Score of all cases with one seed; shares are in 0..1, NaN if there is nothing to count.

    Attributes:
        false_alarms: names of controls not found healthy, among the `n_controls` that have learned.
        not_learned: names of the other controls.
        recall: share of the `n_faults` faults that are flagged, see `Outcome`.
        named: share of faults with a finding that has one of their codes.
        cause_first, layer_right, soon: shares, see `Outcome`; `layer_right` only of faults with a layer.
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
    """Score of one seed; outcomes of other seeds are ignored."""
    of_seed = [x for x in outcomes if x.seed == seed]
    controls = [x for x in of_seed if x.is_control]
    faults = [x for x in of_seed if not x.is_control]
    counted = [x for x in controls if x.counts]
    return Score(
        seed,
        n_controls=len(counted),
        false_alarms=tuple(x.case for x in counted if x.status != "healthy"),
        not_learned=tuple(x.case for x in controls if not x.counts),
        n_faults=len(faults),
        recall=share(x.is_flagged for x in faults),
        named=share(x.is_named for x in faults),
        cause_first=share(x.is_cause_first for x in faults),
        layer_right=share(x.is_layer_right for x in faults if x.is_layer_right is not None),
        soon=share(x.is_soon for x in faults),
        wrong=sum(x.n_wrong for x in faults),
    )


def share(flags: Iterable[bool]) -> float:
    """Share of true values; NaN if empty."""
    return fmean(values) if (values := list(map(float, flags))) else math.nan


# ---- rules of other tools


@dataclass(frozen=True)
class Flags:
    """Rules that fired on one case with one seed, by name of the baseline."""

    case: str
    seed: int
    is_control: bool
    fired: Mapping[str, tuple[str, ...]]
    has_learned: bool = True


@dataclass(frozen=True)
class BaselineScore:
    """Score of one baseline, with one seed or with all.

    Attributes:
        faults, controls: number of faults and controls on which any rule fired.
        silent: number of faults flagged by a rule that fires on no control: a user who knew these controls
            would keep only such rules.
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
    """Count where rules fired, without controls that have not learned; `noisy` are the rules that misfire."""
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
    """Each rule of a baseline with the number of faults and controls it fired on, most faults first."""
    of_faults, of_controls = (
        Counter(rule for fired in part for rule in fired) for part in _fired(name, flags)
    )
    rules = sorted(of_faults | of_controls, key=lambda rule: (-of_faults[rule], of_controls[rule], rule))
    return [(rule, of_faults[rule], of_controls[rule]) for rule in rules]


def _fired(name: str, flags: Iterable[Flags]) -> tuple[list[Collection[str]], list[Collection[str]]]:
    """Rules that fired on each fault, and on each control that has learned."""
    all_flags = list(flags)
    of_faults: list[Collection[str]] = [flag.fired[name] for flag in all_flags if not flag.is_control]
    return of_faults, [flag.fired[name] for flag in all_flags if flag.is_control and flag.has_learned]


# ---- a row of the table


@dataclass(frozen=True)
class Row:
    """One case over its seeds; `shown` is the most common wrong outcome, or the most common one of all."""

    shown: Outcome
    n_right: int
    n_seeds: int

    @property
    def fails(self) -> bool:
        """Whether the outcome is wrong with any seed."""
        return self.n_right < self.n_seeds


def rows(outcomes: Iterable[Outcome]) -> list[Row]:
    """One row per case, in the order of the outcomes."""
    by_case: dict[str, list[Outcome]] = {}
    for item in outcomes:
        by_case.setdefault(item.case, []).append(item)
    return [_row(item) for item in by_case.values()]


def _row(outcomes: Sequence[Outcome]) -> Row:
    wrong = [x for x in outcomes if not x.is_right]
    shown = wrong or list(outcomes)
    forms = [(x.status, x.primary, x.layer) for x in shown]
    usual = Counter(forms).most_common(1)[0][0]
    return Row(shown[forms.index(usual)], len(outcomes) - len(wrong), len(outcomes))
