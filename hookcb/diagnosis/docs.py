"""The page of all checks, docs/checks.md: `python -m hookcb.diagnosis.docs` makes it from their registry."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hookcb.diagnosis.judge import SOURCES
from hookcb.diagnosis.registry import CHECKS, Check, Site

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "checks.md"
MARGINS = CHECKOUT / "benchmarks" / "planted" / "margins.json"
COMMAND = "python -m hookcb.diagnosis.docs"

SITES = {
    Site.INPUT: "Inputs and targets",
    Site.MODULES: "Modules, in the forward",
    Site.LOSS: "Loss",
    Site.BACKWARD: "Backward",
    Site.GRADIENTS: "Gradients, before the step",
    Site.OPTIMIZER: "Optimizer",
    Site.RUN: "Course of the run: loss, time, memory",
}
INTRODUCTION = f"""# Checks

What a diagnosis looks for, in the order of the flow of a training step; what is earlier can cause what is
later. This page is made from the registry of checks, `hookcb/diagnosis/registry.py`, by
`{COMMAND}`; edit the docstring of a check rather than this page.

An exact check looks for something that is wrong by itself. A statistical one compares a number with a limit;
it has a margin: how far healthy trainings came, and which numbers planted faults have. Margins are measured
on `benchmarks/planted`, with `python benchmarks/planted --margins`; a limit without such a line has led
to a finding in none of its trainings."""


@dataclass(frozen=True)
class Margin:
    """How far apart healthy and faulty trainings are, in a number that a check compares with a limit.

    Attributes:
        code: of the finding.
        limit: what the number may be; None where each training has its own, and numbers are in units of it.
        is_low: whether low numbers are faulty.
        healthy, control: the number of a healthy training on its side of the limit that is nearest to it, and
            which that is; None and "" where there is none.
        n_beyond, beyond, beyond_control: how many healthy trainings are beyond the limit, and which most.
        n_alarms: in how many of these there is an error or a warning all the same.
        lowest, highest, n_faults: of the faults it was found in that it is a name of.
    """

    code: str
    limit: float | None
    is_low: bool
    healthy: float | None = None
    control: str = ""
    n_beyond: int = 0
    beyond: float | None = None
    beyond_control: str = ""
    n_alarms: int = 0
    lowest: float | None = None
    highest: float | None = None
    n_faults: int = 0

    def __str__(self) -> str:
        to, unit = "down to" if self.is_low else "up to", "" if self.limit is not None else " times the limit"
        healthy = "of no healthy training known"
        if self.healthy is not None:
            healthy = f"healthy {to} {number(self.healthy)}{unit} ({self.control})"
        faults = "no planted fault has it"
        if self.lowest is not None and self.highest is not None:
            ends = dict.fromkeys((number(self.lowest), number(self.highest)))
            faults = f"faults {'from ' if len(ends) > 1 else 'at '}{' to '.join(ends)}{unit}"
        limit = "" if self.limit is None else f"; limit {number(self.limit)}"
        return f"{healthy}, {faults}{limit}.{self._told_beyond(to, unit)}"

    def _told_beyond(self, to: str, unit: str) -> str:
        if self.beyond is None:
            return ""
        alarms = f"; {self.n_alarms} of them with a false alarm" if self.n_alarms else ""
        own = f" {self.n_beyond} healthy training{'s are' if self.n_beyond > 1 else ' is'} beyond the limit"
        least = f", {to} {number(self.beyond)}{unit} ({self.beyond_control})"
        return f"{own}{least}, where another condition of the check decides, or it is a note{alarms}."


def number(x: float) -> str:
    """Of two digits, to read: "0.44", "3e-04", "1,000"."""
    return f"{x:,.0f}" if 100 <= abs(x) < 1e7 else f"{x:.2g}"


def document(margins: Iterable[Margin] = ()) -> str:
    """The page in Markdown: all checks by site, with what is known of their margins."""
    of_code: dict[str, list[Margin]] = {}
    for margin in margins:
        of_code.setdefault(margin.code, []).append(margin)
    parts = [INTRODUCTION, _overview()]
    for site, title in SITES.items():
        parts.append(f"## {title}")
        parts += [_section(check, of_code) for check in CHECKS.values() if check.site == site]
    return "\n\n".join(parts) + "\n"


def _overview() -> str:
    rows = ["| code | | what it looks for |", "|---|---|---|"]
    for check in sorted(CHECKS.values(), key=lambda check: check.site):
        code, what = f"`{check.code}`", _first_sentence(check).replace("|", "\\|")
        rows.append(f"| {code} | {_kind(check)} | {what} |")
    return "\n".join(rows)


def _first_sentence(check: Check) -> str:
    return " ".join(check.doc.partition("\n\n")[0].split())


def _section(check: Check, margins: dict[str, list[Margin]]) -> str:
    parts = [f"### `{check.code}`", f"{_kind(check).capitalize()}. Needs {_needs(check)}.", check.doc]
    if not check.exact:
        parts.append("\n".join(_margin_lines(check, margins)))
    if check.leads_to:
        parts.append(f"May lead to: {_listed(check.leads_to)}.")
    return "\n\n".join(parts)


def _margin_lines(check: Check, margins: dict[str, list[Margin]]) -> Iterator[str]:
    known = margins.get(check.code, [])
    if not known:
        yield "Margin: not measured."
    for margin in known:
        yield f"{'- ' if len(known) > 1 else ''}Margin: {margin}"


def _kind(check: Check) -> str:
    return "exact" if check.exact else "statistical"


def _needs(check: Check) -> str:
    return " and ".join(dict.fromkeys(SOURCES[need] for need in check.needs))


def _listed(codes: Sequence[str]) -> str:
    return ", ".join(f"`{code}`" for code in codes)


def read_margins(path: Path = MARGINS) -> list[Margin]:
    """What was measured, none where there is no such file, as without a checkout."""
    return [Margin(**row) for row in json.loads(path.read_text("utf-8"))["margins"]] if path.exists() else []


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page, or tells whether it is current: exit code 1 where it is not."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, tell whether it is current")
    args = parser.parse_args(argv)
    text = document(read_margins())
    if not args.check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, "utf-8")
    elif not PAGE.exists() or PAGE.read_text("utf-8") != text:
        sys.stderr.write(f"{PAGE} is not current; run {COMMAND}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
