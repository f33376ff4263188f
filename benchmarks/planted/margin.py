"""Measured margin of a check: the distance of healthy and faulty training runs from its limit."""

import json
from dataclasses import dataclass
from pathlib import Path

MARGINS = Path(__file__).with_name("margins.json")


@dataclass(frozen=True)
class Margin:
    """Distance between healthy and faulty training runs, in a number that a check compares with a limit.

    Attributes:
        code: code of the finding.
        limit: limit of the check; None if each run has its own, and numbers are in units of it.
        is_low: whether low numbers are faulty.
        healthy, control: number of the healthy run that is nearest to the limit on its healthy side, and the
            run's name; None and "" if there is none.
        n_beyond, beyond, beyond_control: count of healthy runs beyond the limit, and the furthest of them.
        n_alarms: how many of these still have an error or a warning.
        lowest, highest, n_faults: numbers of the planted faults that this code names and was found in.
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
        healthy = "no healthy run known"
        if self.healthy is not None:
            healthy = f"healthy {to} {number(self.healthy)}{unit} ({self.control})"
        faults = "no planted fault has it"
        if self.lowest is not None and self.highest is not None:
            ends = dict.fromkeys((number(self.lowest), number(self.highest)))
            faults = f"faults {'from ' if len(ends) > 1 else 'at '}{' to '.join(ends)}{unit}"
        limit = "" if self.limit is None else f"; limit {number(self.limit)}"
        return f"{healthy}, {faults}{limit}.{self._describe_beyond(to, unit)}"

    def _describe_beyond(self, to: str, unit: str) -> str:
        if self.beyond is None:
            return ""
        alarms = f"; {self.n_alarms} of them with a false alarm" if self.n_alarms else ""
        count = f" {self.n_beyond} healthy run{'s are' if self.n_beyond > 1 else ' is'} beyond the limit"
        furthest = f", {to} {number(self.beyond)}{unit} ({self.beyond_control})"
        return (
            f"{count}{furthest}; there another condition of the check decides, or it is only a note{alarms}."
        )


def number(x: float) -> str:
    """Number as text with two significant digits: "0.44", "3e-04", "1,000"."""
    return f"{x:,.0f}" if 100 <= abs(x) < 1e7 else f"{x:.2g}"


def read_margins(path: Path = MARGINS) -> list[Margin]:
    """Measured margins; empty if the file does not exist."""
    return [Margin(**row) for row in json.loads(path.read_text("utf-8"))["margins"]] if path.exists() else []
