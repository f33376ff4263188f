"""Runs all checks on the evidence, and decides which finding follows from which."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import hookcb.diagnosis.faults  # noqa: F401  # likewise
from hookcb.diagnosis.failures import describe_failure
from hookcb.diagnosis.fault import FAULTS, Fault, Result, Site, key_of, parts_for
from hookcb.diagnosis.faults.loss.worse import CHANGED, MEANT, ChangedSettings
from hookcb.diagnosis.ranks import Together, findings_of_all
from hookcb.diagnosis.reader import why_unseen
from hookcb.diagnosis.run import Absent, Partial, Passed, Run, Skipped
from hookcb.diagnosis.schedule import Schedule
from hookcb.diagnosis.verdict import UNFINISHED, Finding, Gap, Status, Verdict

MIN_CHECKED = 1 / 8  # share of checks: with Diagnose, real trainings have half; activations alone, 2 %
RANK = {"error": 0, "warning": 1, "info": 2}
ALONE = Together()
OUTCOMES = ("loss.trivial", "valid.")  # of a training as a whole, which any exact cause explains
NEAR = 128  # steps before an alarm in which a change is told with it
SEEN_LATE = 8  # steps by which a change of the program may be seen later than what follows from it
SELF_EXPLAINED = (
    "loss.worse",
    "loss.spike",
    "time.",
    "memory.",
)  # findings that name changes, or are of none
LAST = (*OUTCOMES, "loss.flat")  # what all others can have led to, whatever their steps


def judge(
    evidence: Run, ranks: Together = ALONE, own: Sequence[Finding] = (), told: Sequence[Finding] = ()
) -> Verdict:
    """Runs all checks; the earliest cause becomes the primary finding, the others name what they follow from.

    A check that cannot run or fails is listed in the verdict's `gaps`.

    Args:
        evidence: what this rank has recorded.
        ranks: ranks that all call this; each gets the verdict of rank 0 on what any of them has found, if
            it comes.
        own: further findings of this rank.
        told: errors that were told during the training; those that are over by now are among the findings.
    """
    evidence._kept = {}  # of a verdict before: ranks have shared their losses since then
    results = [(check, result) for check in FAULTS.values() for result in _run(check, evidence)]
    found = [result for _, result in results if isinstance(result, Finding)]
    passed = [(check, result) for check, result in results if isinstance(result, Passed)]
    gaps = _gaps(results)
    if ranks.world > 1:
        found, gaps = findings_of_all(ranks.results([*found, *own], gaps), ranks.world)
        unsure = {finding.code for finding in found} | {code for gap in gaps for code in gap.codes}
        passed = [(check, result) for check, result in passed if check.code not in unsure]
    found = _with_past(found, ranks.told(told), evidence)
    reason = evidence.why_nothing_seen()
    if reason:
        passed = []  # nothing is ruled out by a training that was not seen
    n_checked = len({*(finding.code for finding in found), *(check.code for check, _ in passed)})
    n_checks = len({check.code for check, result in results if not isinstance(result, Absent)})
    if not (reason or evidence.is_one_backward) and n_checked < MIN_CHECKED * n_checks:
        reason = f"{n_checked} of {n_checks} checks could run; Diagnose() among the callbacks sees more"
    findings = _in_order_of_causes(_without_idle_advice(found, bool(reason)), evidence)
    primary, status = primary_of(findings), status_of(findings, reason)
    verdict = Verdict(
        status,
        primary,
        tuple(findings),
        _in_order(passed, primary),
        _looked(evidence),
        reason if status == "unknown" else "",
        n_checked=n_checked,
        n_checks=n_checks,
        gaps=tuple(gaps),
        more=evidence.advise("coverage"),
        hang=evidence.hang,
    )
    return ranks.verdict(verdict)


def _gaps(results: Iterable[tuple[type[Fault], Result]]) -> list[Gap]:
    skipped: dict[str, list[str]] = {}  # codes by reason
    for check, result in results:
        if isinstance(result, Skipped):
            skipped.setdefault(result.reason, []).append(check.code)
    return [Gap(tuple(dict.fromkeys(codes)), why) for why, codes in skipped.items()]


def _with_past(found: Sequence[Finding], told: Sequence[Finding], evidence: Run) -> list[Finding]:
    """Findings, and errors that were told and are over: as warnings, unless they have led to one of these."""
    alarms = [f for f in found if f.severity != "info"]
    past = [f for f in told if all(f.code != other.code for other in alarms)]
    codes = {f.code for f in past}  # notes of these checks say less
    return [
        *(f for f in found if f.code not in codes),
        *(
            f
            if any(_leads_to(f, other) for other in alarms)
            else replace(f, severity="warning", recovered=_recovered_by(f, evidence))
            for f in past
        ),
    ]


def _recovered_by(finding: Finding, evidence: Run) -> int:
    """Number of the batch by which it was over: as the curve of the loss shows, if it is about that."""
    check, last = FAULTS[finding.code], max(0, evidence.n_batches - 1)
    if check.shown_by != "run.loss" or not check.draws_limit:
        return last
    high = [step for step, x in evidence.smooth_loss() if x > finding.limit]
    return min(last, max(high, default=last) + 1)


def _without_idle_advice(findings: Sequence[Finding], is_unknown: bool) -> list[Finding]:
    """Findings without the note that a training could go on.

    It stays only beside what is harmless, or could end if the training went on: not if the validation loss
    rises, even if that is a note.
    """
    harmless = ("time.", "memory.", "loss.flat", "loss.trivial")
    is_faulty = any(
        (f.severity != "info" and not f.code.startswith(harmless)) or f.code.startswith("valid.")
        for f in findings
    )
    return [f for f in findings if not ((is_faulty or is_unknown) and f.code == UNFINISHED)]


def _run(check: type[Fault], evidence: Run) -> Sequence[Result]:
    reasons = evidence.reasons
    if absent := [why for x in (check.subject, *check.needs) if isinstance(why := reasons.get(x), Absent)]:
        return absent[:1]
    known = [reasons[x] for x in (*map(key_of, parts_for([check])), *check.needs) if x in reasons]
    partial = [why.reason for why in known if isinstance(why, Partial)]
    if missing := [need for need in check.needs if need not in evidence.sources]:
        whys = partial + [reasons[need].reason for need in missing if need in reasons]
        return [Skipped(whys[0] if whys else why_unseen(missing, evidence.reader))]
    try:
        results = list(evidence.measured(check).findings(evidence))
    except Exception as error:  # a verdict without this check is better than none
        return [Skipped(describe_failure("the check itself", error))]
    # a part can show a fault, but not rule it out
    ruled_out = Passed, *((Skipped, Absent) if isinstance(reasons.get(check.code), Partial) else ())
    return [Skipped(partial[0]) if partial and isinstance(x, ruled_out) else x for x in results]


def _in_order_of_causes(found: Sequence[Finding], evidence: Run) -> list[Finding]:
    try:
        return _with_changes([*_with_raised_severity(explained(found, evidence))])
    except Exception as error:  # what was found is told all the same
        evidence.notes.append(describe_failure("finding the causes", error))
        return sorted(found, key=lambda finding: RANK[finding.severity])


def explained(findings: Iterable[Finding], evidence: Run) -> list[Finding]:
    """Findings with `consequence_of` set, causes first.

    A finding follows from another one if that code can lead to it and comes before it in the order of step,
    then site in the training step, then position of the layer. That a model is no better than a constant, and
    what its validation shows, follows from any exact cause, whatever that says it leads to.
    """
    in_order = sorted(findings, key=lambda f: (f.code.startswith(LAST), *_key(f, evidence)))
    linked: list[Finding] = []
    depths: dict[Finding, int] = {}  # number of causes before it
    for finding in in_order:
        cause = next((other for other in linked if _leads_to(other, finding)), None)
        if cause is None and finding.code.startswith(OUTCOMES):
            cause = next(filter(_is_exact_cause, linked), None)
        linked.append(finding if cause is None else replace(finding, consequence_of=cause.code))
        depths[linked[-1]] = 0 if cause is None else depths[cause] + 1
    return sorted(linked, key=lambda f: (f.code == UNFINISHED, depths[f], *_weight(f), *_key(f, evidence)))


def _is_exact_cause(finding: Finding) -> bool:
    check = FAULTS[finding.code]
    return finding.severity != "info" and check.exact and check.site < Site.RUN


def _with_raised_severity(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Turns a warning from which an error follows into an error."""
    causes_of_errors = {f.consequence_of for f in findings if f.severity == "error"}
    for finding in findings:
        is_worse = finding.severity == "warning" and finding.code in causes_of_errors
        yield replace(finding, severity="error") if is_worse else finding


def _with_changes(findings: list[Finding]) -> list[Finding]:
    """Findings, the first alarm with what the program had changed in the 128 steps before it."""
    first, change = primary_of(findings), next((f for f in findings if f.code == ChangedSettings.code), None)
    if first is None or change is None or first.is_slow or first.code.startswith(SELF_EXPLAINED):
        return findings
    begin, end, step = change.step, change.last_step, first.step
    if begin is None or step is None or not begin <= step <= begin + NEAR or (end or begin) > step:
        return findings
    said = change.message.removesuffix(MEANT).removeprefix(CHANGED)
    named = replace(first, message=f"{first.message} The program had changed: {said}.")
    return [named if f is first else f for f in findings]


def _leads_to(cause: Finding, finding: Finding) -> bool:
    if cause.severity == "info" or cause.code == finding.code:
        return False
    return any(fnmatchcase(finding.code, pattern) for pattern in FAULTS[cause.code].leads_to)


def _key(finding: Finding, evidence: Run) -> tuple[float, int, float, bool, str]:
    layer, check = evidence.layers.get(finding.layer), FAULTS[finding.code]
    step = -1 if finding.step is None else finding.step
    if finding.code == ChangedSettings.code:
        step -= SEEN_LATE
    place = math.inf if layer is None else layer.place
    return step, check.site, place, not check.exact, check.code  # independent of the order of checks


def _weight(finding: Finding) -> tuple[bool, int, bool, int, bool]:
    """Notes come last; of these, first facts with a step, and then what the curve of the loss shows."""
    is_note, check = finding.severity == "info", FAULTS[finding.code]
    is_event = check.exact and finding.step is not None
    rank = 0 if not is_note or is_event else 1 if check.shown_by == "run.loss" else 2
    return is_note, rank, finding.is_slow, RANK[finding.severity], not check.exact


def primary_of(findings: Sequence[Finding]) -> Finding | None:
    """The first finding that is an error or a warning and follows from no other."""
    return next((f for f in findings if f.severity != "info" and not f.consequence_of), None)


def status_of(findings: Sequence[Finding], why_unseen: str) -> Status:
    """The status of a verdict with these findings; `why_unseen` is the reason if nothing could be seen."""
    alarms = [finding for finding in findings if not finding.consequence_of and finding.severity != "info"]
    severities = {finding.severity for finding in alarms if not finding.is_slow}
    if not severities and why_unseen:
        return "unknown"
    if not alarms:
        return "healthy"
    return "sick" if "error" in severities else "suspect"


def _in_order(passed: Sequence[tuple[type[Fault], Passed]], primary: Finding | None) -> tuple[str, ...]:
    """Texts of passed checks; first those that could have led to the primary finding.

    Beside a finding, a check whose number is near its limit is not called ruled out.
    """
    if primary is None:
        return tuple(result.text for _, result in passed)
    could = [check for check, _ in passed if any(fnmatchcase(primary.code, x) for x in check.leads_to)]
    clear = [(check, result.text) for check, result in passed if not result.is_near]
    return tuple(text for _, text in sorted(clear, key=lambda pair: pair[0] not in could))


def _looked(evidence: Run) -> tuple[str, ...]:
    n = evidence.n_batches
    rule = f" ({rule})" if (rule := evidence.measured(Schedule).rule) else ""
    looked = "1 batch" if n == 1 else f"{n} batches, {evidence.n_looked} closely{rule}"
    n_layers, n_params = len(evidence.layers), len(evidence.params)
    layers = f"{n_layers} layer{'s' * (n_layers != 1)}" if n_layers else "outputs of no layer"
    size = f"{layers}, {n_params} parameter{'s' * (n_params != 1)}"
    return (looked, size, *evidence.notes)
