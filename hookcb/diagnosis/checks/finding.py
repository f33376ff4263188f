"""Functions that checks share: one makes a finding, with its layer and steps; one asks another check."""

import math
from collections.abc import Callable, Iterator

from hookcb.diagnosis.fault import Result
from hookcb.diagnosis.run import Layer, Param, Run, Series
from hookcb.diagnosis.trends import Span
from hookcb.diagnosis.verdict import Finding, Severity

When = Span | Series | int | tuple[int | None, int | None]


def finding(
    code: str,
    severity: Severity,
    *,
    at: Layer | Param | str | None = None,
    when: When = (None, None),
    value: float = math.nan,
    limit: float = math.nan,
    message: str,
    causes: tuple[str, ...] = (),
    next_steps: tuple[str, ...] = (),
) -> Finding:
    """Finding of a check; see `Finding` for the arguments that are passed through.

    `at` is the layer or parameter, or the name of a layer if nothing else is known. `when` gives the first
    and last step, as a run of records, a whole series, two steps, or a single one.
    """
    layer, param, kind = _place(at)
    first, last = _steps(when)
    return Finding(
        code, severity, layer, param, first, value, limit, message, causes, next_steps, "", kind, last
    )


def findings_of(check: Callable[[Run], Iterator[Result]], evidence: Run) -> list[Finding]:
    """Findings of another check, on which one depends."""
    return [result for result in check(evidence) if isinstance(result, Finding)]


def _place(at: Layer | Param | str | None) -> tuple[str, str, str]:
    """Names of the layer and of the parameter, and the layer's type with its sizes."""
    if isinstance(at, Param):
        return at.layer, at.name, at.about
    if isinstance(at, Layer):
        return at.name, "", at.about
    return at or "", "", ""


def _steps(when: When) -> tuple[int | None, int | None]:
    if isinstance(when, Span):
        return when.first, when.last
    if isinstance(when, Series):
        return when.steps[0], when.steps[-1]
    return (when, when) if isinstance(when, int) else when
