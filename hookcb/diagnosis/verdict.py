"""Finding and Verdict: what a diagnosis says, in words, as text, dict and JSON."""

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from hookcb.printed import Printed

Severity = Literal["error", "warning", "info"]
Status = Literal["healthy", "suspect", "sick"]

WIDTH = 100  # columns that the text is filled to
MOST_LINES = 15
NOT_CHECKED = "not checked: "  # begins what is left out of the text
STYLES = {"error": "bold red", "warning": "bold yellow", "info": "cyan"}
STATUS_STYLES = {"sick": "bold red", "suspect": "bold yellow", "healthy": "bold green"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a training, or, as info, something to know.

    Attributes:
        code: what it is, `grad.attenuated`; see `hookcb.diagnosis.registry.CHECKS`.
        severity: "error", "warning" or "info".
        layer: qualified name of the module, "" where it is of none.
        param: qualified name of the parameter, "" where it is of none.
        step: number of the training batch at which it was first seen, None where it is of no single one.
        value, limit: the number that tells, and what it may be; NaN where there is none.
        message: a sentence with both.
        causes: what is likely behind it.
        next_steps: what to do, what is worth trying first at the beginning.
        consequence_of: code of the finding that this one follows from, "" where it stands by itself.
        kind: type and size of the layer, `Linear 64→64`.
        last_step: at which it was last seen.
    """

    code: str
    severity: Severity
    layer: str = ""
    param: str = ""
    step: int | None = None
    value: float = math.nan
    limit: float = math.nan
    message: str = ""
    causes: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    consequence_of: str = ""
    kind: str = ""
    last_step: int | None = None

    @property
    def head(self) -> str:
        """Severity, code, where and when."""
        kind = f" ({self.kind})" if self.kind else ""
        where = f"{self.layer}{kind}" if self.layer else self.param
        return "  ".join(part for part in (self.severity.upper(), self.code, where, self._when) if part)

    @property
    def _when(self) -> str:
        if self.step is None:
            return ""
        is_one = self.last_step is None or self.last_step == self.step
        return f"step {self.step}" if is_one else f"steps {self.step}–{self.last_step}"

    def lines(self, ruled_out: Sequence[str] = ()) -> Iterator[str]:
        """The finding as text; `ruled_out` is said beside the likely causes."""
        yield self.head
        yield from _filled(self.message)
        likely = f"Likely: {'; '.join(self.causes)}." if self.causes else ""
        others = f"Ruled out: {', '.join(ruled_out)}." if ruled_out else ""
        yield from _filled("  ".join(part for part in (likely, others) if part))
        if self.next_steps:
            yield from _filled(f"Next: {self.next_steps[0]}.")

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Printed):
    """What a diagnosis comes to.

    Attributes:
        status: "healthy"; "suspect" where there is a warning; "sick" where there is an error.
        primary: the finding taken for the cause, None where the training is healthy.
        findings: all of them, causes first.
        ruled_out: what was checked and is fine, with the number that says so.
        coverage: what was looked at, and what could not be.

    >>> from hookcb import Diagnose, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(4, cbs=Diagnose(quiet=True))
    >>> learn.diagnose().status
    'healthy'
    """

    status: Status
    primary: Finding | None
    findings: tuple[Finding, ...]
    ruled_out: tuple[str, ...]
    coverage: tuple[str, ...]

    @property
    def consequences(self) -> tuple[Finding, ...]:
        """The findings that follow from others."""
        return tuple(finding for finding in self.findings if finding.consequence_of)

    def lines(self) -> list[str]:
        """The verdict as text, at most 15 lines of at most 100 columns."""
        if self.primary is None:
            fine = f"Looked for and not found: {', '.join(self.ruled_out)}." if self.ruled_out else ""
            notes = [line for finding in self.findings[:2] for line in finding.lines()]
            body = [*notes, *_filled(fine)]
            return self._ended(["HEALTHY  nothing wrong was found", *body])
        others = [f for f in self.findings if f is not self.primary and not f.consequence_of]
        lines = [f"{self.status.upper()}  {_summary(self.primary)}"]
        lines += self.primary.lines(self.ruled_out[:3])
        if told := self.consequences:
            lines += _filled(f"Follows from it: {', '.join(dict.fromkeys(map(_short, told)))}.", most=2)
        for other in [f for f in others if f.severity != "info"][:2]:
            lines += [other.head, *_filled(other.message, most=1)]
        return self._ended(lines)

    def _ended(self, lines: list[str]) -> list[str]:
        told = [text for text in self.coverage if not text.startswith(NOT_CHECKED)]
        gaps = len(self.coverage) - len(told)
        more = f"; {gaps} reasons why something was not checked are in .coverage" if gaps else ""
        coverage = _filled(f"Looked at: {'; '.join(told)}{more}.", most=2) if self.coverage else []
        return [*lines[: MOST_LINES - len(coverage)], *coverage]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for i, line in enumerate(self.lines()):
            text = Text(line)
            if i == 0:
                text.stylize(STATUS_STYLES[self.status], 0, len(self.status))
            elif (word := line.split(" ", 1)[0].lower()) in STYLES:
                text.stylize(STYLES[word], 0, len(word))
            elif line.startswith("  Next:"):
                text.stylize("bold", 2, 7)
            yield text

    def to_dict(self) -> dict[str, Any]:
        """Plain values only; numbers that are not finite are None."""
        state = asdict(self)
        primary = None if self.primary is None else self.findings.index(self.primary)
        state["findings"] = [_plain(finding) for finding in state["findings"]]
        state["primary"] = None if primary is None else state["findings"][primary]
        return state | {"ruled_out": list(self.ruled_out), "coverage": list(self.coverage)}

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)


def _plain(finding: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(x, float) and not math.isfinite(x) else list(x) if isinstance(x, tuple) else x
        for key, x in finding.items()
    }


def _summary(finding: Finding) -> str:
    where = finding.layer or finding.param
    return f"{finding.code}{f' in {where}' if where else ''}"


def _short(finding: Finding) -> str:
    return " ".join(part for part in (finding.code, finding.layer or finding.param) if part)


def _filled(text: str, most: int = 4) -> list[str]:
    """`text` in lines that are indented by two."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        max_lines=most,
        placeholder=" …",
        break_on_hyphens=False,
    )
