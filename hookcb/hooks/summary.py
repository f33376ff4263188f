"""Summary of a model, layer by layer: parameters, output shapes, multiply-adds, bytes."""

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from html import escape
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from hookcb.core.arguments import check_count
from hookcb.core.batch import parts, split_batch, to_device
from hookcb.core.console import as_text
from hookcb.core.loop import Loop
from hookcb.core.randomness import random_kept
from hookcb.core.text import format_bytes, join_names, short_number
from hookcb.core.torch_private import cpu_attention, cudnn_rnn
from hookcb.hooks.coverage import CONTAINERS, NOT_CALLED, why_not_called
from hookcb.hooks.dry_run import shapes, untouched
from hookcb.hooks.hook import Hooks
from hookcb.hooks.modules import device_of, has_uninitialized, named_modules, unwrapped
from hookcb.records.printing import html_table
from hookcb.records.tables import Column, fitted

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

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


@dataclass(slots=True)
class LayerRow:
    """A module in a `Summary`.

    Attributes:
        name: qualified name, empty for the whole model.
        type: class.
        depth: number of modules that contain it.
        params: number of its parameters that no earlier row has counted, without those of submodules; the
            deepest rows shown include them.
        trainable_params: number of `params` that are trained.
        buffers: number of elements of its buffers, counted like parameters.
        n_calls: number of calls.
        shape: shape of its output in the last call, nested like the output; None if it was not called.
        shapes: all different shapes by their text, in the order of the calls.
        same: whether its output has the shape of one of its inputs, except for the first dimension.
        calls_others: whether it calls other modules.
        multiply_adds: multiply-adds of its calls, without those of submodules that have a row of their own.
        why_not_called: likely reason if it was not called; "" for containers.
    """

    name: str
    type: str
    depth: int
    params: int = 0
    trainable_params: int = 0
    buffers: int = 0
    n_calls: int = 0
    shape: Any = None
    shapes: dict[str, Any] = field(default_factory=dict)
    same: bool = False
    calls_others: bool = False
    multiply_adds: int = 0
    why_not_called: str = ""

    @property
    def called(self) -> bool:
        """Whether its forward ran."""
        return self.n_calls > 0

    @property
    def trainable(self) -> bool | str:
        """Whether its `params` are trained: True, False, or "partly"."""
        if 0 < self.trainable_params < self.params:
            return "partly"
        return self.trainable_params > 0


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
            *(f"not called, as {why}: {join_names(names, 5)}" for why, names in silent.items()),
            *(f"{title}: {fact}" for title, fact in self.facts.items()),
        ]


def module_summary(model: nn.Module | Loop, *xb: Any, depth: int | None = None) -> Summary:
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

    Raises:
        TypeError: If `depth` is not a whole number.
        ValueError: If the model needs inputs and there are none, or `depth` is negative.
        Exception: If the model raises; a note says in which module, and what had run before.
    """
    if depth is not None:
        check_count("depth", depth, "levels", least=0, hint=", or None for all")
    learn = None if isinstance(model, nn.Module) else model
    trace = _traced(model, xb)
    params, buffers = trace.count()
    rows = list(trace.rows.values()) if depth is None else _folded(trace.rows.values(), depth)
    return Summary(
        rows=rows,
        n_params=sum(p.numel() for p in params),
        n_trainable=sum(p.numel() for p in params if p.requires_grad),
        n_buffers=sum(b.numel() for b in buffers),
        param_bytes=sum(map(_n_bytes, params)),
        buffer_bytes=sum(map(_n_bytes, buffers)),
        activation_bytes=trace.activation_bytes,
        multiply_adds=sum(row.multiply_adds for row in rows),
        facts=_facts(learn) if learn else {},
    )


def layer_info(learn: nn.Module | Loop, *xb: Any) -> list[LayerInfo]:
    """Type, parameters, trainable, output shape, and whether an input has that shape, for each layer.

    Layers are the modules that call no others, and those with parameters of their own. The shape is nested
    like the output; None if the layer was not called. See `module_summary` for the arguments.
    """
    trace = _traced(learn, xb)
    trace.count()
    return [
        LayerInfo(row.type, row.params, row.trainable, row.shape, row.same)
        for row in trace.rows.values()
        if row.params or (row.called and not row.calls_others)
    ]


def _rnn_flops(x: Any, weights: Iterable[Any]) -> int:
    return int(2 * prod(x[:-1]) * sum(prod(weight) for weight in weights if len(weight) == 2))


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _flop_counter() -> "FlopCounterMode":
    with random_kept():  # not at the top, as its import takes as long as that of hookcb
        from torch.utils.flop_counter import FlopCounterMode

    formulas = {  # for operations it does not know; called with the shapes of the arguments
        cudnn_rnn(): lambda x, weights, *args, **kwargs: _rnn_flops(x, weights),
        torch.ops.aten.mkldnn_rnn_layer: lambda x, w_ih, w_hh, *args, **kwargs: _rnn_flops(x, [w_ih, w_hh]),
        cpu_attention(): _attention_flops,
    }
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    counter.mod_tracker = _NoTracker()  # type: ignore[assignment]  # its hooks forbid gradients in a forward
    return counter


class _NoTracker:
    """Replaces the flop counter's tracker of modules: everything counts in one place."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


class _Trace:
    """One forward, followed module by module."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = named_modules(model)
        self.rows = {
            name: LayerRow(name, type(m).__name__, depth=name.count(".") + 1 if name else 0)
            for name, m in self.modules.items()
        }
        self.names = {id(m): name for name, m in self.modules.items()}
        self.flops = _flop_counter()
        self.running: list[_Running] = []  # running calls, the innermost last
        self.activation_bytes = 0

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follows the calls in a `with` block; adds a note to an error that says which module raised it."""
        plain = {name: m for name, m in self.modules.items() if not isinstance(m, torch.jit.ScriptModule)}
        with (
            Hooks(plain, self.enter, detach=False, pre=True),
            Hooks(plain, self.leave, detach=False),
            self.flops,
        ):
            try:
                yield
            except Exception as error:
                self.explain(error)
                raise

    def enter(self, m: nn.Module, args: Any) -> None:
        if self.running:
            self.running[-1].calls_others = True
        self.running.append(_Running(self.rows[self.names[id(m)]], self.flops.get_total_flops()))

    def leave(self, m: nn.Module, args: Any, output: Any) -> None:
        running = self.running.pop()
        row, flops = running.row, self.flops.get_total_flops() - running.flops_before
        if self.running:
            self.running[-1].flops_inside += flops
        row.multiply_adds += (flops - running.flops_inside) // 2
        row.n_calls += 1
        row.shape = shapes(output)
        row.shapes[_shape_text(row.shape)] = row.shape
        row.same = isinstance(row.shape, torch.Size) and any(
            isinstance(shape, torch.Size) and shape[1:] == row.shape[1:] for shape in map(shapes, args)
        )
        row.calls_others |= running.calls_others
        if not running.calls_others:
            self.activation_bytes += sum(_n_bytes(x) for _, x in parts(output) if isinstance(x, Tensor))

    def explain(self, error: Exception) -> None:
        done = [row.name or row.type for row in self.rows.values() if row.called]
        before = f"after {join_names(done[-3:])}" if done else "before any layer had run"
        if self.running:
            row = self.running[-1].row
            error.add_note(f"in {row.name or 'the model itself'} ({row.type}), {before}")

    def count(self) -> tuple[list[Tensor], list[Tensor]]:
        """Counts each parameter and buffer in the first row it belongs to; returns all of them."""
        seen: dict[int, Tensor] = {}
        params: list[Tensor] = []
        buffers: list[Tensor] = []
        for name, m in self.modules.items():
            row = self.rows[name]
            own = [p for p in m.parameters(recurse=False) if id(p) not in seen]
            kept = [b for b in m.buffers(recurse=False) if id(b) not in seen]
            seen |= {id(x): x for x in [*own, *kept]}
            row.params = sum(p.numel() for p in own)
            row.trainable_params = sum(p.numel() for p in own if p.requires_grad)
            row.buffers = sum(b.numel() for b in kept)
            if not row.called and not isinstance(m, CONTAINERS):
                row.why_not_called = why_not_called(self.modules, name)
            params += own
            buffers += kept
        return params, buffers


@dataclass
class _Running:
    """A running call."""

    row: LayerRow
    flops_before: int
    flops_inside: int = 0  # of the modules it has called
    calls_others: bool = False


def _traced(model: nn.Module | Loop, xb: tuple[Any, ...]) -> _Trace:
    learn = None if isinstance(model, nn.Module) else model
    if not isinstance(model, nn.Module) and not hasattr(model, "predict"):
        raise TypeError(f"model must be an nn.Module or a Learner, got {model!r:.80}")
    plain = unwrapped(model if isinstance(model, nn.Module) else model.model)
    if has_uninitialized(plain):
        plain = _lazy_copy(plain)
    trace = _Trace(plain)
    with untouched(plain), learn.restored() if learn else nullcontext():
        if learn is not None and not xb:
            xb = _first_inputs(learn)
        if not xb and not _takes(plain):
            raise ValueError("no batch xb was given; pass the inputs of the model, module_summary(model, x)")
        xb = to_device(xb, device_of(plain))
        named = xb[0] if len(xb) == 1 and isinstance(xb[0], Mapping) else None
        with trace.following():
            if learn is not None:
                _predict(learn, plain, xb if named is None else named)
            elif named is not None and _takes(plain, **named):
                plain(**named)
            else:
                plain(*xb)
    return trace


def _takes(model: nn.Module, **named: Any) -> bool:
    """Whether, by its signature, a forward can be called with these keyword arguments alone."""
    try:
        inspect.signature(model.forward).bind(**named)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return bool(named)
    return True


def _lazy_copy(model: nn.Module) -> nn.Module:
    # deepcopy knows uninitialized parameters, but not buffers
    lazy = [x for x in model.buffers() if isinstance(x, UninitializedBuffer)]
    return copy.deepcopy(model, {id(x): UninitializedBuffer(device=x.device, dtype=x.dtype) for x in lazy})  # type: ignore[call-arg]


def _predict(learn: Loop, model: nn.Module, xb: Any) -> None:
    own, learn.model = learn.model, model
    try:
        learn.xb = xb
        learn.predict()
    finally:
        learn.model = own


def _first_inputs(learn: Loop) -> tuple[Any, ...]:
    if learn.fitting and learn.xb:  # a second iterator would end the first one of persistent workers
        xb = learn.xb
    else:
        loader = learn.dls.train
        if isinstance(loader, Iterator):
            raise ValueError(
                "the training loader can be iterated once, and its first batch would be lost to training; "
                "pass an input, learn.summary(x)"
            )
        with _kept_generators(loader):
            batch = next(iter(loader), None)
        if batch is None:
            raise ValueError("the training loader yields no batch; pass an input, learn.summary(x)")
        xb, _ = split_batch(batch, device_of(learn.model), learn.n_inp)
    return (xb,) if isinstance(xb, Mapping) else tuple(xb)


@contextmanager
def _kept_generators(loader: Any) -> Iterator[None]:
    """Restores the random generators of a DataLoader and its sampler."""
    batches = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    own = [getattr(holder, "generator", None) for holder in holders]
    states = [(g, g.get_state()) for g in own if isinstance(g, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


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
    opt = type(learn.opt).__name__ if learn.opt is not None else _name(learn.opt_func)
    loss = "the .loss of the model's output" if learn.loss_func is None else _name(learn.loss_func)
    return {"optimizer": opt, "loss": loss, "callbacks": ", ".join(cb.name for cb in learn.cbs) or "none"}


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


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


def _shape_text(shape: Any) -> str:
    if isinstance(shape, torch.Size):
        return "×".join(map(str, shape)) or "scalar"
    if is_dataclass(shape) and not isinstance(shape, Mapping):
        shape = {field.name: getattr(shape, field.name) for field in fields(shape)}
    if isinstance(shape, Mapping):
        return "{" + ", ".join(f"{key}: {_shape_text(x)}" for key, x in shape.items()) + "}"
    if isinstance(shape, tuple | list):
        return "(" + ", ".join(map(_shape_text, shape)) + ")"
    return type(shape).__name__ if shape is not None else "None"


def _n_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
