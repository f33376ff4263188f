"""NanReport: the origin of the first nonfinite number, as text and table."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hookcb.core.text import as_layer
from hookcb.records.printing import Printed
from hookcb.records.tables import Column, fitted

LOSS, MODEL, BATCH = "the loss function", "the model itself", "the batch"  # values of `where` besides names

# likely cause and remedy, by operation
_MASKED = "a row of only -inf has no softmax: let each query see a key, or mask with -1e9"
_BY_ZERO = "a division by 0: add a small number to the divisor"
_ROOT = "the gradient of a root at 0 is infinite: add a small number under the root"
_SPREAD = "the standard deviation of one element: use 2 or more, or pass correction=0"
_LOG = "a logarithm of 0 or less: clamp its input, x.clamp(min=1e-8)"
_LARGE = "an overflow: numbers have grown too large; lower the learning rate, clip gradients, or normalize"
_EDGE = "an input outside [-1, 1], or at its ends, where the gradient is infinite: clamp the input"
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
    "exp": "an overflow, above exp(88.7) in float32 and exp(11) in float16: subtract the maximum first",
    "std": _SPREAD,
    "var": _SPREAD,
    **dict.fromkeys(
        ("mse_loss", "mul", "pow", "square", "sum", "mean", "mm", "bmm", "addmm", "convolution"), _LARGE
    ),
    "acos": _EDGE,
    "asin": _EDGE,
    "_to_copy": "too large for the dtype of the cast, float16 ends at 65,504: use bfloat16",
    "SqrtBackward": _ROOT,
    "PowBackward": "the gradient of this power is infinite at 0: add a small number to its base",
    "LinalgVectorNormBackward": "the gradient of this norm is infinite at 0: add a small number to its input",
    "DivBackward": _BY_ZERO,
    "LogBackward": "the gradient of a logarithm at 0 is infinite: clamp its input, x.clamp(min=1e-8)",
    "AcosBackward": _EDGE,
    "AsinBackward": _EDGE,
    "StdBackward": "the standard deviation of equal elements: add a small number to their variance first",
}


def hint_for(op: str) -> str:
    """Likely cause and remedy for an operation, or the node of a graph; "" if unknown."""
    return HINTS.get(re.sub(r"(?<=Backward)\d+$|_$", "", op), "")


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module in the replay: statistics of its output, or of the gradient of its output.

    Attributes:
        name: name of the module, `fc#1` for the second of several calls; with the path in a nested output.
        type: class of the module.
        low, high: smallest and largest finite element; NaN if there is none.
        zeros: share of exact zeros, 0..1; NaN if no element is finite.
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
        """Numbers of NaN and infinite elements as text: "", "3 NaN", "2 inf", "3 NaN 2 inf"."""
        return " ".join(f"{n} {what}" for n, what in ((self.nans, "NaN"), (self.infs, "inf")) if n)


COLUMNS: tuple[Column[Any], ...] = (
    Column("type", lambda call: call.type, 4, is_text=True),
    Column("min", lambda call: f"{call.low:.3g}", 2),
    Column("max", lambda call: f"{call.high:.3g}", 1),
    Column("zeros", lambda call: "" if math.isnan(call.zeros) else f"{call.zeros:.0%}", 3),
    Column("nonfinite", lambda call: call.nonfinite, is_text=True, style="red"),
)


@dataclass(frozen=True, slots=True)
class NanReport(Printed):
    """Result of `NanTrace`.

    Attributes:
        where: name of the module that made it, `fc#1` for the second of several calls; "the model itself",
            "the loss function", "the batch"; "" if it did not repeat.
        type: class of that module, or name of the loss function; "" for the batch.
        direction: "forward", "backward" or "not repeated".
        epoch, batch: indices from 0.
        noticed: symptom in training, "loss is nan" or "gradient of fc.weight not finite".
        op: the operation, `log`, or the node of the graph, `SqrtBackward0`; "" if unknown.
        line: `file:line` of the user's code that ran it or called the module; "" if unknown.
        code: text of that line.
        calls: the last calls up to the culprit; for gradients in the order of the backward.
        notes: further observations, a sentence each.
        bundle: path of the reproduction bundle, or "".
        rank: the rank that has found it; None in a training with one process.
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
    rank: int | None = None

    @property
    def repeated(self) -> bool:
        """Whether the replay of the batch had a nonfinite number too."""
        return self.direction != "not repeated"

    @property
    def position(self) -> str:
        """Epoch, batch and rank."""
        on = "" if self.rank is None else f" on rank {self.rank}"
        return f"epoch {self.epoch}, batch {self.batch}{on}"

    @property
    def summary(self) -> str:
        """The report in one line."""
        return f"{self.noticed} at {self.position}: {self._cause}"

    @property
    def hint(self) -> str:
        """Likely cause and remedy for the operation; "" if unknown."""
        return hint_for(self.op)

    @property
    def _cause(self) -> str:
        if not self.repeated:
            return "it did not repeat when the batch was replayed"
        if self.where == BATCH:
            return "it is in the batch"
        kind = f" ({self.type})" if self.type else ""
        by = f" by {self.op}" if self.op else ""
        at = f" at {self.line}" if self.line else ""
        return f"made in the {self.direction} of {as_layer(self.where)}{kind}{by}{at}"

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

    def _table(self, options: ConsoleOptions) -> Table:
        what = "gradients of outputs" if self.direction == "backward" else "module calls"
        title = f"the last {len(self.calls)} {what}, the latest at the bottom"
        return fitted(self.calls, [call.name for call in self.calls], COLUMNS, options, title=title)
