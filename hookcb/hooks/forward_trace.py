"""One forward of a model, followed module by module."""

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from hookcb.core.batch import array_hint, parts, split_batch, to_device
from hookcb.core.loop import Loop
from hookcb.core.randomness import random_kept
from hookcb.core.restore import preserve_attribute
from hookcb.core.text import as_layer, join_names
from hookcb.core.torch_private import cpu_attention, cudnn_rnn, plain_class
from hookcb.hooks.coverage import CONTAINERS, why_not_called
from hookcb.hooks.dry_run import preserve_loader, shapes, untouched
from hookcb.hooks.hook import Hooks
from hookcb.hooks.modules import device_of, has_uninitialized, named_modules, unwrapped

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


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


class ForwardTrace:
    """One forward, followed module by module.

    Args:
        model: the model without wrappers.

    Attributes:
        modules: modules by name.
        rows: row of each module, by name.
        params, buffers: all of them, each once; known after `count`.
        activation_bytes: size of the outputs of all calls in which no other module is called.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = named_modules(model)
        self.rows = {
            name: LayerRow(name, plain_class(m).__name__, depth=name.count(".") + 1 if name else 0)
            for name, m in self.modules.items()
        }
        self._names = {id(m): name for name, m in self.modules.items()}
        self._flops = _flop_counter()
        self._running: list[_Running] = []  # running calls, the innermost last
        self.params: list[Tensor] = []
        self.buffers: list[Tensor] = []
        self.activation_bytes = 0

    @contextmanager
    def following(self, xb: Any) -> Iterator[None]:
        """Follows the calls with inputs `xb` in a `with` block; notes on an error which module raised it."""
        plain = {name: m for name, m in self.modules.items() if not isinstance(m, torch.jit.ScriptModule)}
        with (
            Hooks(plain, self._enter, detach=False, pre=True),
            Hooks(plain, self._leave, detach=False),
            self._flops,
        ):
            try:
                yield
            except Exception as error:
                self._explain(error, xb)
                raise

    def _enter(self, m: nn.Module, args: Any) -> None:
        if self._running:
            self._running[-1].calls_others = True
        self._running.append(_Running(self.rows[self._names[id(m)]], self._flops.get_total_flops()))

    def _leave(self, m: nn.Module, args: Any, output: Any) -> None:
        running = self._running.pop()
        row, flops = running.row, self._flops.get_total_flops() - running.flops_before
        if self._running:
            self._running[-1].flops_inside += flops
        row.multiply_adds += (flops - running.flops_inside) // 2
        row.n_calls += 1
        row.shape = shapes(output)
        row.shapes[_shape_text(row.shape)] = row.shape
        row.same = isinstance(row.shape, torch.Size) and any(
            isinstance(shape, torch.Size) and shape[1:] == row.shape[1:] for shape in map(shapes, args)
        )
        row.calls_others |= running.calls_others
        if not running.calls_others:
            self.activation_bytes += sum(n_bytes(x) for _, x in parts(output) if isinstance(x, Tensor))

    def _explain(self, error: Exception, xb: Any) -> None:
        done = [row.name or row.type for row in self.rows.values() if row.called]
        before = f"after {join_names(map(as_layer, done[-3:]))}" if done else "before any layer had run"
        if self._running:
            row = self._running[-1].row
            error.add_note(
                f"in {as_layer(row.name) or 'the model itself'} ({row.type}), {before}{array_hint(xb)}"
            )

    def count(self) -> None:
        """Counts each parameter and buffer in the first row it belongs to, once lazy modules have theirs."""
        seen: set[int] = set()
        for name, m in self.modules.items():
            row = self.rows[name]
            own = [p for p in m.parameters(recurse=False) if id(p) not in seen]
            kept = [b for b in m.buffers(recurse=False) if id(b) not in seen]
            seen |= set(map(id, [*own, *kept]))
            row.params = sum(p.numel() for p in own)
            row.trainable_params = sum(p.numel() for p in own if p.requires_grad)
            row.buffers = sum(b.numel() for b in kept)
            if not row.called and not isinstance(m, CONTAINERS):
                row.why_not_called = why_not_called(self.modules, name)
            self.params += own
            self.buffers += kept


@dataclass
class _Running:
    """A running call."""

    row: LayerRow
    flops_before: int
    flops_inside: int = 0  # of the modules it has called
    calls_others: bool = False


def trace_forward(model: nn.Module | Loop, xb: tuple[Any, ...]) -> ForwardTrace:
    """Runs one forward of a model or learner, which stays as it is; see `module_summary`."""
    learn = None if isinstance(model, nn.Module) else model
    if not isinstance(model, nn.Module) and not hasattr(model, "predict"):
        raise TypeError(f"model must be an nn.Module or a Learner, got {model!r:.80}")
    plain = unwrapped(model if isinstance(model, nn.Module) else model.model)
    if has_uninitialized(plain):
        plain = _lazy_copy(plain)
    trace = ForwardTrace(plain)
    with untouched(plain), learn.restored() if learn else nullcontext():
        if learn is not None and not xb:
            xb = _first_inputs(learn)
        if not xb and not _takes(plain):
            raise ValueError("no batch xb was given; pass the inputs of the model, module_summary(model, x)")
        xb = to_device(xb, device_of(plain))
        named = xb[0] if len(xb) == 1 and isinstance(xb[0], Mapping) else None
        with trace.following(xb):
            if learn is not None:
                learn.xb = xb if named is None else named
                with preserve_attribute([learn], "model", plain):
                    learn.predict()
            elif named is not None and _takes(plain, **named):
                plain(**named)
            else:
                plain(*xb)
    trace.count()
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
        with preserve_loader(loader):
            batch = next(iter(loader), None)
        if batch is None:
            raise ValueError("the training loader yields no batch; pass an input, learn.summary(x)")
        xb, _ = split_batch(batch, device_of(learn.model), learn.n_inp)
    return (xb,) if isinstance(xb, Mapping) else tuple(xb)


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


def n_bytes(x: Tensor) -> int:
    """Bytes of the elements of `x`; `x.nbytes` raises for a sparse tensor."""
    return x.numel() * x.element_size()


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
