"""Summary of a model, layer by layer: parameters, output shapes, multiply-adds, bytes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from torch import Tensor, nn

from hookcb.core.arguments import check_count, hinted
from hookcb.core.console import as_text
from hookcb.core.loop import Loop
from hookcb.core.text import as_layer, format_bytes, join_names, name_of, short_number
from hookcb.core.torch_private import is_flattened
from hookcb.hooks.coverage import NOT_CALLED
from hookcb.hooks.dry_run import sample_inputs
from hookcb.hooks.forward_trace import LayerRow, n_bytes, trace_forward
from hookcb.records.printing import html_table
from hookcb.records.tables import Column, fitted

HEAD = ("layer", "type", "output", "params", "trained", "mult-adds")
RANKS = (1, 2, 0, 3, 4)  # of all columns but the names: the highest is left out first in a narrow terminal
COLUMNS: list[Column[Any]] = [
    Column(HEAD[i], itemgetter(i), rank, is_text=i < 3) for i, rank in enumerate(RANKS, start=1)
]


class LayerInfo(NamedTuple):
    """A layer, with its parameters and the shape of its output."""

    type: str
    params: int
    trainable: bool | str
    shape: Any
    same: bool


@dataclass(frozen=True, repr=False, eq=False)
class Summary:
    """A model's modules as rows, and their totals; prints as a table.

    Attributes:
        rows: a row for each module down to the requested depth, in the order of `named_modules()`.
        n_params, n_trainable, n_buffers: number of elements, each parameter and buffer counted once.
        param_bytes, buffer_bytes: size of all parameters and all buffers.
        activation_bytes: size of the outputs of all calls in which no other module is called, for this input.
        multiply_adds: number for this input, two floating-point operations each. Source:
            `torch.utils.flop_counter`, which counts only matrix products, convolutions and attention.
        facts: further lines of the summary, by title.

    >>> import torch
    >>> from hookcb import module_summary
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
    >>> summary = module_summary(model, torch.ones(8, 4))
    >>> summary.n_params, summary.multiply_adds
    (10, 64)
    >>> [(row.name, row.type, row.shape) for row in summary][1:]
    [('0', 'Linear', torch.Size([8, 2])), ('1', 'ReLU', torch.Size([8, 2]))]
    """

    rows: list[LayerRow]
    n_params: int
    n_trainable: int
    n_buffers: int
    param_bytes: int
    buffer_bytes: int
    activation_bytes: int
    multiply_adds: int
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def n_frozen(self) -> int:
        """Number of parameters that are not trained."""
        return self.n_params - self.n_trainable

    def __iter__(self) -> Iterator[LayerRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [_cells(row) for row in self.rows]
        names = [row[0] for row in cells]
        yield fitted(cells, names, COLUMNS, options, head=HEAD[0], is_tree=True, is_framed=False)
        yield Text("\n".join(["", *self._totals()]))

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{escape(line)}</div>" for line in self._totals())
        cells = ([cell.replace("  ", "\u2003") for cell in _cells(row)] for row in self.rows)
        return html_table(HEAD, cells, n_left=3) + lines

    def _totals(self) -> list[str]:
        silent: dict[str, list[str]] = {}
        for row in self.rows:
            if row.why_not_called not in ("", NOT_CALLED) and row.params:
                silent.setdefault(row.why_not_called, []).append(row.name)
        return [
            f"{self.n_params:,} parameters, {format_bytes(self.param_bytes)}: "
            f"{self.n_trainable:,} trained, {self.n_frozen:,} frozen",
            f"{self.n_buffers:,} elements in buffers, {format_bytes(self.buffer_bytes)}",
            f"for this input: {short_number(self.multiply_adds)} multiply-adds, "
            f"{format_bytes(self.activation_bytes)} of activations",
            *(
                f"not called, as {why}: {join_names(map(as_layer, names), 5)}"
                for why, names in silent.items()
            ),
            *(f"{title}: {fact}" for title, fact in self.facts.items()),
        ]


@hinted
def module_summary(
    model: nn.Module | Loop,
    *xb: Any,
    depth: int | None = None,
    input_size: Sequence[int] | Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
) -> Summary:
    """Summary of a model after one forward on `xb`, which leaves the model and its callbacks unchanged.

    The model runs in eval mode and without gradients. If it has lazy modules that have not run yet, a copy
    runs instead, and the model stays lazy.

    Args:
        model: the model; or a learner, whose `predict` is called, and whose optimizer, loss and callbacks
            are listed too.
        *xb: the inputs, moved to the model's device; by default those of a learner's first batch. A single
            mapping gives keyword arguments; if the forward has no parameters of these names, the mapping
            itself is the input.
        depth: depth of the deepest rows, which include their submodules; by default no limit.
        input_size: in place of `xb`, the shape of the input with its batch, such as (1, 3, 224, 224), or a
            list of shapes. Inputs are numbers in [-1, 1], or zeros if the dtype is not floating.
        dtype: dtype of these inputs, or a list with that of each, such as `torch.int64` for tokens.

    Raises:
        TypeError: If `depth` is not a whole number.
        ValueError: If the model needs inputs and there are none, `depth` is negative, or `input_size` is
            given beside inputs or is no shape.
        Exception: If the model raises; a note says in which module, and what had run before.
    """
    if input_size is not None:
        if xb:
            raise ValueError("give either inputs or input_size, not both")
        xb = tuple(sample_inputs(input_size, dtype))
    if depth is not None:
        check_count("depth", depth, "levels", least=0, hint=", or None for all")
    learn = None if isinstance(model, nn.Module) else model
    trace = trace_forward(model, xb)
    params, buffers = trace.params, trace.buffers
    rows = list(trace.rows.values()) if depth is None else _folded(trace.rows.values(), depth)
    return Summary(
        rows=rows,
        n_params=sum(p.numel() for p in params),
        n_trainable=sum(p.numel() for p in params if p.requires_grad),
        n_buffers=sum(b.numel() for b in buffers),
        param_bytes=sum(map(n_bytes, params)),
        buffer_bytes=sum(map(n_bytes, buffers)),
        activation_bytes=trace.activation_bytes,
        multiply_adds=sum(row.multiply_adds for row in rows),
        facts=(_facts(learn) if learn else {}) | _shards(params),
    )


def layer_info(learn: nn.Module | Loop, *xb: Any) -> list[LayerInfo]:
    """Type, parameters, trainable, output shape, and whether an input has that shape, for each layer.

    Layers are the modules that call no others, and those with parameters of their own. The shape is nested
    like the output; None if the layer was not called. See `module_summary` for the arguments.
    """
    return [
        LayerInfo(row.type, row.params, row.trainable, row.shape, row.same)
        for row in trace_forward(learn, xb).rows.values()
        if row.params or (row.called and not row.calls_others)
    ]


def _folded(rows: Iterable[LayerRow], depth: int) -> list[LayerRow]:
    """The rows down to `depth`; the deepest include their submodules."""
    kept: dict[str, LayerRow] = {}
    for row in rows:
        if row.depth <= depth:
            kept[row.name] = row
            continue
        above = kept[".".join(row.name.split(".")[:depth])]
        above.params += row.params
        above.trainable_params += row.trainable_params
        above.buffers += row.buffers
        above.multiply_adds += row.multiply_adds
    return list(kept.values())


def _facts(learn: Loop) -> dict[str, str]:
    opt = type(learn.opt).__name__ if learn.opt is not None else name_of(learn.opt_func)
    loss = "the .loss of the model's output" if learn.loss_func is None else name_of(learn.loss_func)
    return {"optimizer": opt, "loss": loss, "callbacks": ", ".join(cb.name for cb in learn.cbs) or "none"}


def _shards(params: Iterable[Tensor]) -> dict[str, str]:
    is_part = any(map(is_flattened, params))
    return {"shards": "parameters are this rank's part of flattened ones"} if is_part else {}


def _cells(row: LayerRow) -> list[str]:
    times = f" ×{row.n_calls}" if row.n_calls > 1 else ""
    trained = row.trainable if isinstance(row.trainable, str) else "yes" if row.trainable else "no"
    return [
        "  " * (row.depth - 1) + (row.name.rpartition(".")[2] or "(model)"),
        row.type + times,
        join_names(list(row.shapes), 3) if row.called else "not called" if row.why_not_called else "",
        f"{row.params:,}" if row.params else "",
        trained if row.params else "",
        short_number(row.multiply_adds) if row.multiply_adds else "",
    ]
