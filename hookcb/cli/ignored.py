"""A verdict without the findings that a user ignores."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from hookcb.diagnosis.judge import RANK, primary_of, status_of
from hookcb.diagnosis.verdict import Verdict


def hits(verdict: Verdict, patterns: Iterable[str]) -> list[str]:
    """Returns the `fnmatch` patterns that match the code of a finding."""
    return [x for x in patterns if any(fnmatchcase(f.code, x) for f in verdict.findings)]


def without(verdict: Verdict, patterns: Sequence[str]) -> Verdict:
    """A verdict without findings whose code matches one of these `fnmatch` patterns.

    What follows from an ignored finding stays, as a consequence of what that one followed from, or else as a
    cause of its own.
    """
    ignored = [f for f in verdict.findings if any(fnmatchcase(f.code, x) for x in patterns)]
    if not ignored:
        return verdict
    kept = [f for f in verdict.findings if f not in ignored]
    codes, causes = {f.code for f in kept}, {f.code: f.consequence_of for f in ignored}
    findings = sorted(
        (replace(f, consequence_of=_cause(f.consequence_of, codes, causes)) for f in kept),
        key=lambda f: (bool(f.consequence_of), RANK[f.severity]),
    )
    is_seen = verdict.status != "unknown" and bool(verdict.ruled_out or findings)
    reason = "" if is_seen else verdict.reason or "all that was found is ignored"
    status = status_of(findings, reason)
    n = len({f.code for f in ignored})
    return replace(
        verdict,
        status=status,
        primary=primary_of(findings),
        findings=tuple(findings),
        reason=reason if status == "unknown" else "",
        n_checked=max(0, verdict.n_checked - n),
        n_checks=max(0, verdict.n_checks - n),
    )


def _cause(code: str, codes: set[str], causes: dict[str, str]) -> str:
    """The nearest cause that is left, "" if none is."""
    while code and code not in codes:
        code = causes.get(code, "")
    return code
