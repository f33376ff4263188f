"""NanReport: where the first number that is not finite was made, in words and as a table."""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

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


@dataclass(frozen=True, slots=True)
class NanReport:
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

    def __rich__(self) -> Group:
        head = Table.grid(padding=(0, 2, 0, 0))
        head.add_column(style="bold", no_wrap=True)
        head.add_column(overflow="fold")
        for label, text in self._lines():
            head.add_row(label, Text(text, style="red" if label == "cause" else ""))
        return Group(head, self._table()) if self.calls else Group(head)

    def _table(self) -> Table:
        what = "gradients of outputs" if self.direction == "backward" else "module calls"
        table = Table(title=f"the last {len(self.calls)} {what}, the latest at the bottom")
        table.add_column("layer", overflow="fold")
        table.add_column("type", overflow="fold")
        for column in ("min", "max", "zeros"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("not finite", style="red")
        for call in self.calls:
            numbers = f"{call.low:.3g}", f"{call.high:.3g}", f"{call.zeros:.0%}"
            table.add_row(*map(Text, [call.name, call.type, *numbers, call.nonfinite]))
        return table

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
        console.print(self)
        written: Any = console.file
        return str(written.getvalue()).rstrip()
