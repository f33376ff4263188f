"""For each limit of a statistical check, how far healthy trainings came and which numbers faults have."""

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
from hookcb.diagnosis.evidence import Evidence
from hookcb.diagnosis.registry import CHECKS
from hookcb.diagnosis.verdict import Finding

# Each training has limits of its own, from its own loss: what compares is the number in units of the limit.
OWN_LIMITS = frozenset({"loss.init", "loss.flat", "loss.diverging", "loss.spike"})


@dataclass(frozen=True)
class Number:
    """What a check has compared with its limit; `severity` is "" where it is ruled out."""

    code: str
    value: float
    limit: float
    severity: str = ""


@dataclass(frozen=True)
class Measured:
    """The numbers of one case with one seed; `has_learned` as of `score.Outcome`."""

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
    """Trains once, and asks each statistical check for its number."""
    watcher = Diagnose(show=False)
    run = case.train(seed, [watcher])
    came_to = outcome(case, seed, run.loop.diagnose(), run.losses)
    return Measured(case.name, seed, case.codes, tuple(numbers(watcher.evidence())), came_to.has_learned)


def numbers(evidence: Evidence) -> Iterator[Number]:
    """Of all statistical checks that can run, where the number and its limit are finite."""
    for check in CHECKS.values():
        if check.exact or not evidence.sources.issuperset(check.needs):
            continue
        for result in check.function(evidence):
            if isinstance(result, Finding):
                found = Number(result.code, result.value, result.limit, result.severity)
            else:  # Skipped has no number
                nothing = math.nan
                value, limit = getattr(result, "value", nothing), getattr(result, "limit", nothing)
                found = Number(check.code, value, limit)
            if math.isfinite(found.value) and math.isfinite(found.limit):
                yield found


def margins(measured: Sequence[Measured]) -> list[Margin]:
    """One of each code and limit, in the order of the checks; controls that have not learned are left out."""
    counted = [of for of in measured if not of.error and (of.has_learned or not of.is_control)]
    groups: dict[tuple[str, float | None], list[tuple[Measured, Number]]] = {}
    for code in (check.code for check in CHECKS.values() if not check.exact):
        for of in counted:
            for x in of.numbers:
                if x.code == code and (code not in OWN_LIMITS or x.limit > 0):
                    groups.setdefault((code, None if code in OWN_LIMITS else x.limit), []).append((of, x))
    return [_margin(code, limit, group) for (code, limit), group in groups.items()]


def _margin(code: str, limit: float | None, group: list[tuple[Measured, Number]]) -> Margin:
    is_low = _is_low([x for _, x in group])
    sign, edge = -1 if is_low else 1, 1.0 if limit is None else limit
    healthy = [(_told(x, limit), of.case, x.severity) for of, x in group if of.is_control]
    healthy.sort(key=lambda of: sign * of[0])  # the most extreme one last
    inside = [of for of in healthy if sign * of[0] <= sign * edge]
    outside = healthy[len(inside) :]
    faulty = [_told(x, limit) for of, x in group if code in of.codes and x.severity]
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
    """Whether low numbers are faulty: as of the findings, or on the other side of what is ruled out."""
    findings = [x.value < x.limit for x in group if x.severity]
    return (
        2 * sum(findings) > len(findings)
        if findings
        else 2 * sum(x.value > x.limit for x in group) > len(group)
    )


def _told(x: Number, limit: float | None) -> float:
    return x.value / x.limit if limit is None else x.value


def _short(x: float) -> float:
    return float(f"{x:.3g}")


def margin_table(of: Iterable[Margin]) -> Table:
    """What is printed of them."""
    table = Table(title="margins: numbers of healthy trainings and of faults, beside the limits of checks")
    for column in ("code", "limit", "healthy", "control", "faults", "n", "healthy, beyond the limit"):
        table.add_column(column, overflow="fold")
    for x in of:
        sign = "≥ " if x.is_low else "≤ "
        ends = [] if x.lowest is None or x.highest is None else [number(x.lowest), number(x.highest)]
        beyond = "" if x.beyond is None else f"{x.n_beyond}, to {number(x.beyond)} ({x.beyond_control})"
        table.add_row(
            x.code,
            "of each its own" if x.limit is None else number(x.limit),
            "" if x.healthy is None else sign + number(x.healthy),
            x.control,
            " – ".join(ends),
            str(x.n_faults or ""),
            beyond + (f", {x.n_alarms} false alarms" if x.n_alarms else ""),
        )
    return table


def write_margins(of: Iterable[Margin], seeds: Sequence[int], to: Path = MARGINS) -> None:
    """One line for each, so that a change is one line, too."""
    rows = ",\n".join(json.dumps(asdict(x), ensure_ascii=False, allow_nan=False) for x in of)
    to.write_text(f'{{"seeds": {json.dumps(list(seeds))}, "margins": [\n{rows}\n]}}\n', "utf-8")
