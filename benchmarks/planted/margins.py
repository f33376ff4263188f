"""Margins of all statistical checks, measured on healthy runs and planted faults."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from case import Case
from margin import MARGINS, Margin, number
from rich.table import Table
from score import ALARMS, outcome

from hookcb import Diagnose
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Finding

# Each run has its own limit, which depends on its loss, so numbers are compared in units of the limit.
OWN_LIMITS = frozenset({"loss.init", "loss.flat", "loss.diverging", "loss.spike"})


@dataclass(frozen=True)
class Number:
    """A number that a check compared with its limit; `severity` is "" if the fault is ruled out."""

    code: str
    value: float
    limit: float
    severity: str = ""


@dataclass(frozen=True)
class Measured:
    """The numbers of one case with one seed; for `has_learned`, see `score.Outcome`."""

    case: str
    seed: int
    codes: frozenset[str]
    numbers: tuple[Number, ...] = ()
    has_learned: bool = True
    error: str = ""

    @property
    def is_control(self) -> bool:
        """Whether nothing was planted."""
        return not self.codes


def measure(case: Case, seed: int) -> Measured:
    """Train once, and collect the number of each statistical check."""
    watcher = Diagnose(show=False)
    run = case.train(seed, [watcher])
    has_learned = outcome(case, seed, run.loop.diagnose(), run.losses).has_learned
    return Measured(case.name, seed, case.codes, tuple(numbers(watcher.evidence())), has_learned)


def numbers(evidence: Run) -> Iterator[Number]:
    """Numbers of all statistical checks that can run, if the number and its limit are finite."""
    for check in FAULTS.values():
        if check.exact or not evidence.sources.issuperset(check.needs):
            continue
        for result in evidence.measured(check).findings(evidence):
            if isinstance(result, Finding):
                compared = Number(result.code, result.value, result.limit, result.severity)
            else:  # Skipped has no number
                nothing = math.nan
                value, limit = getattr(result, "value", nothing), getattr(result, "limit", nothing)
                compared = Number(check.code, value, limit)
            if math.isfinite(compared.value) and math.isfinite(compared.limit):
                yield compared


def margins(measured: Sequence[Measured]) -> list[Margin]:
    """One margin per code and limit, in the order of the checks; controls must have learned to count."""
    counted = [case for case in measured if not case.error and (case.has_learned or not case.is_control)]
    groups: dict[tuple[str, float | None], list[tuple[Measured, Number]]] = {}
    for code in (check.code for check in FAULTS.values() if not check.exact):
        for case in counted:
            for x in case.numbers:
                if x.code == code and (code not in OWN_LIMITS or x.limit > 0):
                    groups.setdefault((code, None if code in OWN_LIMITS else x.limit), []).append((case, x))
    return [_margin(code, limit, group) for (code, limit), group in groups.items()]


def _margin(code: str, limit: float | None, group: list[tuple[Measured, Number]]) -> Margin:
    is_low = _is_low([x for _, x in group])
    sign, edge = -1 if is_low else 1, 1.0 if limit is None else limit
    healthy = [(_scaled(x, limit), entry.case, x.severity) for entry, x in group if entry.is_control]
    healthy.sort(key=lambda entry: sign * entry[0])  # the most extreme one last
    inside = [entry for entry in healthy if sign * entry[0] <= sign * edge]
    outside = healthy[len(inside) :]
    faulty = [_scaled(x, limit) for entry, x in group if code in entry.codes and x.severity]
    return Margin(
        code,
        limit,
        is_low,
        healthy=_short(inside[-1][0]) if inside else None,
        control=inside[-1][1] if inside else "",
        n_beyond=len(outside),
        beyond=_short(outside[-1][0]) if outside else None,
        beyond_control=outside[-1][1] if outside else "",
        n_alarms=sum(severity in ALARMS for *_, severity in outside),
        lowest=_short(min(faulty)) if faulty else None,
        highest=_short(max(faulty)) if faulty else None,
        n_faults=len(faulty),
    )


def _is_low(group: Sequence[Number]) -> bool:
    """Whether low numbers are faulty, judged by the findings, or else by the numbers that were ruled out."""
    findings = [x.value < x.limit for x in group if x.severity]
    return (
        2 * sum(findings) > len(findings)
        if findings
        else 2 * sum(x.value > x.limit for x in group) > len(group)
    )


def _scaled(x: Number, limit: float | None) -> float:
    return x.value / x.limit if limit is None else x.value


def _short(x: float) -> float:
    return float(f"{x:.3g}")


def margin_table(entries: Iterable[Margin]) -> Table:
    """Table of the margins, to print."""
    table = Table(
        title="margins: numbers of healthy runs and of faults, compared with the limits of the checks"
    )
    for column in ("code", "limit", "healthy", "control", "faults", "n", "healthy, beyond the limit"):
        table.add_column(column, overflow="fold")
    for x in entries:
        sign = "≥ " if x.is_low else "≤ "
        ends = [] if x.lowest is None or x.highest is None else [number(x.lowest), number(x.highest)]
        beyond = "" if x.beyond is None else f"{x.n_beyond}, to {number(x.beyond)} ({x.beyond_control})"
        table.add_row(
            x.code,
            "differs per run" if x.limit is None else number(x.limit),
            "" if x.healthy is None else sign + number(x.healthy),
            x.control,
            " – ".join(ends),
            str(x.n_faults or ""),
            beyond + (f", {x.n_alarms} false alarms" if x.n_alarms else ""),
        )
    return table


def write_margins(entries: Iterable[Margin], seeds: Sequence[int], to: Path = MARGINS) -> None:
    """Write one line per margin, so that a change is one line, too."""
    rows = ",\n".join(json.dumps(asdict(x), ensure_ascii=False, allow_nan=False) for x in entries)
    to.write_text(f'{{"seeds": {json.dumps(list(seeds))}, "margins": [\n{rows}\n]}}\n', "utf-8")
