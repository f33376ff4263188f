"""A verdict without the findings that a user ignores."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from hookcb.diagnosis.judge import RANK
from hookcb.diagnosis.verdict import Status, Verdict


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
    primary = next((f for f in findings if f.severity != "info" and not f.consequence_of), None)
    is_seen = bool(verdict.ruled_out or findings)
    status: Status = "unknown" if verdict.status == "unknown" or not is_seen else "healthy"
    if primary is not None:
        status = "sick" if primary.severity == "error" else "suspect"
    n = len({f.code for f in ignored})
    return replace(
        verdict,
        status=status,
        primary=primary,
        findings=tuple(findings),
        reason=(verdict.reason or "all that was found is ignored") if status == "unknown" else "",
        n_checked=max(0, verdict.n_checked - n),
        n_checks=max(0, verdict.n_checks - n),
    )


def _cause(code: str, codes: set[str], causes: dict[str, str]) -> str:
    """The nearest cause that is left, "" if none is."""
    while code and code not in codes:
        code = causes.get(code, "")
    return code
