"""NanReport: where the first number that is not finite was made, in words and as a table."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from hookcb.core.console import as_text
from hookcb.records.tables import Column, fitted

LOSS, MODEL, BATCH = "the loss function", "the model itself", "the batch"  # what `where` may say but a name

# what made it, by operation, and what to do
_MASKED = "a row of -inf only has no softmax: let each query see a key, or mask with -1e9"
_BY_ZERO = "a division by 0: add a small number to the divisor"
_ROOT = "the slope of a root at 0 is infinite: add a small number under the root"
_SPREAD = "the spread of one element: have 2 or more, or pass correction=0"
_LOG = "a logarithm of 0 or less: clamp its input, x.clamp(min=1e-8)"
_LARGE = "an overflow: numbers have grown too large; lower the learning rate, clip gradients, or normalise"
_EDGE = "outside of [-1, 1], or with its slope at the ends: clamp the input to within"
HINTS = {
    "log_softmax": _MASKED,
    "_log_softmax": _MASKED,
    "softmax": _MASKED,
    "_softmax": _MASKED,
    "_safe_softmax": _MASKED,
    "log": _LOG,
    "log2": _LOG,
    "log10": _LOG,
    "log1p": "a logarithm of 0 or less: clamp its input, x.clamp(min=-1 + 1e-6)",
    "div": _BY_ZERO,
    "reciprocal": _BY_ZERO,
    "sqrt": "a root of a negative number: clamp its input, x.clamp(min=0)",
    "rsqrt": "1 / root of 0 or less: add a small number under the root",
    "exp": "an overflow, above exp(88.7) in float32 and exp(11) in float16: subtract the largest first",
    "std": _SPREAD,
    "var": _SPREAD,
    **dict.fromkeys(
        ("mse_loss", "mul", "pow", "square", "sum", "mean", "mm", "bmm", "addmm", "convolution"), _LARGE
    ),
    "acos": _EDGE,
    "asin": _EDGE,
    "_to_copy": "too large for the dtype it is cast to, float16 ends at 65,504: use bfloat16",
    "SqrtBackward": _ROOT,
    "PowBackward": "the slope of this power is infinite at 0: add a small number to its base",
    "LinalgVectorNormBackward": "the slope of this norm: add a small number to what is under it",
    "DivBackward": _BY_ZERO,
    "LogBackward": "the slope of a logarithm at 0 is infinite: clamp its input, x.clamp(min=1e-8)",
    "AcosBackward": _EDGE,
    "AsinBackward": _EDGE,
    "StdBackward": "the spread of equal elements: add a small number to their variance, then take its root",
}


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module in the replay: what it put out, or the gradient that came to its output.

    Attributes:
        name: of the module, `fc#1` for the second call of several; with the path in a nested output.
        type: of the module.
        low, high: smallest and largest finite element; NaN where there is none.
        zeros: share of exact zeros, 0..1; NaN where there is no number.
        nans, infs: number of NaN and of infinite elements.
    """

    name: str
    type: str
    low: float
    high: float
    zeros: float
    nans: int
    infs: int

    @property
    def nonfinite(self) -> str:
        """What of it is not finite: "", "3 NaN", "2 inf", "3 NaN 2 inf"."""
        return " ".join(f"{n} {what}" for n, what in ((self.nans, "NaN"), (self.infs, "inf")) if n)


COLUMNS: tuple[Column[Any], ...] = (
    Column("type", lambda call: call.type, 4, is_text=True),
    Column("min", lambda call: f"{call.low:.3g}", 2),
    Column("max", lambda call: f"{call.high:.3g}", 1),
    Column("zeros", lambda call: f"{call.zeros:.0%}", 3),
    Column("not finite", lambda call: call.nonfinite, is_text=True, style="red"),
)


@dataclass(frozen=True, slots=True)
class NanReport(JupyterMixin):
    """What `NanTrace` has found.

    Attributes:
        where: name of the module that made it, `fc#1` for the second call of several; "the model itself",
            "the loss function", "the batch"; "" where it did not repeat.
        type: of that module or function, "" for the batch.
        direction: "forward", "backward" or "not repeated".
        epoch, batch: counted from 0.
        noticed: what was seen in training, "loss is nan" or "gradient of fc.weight not finite".
        op: the operation, `log`, or the node of the graph, `SqrtBackward0`; "" where it is not known.
        line: `file:line` of the user's code that ran it, or called the module; "" where there is none.
        code: the text of that line.
        calls: the last calls up to the culprit's; of gradients in the order of the backward.
        notes: what else was seen, a sentence each.
        bundle: where the reproduction bundle was written, or "".
    """

    where: str
    type: str
    direction: str
    epoch: int
    batch: int
    noticed: str
    op: str = ""
    line: str = ""
    code: str = ""
    calls: tuple[ModuleCall, ...] = ()
    notes: tuple[str, ...] = ()
    bundle: str = ""

    @property
    def repeated(self) -> bool:
        """Whether the replay of the batch failed too."""
        return self.direction != "not repeated"

    @property
    def position(self) -> str:
        """Where in the training it was."""
        return f"epoch {self.epoch}, batch {self.batch}"

    @property
    def summary(self) -> str:
        """The report in one line."""
        return f"{self.noticed} at {self.position}: {self._cause}"

    @property
    def hint(self) -> str:
        """What the operation tells of the cause, and what to do; "" where that is not known."""
        return HINTS.get(re.sub(r"(?<=Backward)\d+$|_$", "", self.op), "")

    @property
    def _cause(self) -> str:
        if not self.repeated:
            return "it did not repeat when the batch was replayed"
        if self.where == BATCH:
            return "it is in the batch"
        kind = f" ({self.type})" if self.type else ""
        by = f" by {self.op}" if self.op else ""
        at = f" at {self.line}" if self.line else ""
        return f"made in the {self.direction} of {self.where}{kind}{by}{at}"

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield "noticed", f"{self.noticed} at {self.position}"
        yield "cause", self._cause
        if self.code:
            yield "code", self.code
        if self.hint:
            yield "likely", self.hint
        for note in self.notes:
            yield "note", note
        if self.bundle:
            yield "bundle", self.bundle

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = Table.grid(padding=(0, 2, 0, 0))
        head.add_column(style="bold", no_wrap=True)
        head.add_column(overflow="fold")
        for label, text in self._lines():
            head.add_row(label, Text(text, style="red" if label == "cause" else ""))
        yield head
        if self.calls:
            yield self._table(options)

    def __str__(self) -> str:
        return as_text(self)

    def _table(self, options: ConsoleOptions) -> Table:
        what = "gradients of outputs" if self.direction == "backward" else "module calls"
        title = f"the last {len(self.calls)} {what}, the latest at the bottom"
        return fitted(self.calls, [call.name for call in self.calls], COLUMNS, options, title=title)
