"""Scope: the part of a verdict that is shown to a user who ignores some findings."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from hookcb.cli.config import Config
from hookcb.cli.limits import Limit
from hookcb.diagnosis.judge import RANK, primary_of, status_of
from hookcb.diagnosis.verdict import Verdict

OF_WHOLE_RUNS = ("train.unfinished", "average.slow")  # what says nothing of a script that a limit has ended


class Scope:
    """Part of a verdict that is shown: nothing that is ignored, or that only a whole training can show.

    Args:
        ignored: codes of findings to leave out, as `fnmatch` patterns.
        config: habits of the project: findings to leave out, too.
        limit: the limit of the script.
        is_test: whether it is a test, which need not train to the end.
    """

    def __init__(self, ignored: Iterable[str], config: Config, limit: Limit, is_test: bool) -> None:
        self._ignored, self._config, self._limit, self._is_test = tuple(ignored), config, limit, is_test
        self._left_out: set[str] = set()  # patterns of the project that have left something out

    def shown(self, verdict: Verdict) -> Verdict:
        """A verdict during a training; says what is ignored, and at which step a limit has ended it."""
        reached = self._limit.reached
        ignored = [*self._ignored, *self._hits(verdict)]
        hidden = [*ignored, *(OF_WHOLE_RUNS if reached or self._is_test else ())]
        remarks = [reached, f"ignored: {', '.join(ignored)}" if ignored else ""]
        return replace(without(verdict, hidden), remarks=tuple(filter(None, remarks)))

    def last(self, verdict: Verdict) -> Verdict:
        """The last verdict on a model, as it is shown."""
        self._left_out.update(self._hits(verdict))
        return self.shown(verdict)

    def told(self, verdict: Verdict) -> Verdict:
        """A verdict that is told live, without remarks."""
        return without(verdict, [*self._ignored, *self._config.ignore])

    def note(self) -> str:
        """A sentence on what the project has left out; "" without any."""
        return self._config.note_of([x for x in self._config.ignore if x in self._left_out])

    def _hits(self, verdict: Verdict) -> list[str]:
        """Patterns of the project by which a finding is left out that the user has not ignored anyway."""
        left = without(verdict, self._ignored).findings
        return [x for x in self._config.ignore if any(fnmatchcase(f.code, x) for f in left)]


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
