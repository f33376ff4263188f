"""Finding and Verdict: the result of a diagnosis, as text, dict and JSON."""

import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from hookcb.core.console import printable, spelled
from hookcb.core.text import as_layer
from hookcb.diagnosis.figure import Figure
from hookcb.diagnosis.reader import ADVICE
from hookcb.processes.groups import name_ranks
from hookcb.records.printing import Printed

Severity = Literal["error", "warning", "info"]
Status = Literal["healthy", "suspect", "sick", "unknown"]

WIDTH = 100  # columns that text is wrapped to
MAX_LINES, N_OTHERS = 15, 2  # of a verdict, and findings beside the first
UNFINISHED = "train.unfinished"  # the code of a note that stands last
MIN_WIDTH, MAX_NAME_WIDTH = 20, 60  # columns
STYLES = {"error": "bold red", "warning": "bold yellow", "info": "cyan"}
STATUS_STYLES = {
    "sick": "bold red",
    "suspect": "bold yellow",
    "healthy": "bold green",
    "unknown": "bold magenta",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a training, or, with severity "info", something worth knowing.

    Attributes:
        code: name of the check, `grad.attenuated`; see `hookcb.diagnosis.fault.FAULTS`.
        severity: "error", "warning" or "info".
        layer: qualified name of the module, "" if it concerns no single one.
        param: qualified name of the parameter, "" if it concerns no single one.
        step: number of the training batch at which it was first seen, None if it concerns no batch.
        value, limit: measured number and its limit; NaN if there is none.
        message: a sentence with both.
        causes: likely causes.
        next_steps: actions to take, best first.
        consequence_of: code of the finding that this one follows from, "" if it follows from none.
        kind: type and size of the layer, `Linear 64→64`.
        last_step: number of the training batch at which it was last seen.
        ranks: ranks that found it, empty if all did.
        n_ranks: number of ranks; 0 in the verdict of one process.
        recovered: number of the batch by which an error told during the training was over, else None.
        headline: what is wrong, in plain English: "The first layers barely learn".
        figure: the numbers that the sentence is about, None if no series beyond those recorded shows them.

    >>> from hookcb import Finding
    >>> print(Finding("loss.flat", "warning", step=0, last_step=99, message="The loss has not fallen."))
    WARNING  loss.flat  steps 0–99
      The loss has not fallen.
      More: hookcb explain loss.flat
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
    ranks: tuple[int, ...] = ()
    n_ranks: int = 0
    recovered: int | None = None
    headline: str = ""
    figure: Figure | None = None

    def __post_init__(self) -> None:
        # the same NaN object everywhere, so that copies of a finding compare equal
        for name in ("value", "limit"):
            if math.isnan(getattr(self, name)):
                object.__setattr__(self, name, math.nan)

    def __eq__(self, other: object) -> bool:
        # as tuples, in which the same NaN is equal; from Python 3.13 on, a dataclass compares field by field
        return self.__reduce__() == other.__reduce__() if isinstance(other, Finding) else NotImplemented

    def __reduce__(self) -> tuple[type["Finding"], tuple[Any, ...]]:
        return Finding, tuple(getattr(self, field.name) for field in fields(self))

    @property
    def link(self) -> str:
        """Link to its check in the documentation, relative to the repository root; see `hookcb explain`."""
        return link_to(self.code)

    @property
    def head(self) -> str:
        """Severity, headline, layer or parameter, steps, ranks and code, in one line."""
        small = f"({self.code})" if self.headline else ""
        return "  ".join(filter(None, (self.severity.upper(), self.name, *self._place(), small)))

    @property
    def name(self) -> str:
        """The headline, or the code of a finding that has none."""
        return self.headline or self.code

    @property
    def summary(self) -> str:
        """Headline, layer or parameter, and ranks: "Units of a layer get no gradient: layer 2"."""
        where = _plain_text(as_layer(self.layer) or self.param)
        on = f" on {self.on_ranks}" if self.ranks else ""
        return f"{self.name}{f': {where}' if where else ''}{on}{self.past}"

    def _place(self) -> tuple[str, str, str]:
        """Layer or parameter, steps, and ranks."""
        kind = f" ({_plain_text(self.kind, 40)})" if self.kind else ""
        where = f"{_plain_text(as_layer(self.layer))}{kind}" if self.layer else _plain_text(self.param)
        return where, self.when, f"on {self.on_ranks}" if self.ranks else ""

    @property
    def on_ranks(self) -> str:
        """The ranks that found it: "rank 1 of 8"; "" if all did."""
        of = f" of {self.n_ranks}" if self.n_ranks else ""
        return f"{name_ranks(self.ranks)}{of}" if self.ranks else ""

    @property
    def when(self) -> str:
        """Its steps, and by which one it was over: "steps 1–19, recovered by 90"; "" if it concerns none."""
        is_one = self.last_step is None or self.last_step == self.step
        steps = f"step {self.step}" if is_one else f"steps {self.step}–{self.last_step}"
        return f"{'' if self.step is None else steps}{self.past}".removeprefix(", ")

    @property
    def is_slow(self) -> bool:
        """Whether it is about time only, which leaves the model as it is."""
        return self.code.startswith("time.")

    @property
    def past(self) -> str:
        """When an error that was told during the training was over: ", recovered by 90"; "" if it was not."""
        return "" if self.recovered is None else f", recovered by {self.recovered}"

    def lines(
        self, ruled_out: Sequence[str] = (), width: int = WIDTH, *, below: bool = False
    ) -> Iterator[str]:
        """The finding as text, with `ruled_out` beside the likely causes; `below` a line with its summary."""
        place = [part for part in self._place() if part]
        head = "  ".join([self.severity.upper(), *place] if place else []) if below else self.head
        yield from _filled(head, width, 2, indent="")
        yield from _filled(self.message, width)
        likely = f"Likely: {'; '.join(self.causes)}." if self.causes else ""
        others = f"Ruled out: {', '.join(ruled_out)}." if ruled_out else ""
        yield from _filled("  ".join(part for part in (likely, others) if part), width, 3)
        if self.next_steps:
            yield from _filled(f"Next: {self.next_steps[0]}.", width, 2)
        yield from _filled(f"More: hookcb explain {self.code}", width, 1)

    def __str__(self) -> str:
        return printable("\n".join(self.lines()))


@dataclass(frozen=True, slots=True)
class Gap:
    """Checks that could not run, or not completely, and why.

    >>> from hookcb.diagnosis.verdict import Gap
    >>> print(Gap(("loss.flat", "loss.spike"), "fewer than 32 batches"))
    not checked: loss.flat, loss.spike (fewer than 32 batches)
    """

    codes: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"not checked: {', '.join(self.codes)} ({self.reason})"


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Printed):
    """Result of a diagnosis.

    Attributes:
        status: "sick" if there is an error, "suspect" if there is a warning, "unknown" if nothing was seen
            that a verdict could rest on, or if there is a `hang`, else "healthy", as far as checked.
            `bool(verdict)` is True only if it is healthy, or slow and nothing else.
        primary: the finding taken to be the cause, None if there is neither an error nor a warning.
        findings: all findings, causes first.
        ruled_out: faults that were ruled out, with the numbers that rule them out.
        looked: what was inspected: numbers of batches, layers and parameters, and notes on them.
        reason: why nothing was seen, or `hang`; "" unless the status is "unknown".
        n_checked, n_checks: number of checks that could run, and of checks that apply to this training:
            without a GradScaler the check of its scale is not counted.
        gaps: checks that could not run, with the reason.
        of_rank: the only rank that it is of, if others train too: "rank 0"; "" if there is no other.
        remarks: what else limits it, for the headline: "after 200 steps".
        more: where to read the rest of what was inspected.
        hang: where the processes were when their training got no further, which it then did not; else "".

    >>> from hookcb import Diagnose, synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_logging():
    ...     learn.fit(4, cbs=Diagnose())
    >>> learn.diagnose().status
    'healthy'
    """

    status: Status
    primary: Finding | None
    findings: tuple[Finding, ...]
    ruled_out: tuple[str, ...]
    looked: tuple[str, ...]
    reason: str = ""
    n_checked: int = 0
    n_checks: int = 0
    gaps: tuple[Gap, ...] = ()
    of_rank: str = ""
    remarks: tuple[str, ...] = ()
    more: str = ADVICE["coverage"]["learner"]
    hang: str = ""

    def __bool__(self) -> bool:
        return self.status == "healthy" or self.is_slow

    @property
    def is_slow(self) -> bool:
        """Whether the only thing wrong is the time that the training takes; the model is not worse for it."""
        return self.status == "suspect" and self.primary is not None and self.primary.is_slow

    @property
    def coverage(self) -> tuple[str, ...]:
        """`looked` and `gaps` as text: what was and what could not be inspected."""
        return (*self.looked, *map(str, self.gaps))

    @property
    def headline(self) -> str:
        """Status, or SLOW, cause, number of checks that ran, and what limits the verdict, in one line."""
        hang = f"the training got no further: {self.hang}" if self.hang and self.status != "unknown" else ""
        return "; ".join(filter(None, [self._found(), *self.remarks, hang]))

    def _found(self) -> str:
        looked = f"{self.n_checked} of {self.n_checks} checks ran"
        of = f"of {self.of_rank} only: " if self.of_rank else ""
        if self.status == "unknown":
            seen = "too little" if self.ruled_out else "nothing"
            what = "the training got no further" if self.hang else f"{seen} was seen"
            return f"UNKNOWN  {of}{what}: {self.reason}"
        if self.primary is not None:
            word = "SLOW" if self.is_slow else self.status.upper()
            code = self.primary.code if self.primary.headline else ""
            small = "; ".join(filter(None, (code, looked if self.n_checks else "")))
            return f"{word}  {of}{self.primary.summary}{f' ({small})' if small else ''}"
        if self.n_checked < self.n_checks:
            return f"HEALTHY  {of}as far as checked: {looked}"
        return f"HEALTHY  {of}nothing wrong was found{f': {looked}' if self.n_checks else ''}"

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """Errors and warnings that follow from no other finding."""
        return tuple(f for f in self.findings if f.severity != "info" and not f.consequence_of)

    @property
    def consequences(self) -> tuple[Finding, ...]:
        """Findings that follow from others."""
        return tuple(finding for finding in self.findings if finding.consequence_of)

    def lines(self, width: int = WIDTH) -> list[str]:
        """The verdict as text, in at most 15 lines of at most `width` columns."""
        unfinished = [f for f in self.findings if f.code == UNFINISHED and f is not self.primary][:1]
        end = [line for f in unfinished for line in _filled(f"{f.name}: {f.message}", width, 1)]
        end += self._looked_at(width)
        if self.primary is None:
            noted = self._noted()
            first = [line for finding in noted[:1] for line in finding.lines(width=width)]
            heads = (f"{f.head}: {f.message}" for f in noted[1 : 1 + N_OTHERS])
            others = [line for head in heads for line in _filled(head, width, 2, indent="")]
            absent = f"Looked for and not found: {', '.join(self.ruled_out)}." if self.ruled_out else ""
            body = [*_filled(self.headline, width, 6 if self.hang else 3, indent=""), *first]
            body = [*body[: MAX_LINES - len(others) - len(end)], *others]
            return [*body, *_filled(absent, width, min(5, MAX_LINES - len(body) - len(end))), *end]
        lines = _filled(self.headline, width, 5 if self.hang else 2 + bool(self.remarks), indent="")
        lines += self.primary.lines(self.ruled_out[:3], width, below=True)
        if self.consequences:
            names = "; ".join(dict.fromkeys(f.summary for f in self.consequences))
            lines += _filled(f"Consequences: {names}.", width, 2)
        for other in [f for f in self.alarms if f is not self.primary][:N_OTHERS]:
            lines += _filled(f"{other.head}: {other.message}", width, 2, indent="")
        return [*lines[: MAX_LINES - len(end)], *end]

    def _noted(self) -> list[Finding]:
        """The first finding of each code, without that on the end of the training."""
        of_codes: dict[str, Finding] = {}
        for finding in self.findings:
            of_codes.setdefault(finding.code, finding)
        of_codes.pop(UNFINISHED, None)
        return [*of_codes.values()]

    def _looked_at(self, width: int) -> list[str]:
        """Numbers of what was inspected and where to read the rest, in one line below the first note."""
        if not self.coverage:
            return []
        numbers = [text.partition(" (")[0] for text in self.looked[:2]]
        notes = _filled(f"Note: {self.looked[2]}." if len(self.looked) > 2 else "", width, 1)
        texts = [*(f"Inspected: {'; '.join(numbers[:n])}. " for n in (2, 1)), ""]
        lines = (_filled(f"{text}More: {self.more}.", width, 1) for text in texts)
        return [*notes, *next((line for line in lines if not line[0].endswith("…")), [])]

    def __str__(self) -> str:
        return printable("\n".join(self.lines()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for i, line in enumerate(self.lines(min(WIDTH, max(MIN_WIDTH, options.max_width)))):
            text = Text(spelled(line, options.encoding))
            if i == 0:
                text.stylize(STATUS_STYLES[self.status], 0, line.find(" "))
            elif (word := line.split(" ", 1)[0].lower()) in STYLES:
                text.stylize(STYLES[word], 0, len(word))
            elif line.startswith("  Next:"):
                text.stylize("bold", 2, 7)
            yield text

    def to_dict(self) -> dict[str, Any]:
        """The verdict as plain values; numbers that are not finite become None."""
        state = asdict(self)
        primary = None if self.primary is None else self.findings.index(self.primary)
        pairs = zip(state["findings"], self.findings, strict=True)
        state["findings"] = [_plain(fields) | _shown(finding) for fields, finding in pairs]
        state["primary"] = None if primary is None else state["findings"][primary]
        state["gaps"] = [_plain(gap) for gap in state["gaps"]]
        return state | {
            name: list(getattr(self, name)) for name in ("ruled_out", "looked", "coverage", "remarks")
        }

    def to_json(self) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)


def link_to(code: str) -> str:
    """Link to a check in the documentation, relative to the repository root."""
    return f"docs/checks.md#{code}"


def _shown(finding: Finding) -> dict[str, Any]:
    return {"link": finding.link, "figure": None if finding.figure is None else finding.figure.to_dict()}


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(x, float) and not math.isfinite(x) else list(x) if isinstance(x, tuple) else x
        for key, x in record.items()
    }


def _plain_text(text: str, limit: int = MAX_NAME_WIDTH) -> str:
    """`text` on one line without control characters; a long name is cut to its end, which is distinctive."""
    shown = "".join(c if c.isprintable() else " " for c in text).strip()
    return shown if cell_len(shown) <= limit else f"…{shown[len(shown) - limit // 2 :]}"


def _filled(text: str, width: int, max_lines: int = 4, indent: str = "  ") -> list[str]:
    """`text` wrapped to at most `max_lines` indented lines; some characters take two of `width` columns."""
    shown = _plain_text(text, limit=10**9)
    if not shown or max_lines < 1:
        return []
    console = Console(width=width, color_system=None, file=io.StringIO())
    lines = [line.plain.rstrip() for line in Text(shown).wrap(console, width - len(indent))]
    if len(lines) > max_lines:
        last = lines[max_lines - 1]
        while cell_len(last) > width - len(indent) - 2 and " " in last:
            last = last.rpartition(" ")[0].rstrip()  # no word is cut
        whole = Text(last)
        whole.truncate(max(1, width - len(indent) - 2))
        lines = [*lines[: max_lines - 1], f"{whole.plain} …"]
    return [f"{indent}{line}" for line in lines]
