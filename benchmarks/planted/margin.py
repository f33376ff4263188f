"""Margin of a check: how far healthy and faulty trainings are from its limit, as it was measured."""

import json
from dataclasses import dataclass
from pathlib import Path

MARGINS = Path(__file__).with_name("margins.json")


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


def read_margins(path: Path = MARGINS) -> list[Margin]:
    """What was measured, none if there is no such file."""
    return [Margin(**row) for row in json.loads(path.read_text("utf-8"))["margins"]] if path.exists() else []
