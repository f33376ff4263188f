"""From evidence to a verdict: all checks, and which finding follows from which."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import hookcb.diagnosis.checks  # noqa: F401  # which registers them
from hookcb.diagnosis.evidence import Evidence
from hookcb.diagnosis.registry import CHECKS, Absent, Check, Passed, Result, Skipped, check_of
from hookcb.diagnosis.verdict import Finding, Gap, Status, Verdict

SOURCES = {  # what brings them
    "activations": "ActivationStats",
    "gradients": "GradientHealth",
    "loss": "a loss that is known: under watch, w.report_loss(loss)",
    "batches": "Diagnose",
    "batch": "Diagnose, or a Learner with a batch to look at",
    "model": "Diagnose, or a Learner with a batch to look at",
    "graph": "Diagnose, or a Learner with a batch to look at",
    "optimizers": "an optimizer",
    "steps": "Diagnose",
    "time": "Diagnose",
    "memory": "Diagnose",
}
RANK = {"error": 0, "warning": 1, "info": 2}


def judge(evidence: Evidence) -> Verdict:
    """Runs all checks; the earliest cause is primary, what follows from it is said to.

    A check that cannot run says so in the verdict's `gaps`; none raises.
    """
    results = [(check, result) for check in CHECKS.values() for result in _run(check, evidence)]
    found = [result for _, result in results if isinstance(result, Finding)]
    fine = [(check, result.text) for check, result in results if isinstance(result, Passed)]
    unable: dict[str, list[str]] = {}  # codes by reason
    for check, result in results:
        if isinstance(result, Skipped):
            unable.setdefault(result.reason, []).append(check.code)
    reason = evidence.why_nothing_seen()
    if reason:
        fine = []  # if nothing was seen nothing is ruled out
    findings = list(_as_bad_as_they_lead_to(explained(found, evidence)))
    primary = next((f for f in findings if f.severity != "info" and not f.consequence_of), None)
    status = _status(findings, reason)
    return Verdict(
        status,
        primary,
        tuple(findings),
        _in_order(fine, primary),
        _looked(evidence),
        reason if status == "unknown" else "",
        n_checked=len({*(finding.code for finding in found), *(check.code for check, _ in fine)}),
        n_checks=len({check.code for check, result in results if not isinstance(result, Absent)}),
        gaps=tuple(Gap(tuple(dict.fromkeys(codes)), why) for why, codes in unable.items()),
    )


def _run(check: Check, evidence: Evidence) -> Sequence[Result]:
    if check.subject in evidence.absent:
        return [Absent(evidence.absent[check.subject])]
    if missing := [need for need in check.needs if need not in evidence.sources]:
        known = [evidence.missing[need] for need in missing if need in evidence.missing]
        why = " and ".join(dict.fromkeys(SOURCES[need] for need in missing))
        return [Skipped(known[0] if known else f"needs {why}")]
    try:
        results = list(check.function(evidence))
    except Exception as error:  # a verdict without it is better than none
        return [Skipped(f"failed by itself, please report it: {error!r}")]
    partial = [evidence.partial[need] for need in check.needs if need in evidence.partial]
    # a fault can be seen in a part of a model; to rule it out takes all of it
    return [Skipped(partial[0]) if partial and isinstance(x, Passed) else x for x in results]


def explained(findings: Iterable[Finding], evidence: Evidence) -> list[Finding]:
    """Findings in the order of the flow, causes first; what follows from another says so.

    One follows from another where that kind of finding can lead to it, was seen no later, and stands
    earlier in this order: by step, then by site, then by the place of its layer.
    """
    in_order = sorted(findings, key=lambda finding: _key(finding, evidence))
    told: list[Finding] = []
    for finding in in_order:
        cause = next((other for other in told if _leads_to(other, finding)), None)
        told.append(finding if cause is None else replace(finding, consequence_of=cause.code))
    return sorted(told, key=lambda f: (bool(f.consequence_of), *_weight(f), *_key(f, evidence)))


def _as_bad_as_they_lead_to(findings: Sequence[Finding]) -> Iterator[Finding]:
    """A warning from which an error follows is one itself."""
    to_blame = {f.consequence_of for f in findings if f.severity == "error"}
    for finding in findings:
        is_worse = finding.severity == "warning" and finding.code in to_blame
        yield replace(finding, severity="error") if is_worse else finding


def _leads_to(cause: Finding, finding: Finding) -> bool:
    if cause.severity == "info" or cause.code == finding.code:
        return False
    return any(fnmatchcase(finding.code, pattern) for pattern in check_of(cause.code).leads_to)


def _key(finding: Finding, evidence: Evidence) -> tuple[float, int, float, bool, str]:
    layer, check = evidence.layers.get(finding.layer), check_of(finding.code)
    step = -1 if finding.step is None else finding.step
    place = math.inf if layer is None else layer.place
    return step, check.site, place, not check.exact, check.code  # not by the order in which checks run


def _weight(finding: Finding) -> tuple[int, bool]:
    return RANK[finding.severity], not check_of(finding.code).exact


def _status(findings: Sequence[Finding], why_unseen: str) -> Status:
    severities = {finding.severity for finding in findings if not finding.consequence_of}
    if severities <= {"info"}:
        return "unknown" if why_unseen else "healthy"
    return "sick" if "error" in severities else "suspect"


def _in_order(fine: Sequence[tuple[Check, str]], primary: Finding | None) -> tuple[str, ...]:
    """What is fine; first what could have led to the primary finding, and has not."""
    if primary is None:
        return tuple(text for _, text in fine)
    could = [check for check, _ in fine if any(fnmatchcase(primary.code, x) for x in check.leads_to)]
    return tuple(text for _, text in sorted(fine, key=lambda pair: pair[0] not in could))


def _looked(evidence: Evidence) -> tuple[str, ...]:
    n = evidence.n_batches
    rule = f" ({evidence.looks})" if evidence.looks else ""
    looked = f"{n} batch{'es' * (n != 1)}, {evidence.n_looked} of them closely{rule}"
    size = f"{len(evidence.layers)} layers, {len(evidence.params)} parameters"
    return (looked, size, *evidence.notes)
