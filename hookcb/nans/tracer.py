"""Tracer: the first call of a model, and the first node of its backward, to make a nonfinite number."""

import linecache
import math
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.restore import preserve_attribute
from hookcb.core.torch_private import DispatchMode, operator_schema
from hookcb.core.whose import is_of_program, line_in
from hookcb.hooks.modules import named_modules
from hookcb.hooks.own import register
from hookcb.nans.nonfinite import FINITE, Kinds, kinds, measured, tensors_in
from hookcb.nans.report import LOSS, MODEL, ModuleCall

FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')  # a line of traceback.format_stack


# ---- lines of the user's code


def run_forward(learn: Any) -> None:
    """The learner's forward and loss; the search for lines of the user's code ends at this frame."""
    learn.pred = learn.predict()
    learn.loss = learn.get_loss()


def _is_replay(frame: FrameType) -> bool:
    return frame.f_code is run_forward.__code__


def user_line(is_end: Callable[[FrameType], bool] = _is_replay) -> str:
    """`file:line` of the innermost frame of the user's code inside of an end, the replay; "" if none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_end(frame):
        if is_of_program(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{line_in(frame)}"
        frame = frame.f_back
    return ""


def line_of(node: Node) -> str:
    """`file:line` of the user's code that made a node of the graph, as recorded by anomaly mode."""
    metadata: Any = node.metadata  # a property, despite its type
    for frame in reversed(metadata.get("traceback_", [])):
        found = FRAME.search(frame)
        if found is None or (found[3] == run_forward.__name__ and found[1] == __file__):
            break
        if is_of_program(found[1]):
            return f"{found[1]}:{found[2]}"
    return ""


def shown_line(line: str) -> tuple[str, str]:
    """A line for display, relative to the working directory if inside it, and its text."""
    file, _, number = line.rpartition(":")
    if not file:
        return "", ""
    path, here = Path(file), Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f"{shown}:{number}", linecache.getline(file, int(number)).strip()


# ---- tracing


@dataclass(slots=True, eq=False)
class Call:
    """A traced call of a module.

    Attributes:
        name: name of the module.
        k: number of its calls before this one.
        module: the module.
        given, made: kinds of nonfinite numbers in its inputs, and in its output.
        entries: nodes of the graph that its inputs come from.
        inner: entries of the calls inside it.
        line: line of the user's code that called it.
    """

    name: str
    k: int
    module: nn.Module
    given: Kinds = FINITE
    made: Kinds = FINITE
    entries: frozenset[Node | None] = frozenset()
    inner: list[Node | None] = field(default_factory=list)
    line: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that made nonfinite numbers from finite ones, in `calls`, the innermost last."""

    name: str
    made: Kinds
    line: str
    calls: tuple[Call, ...]


class _Operations(DispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Passes the operations of torch, below autograd, to a function."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})


class Tracer:
    """Follows one forward of a model, and then its backward.

    Args:
        model: the model without wrappers.
        last: number of calls to keep.

    Attributes:
        culprit: first call that made NaN or +inf from inputs without any; None if there was none.
        minus_inf: first call that made -inf from finite inputs, or None.
        node: first node of the backward that made nonfinite gradients from finite ones, or None.
        arrived: first node that received nonfinite gradients, or None.
        owners: the call in which each node was made.
    """

    def __init__(self, model: nn.Module, last: int) -> None:
        self.model = model
        self.culprit: Call | None = None
        self.minus_inf: Call | None = None
        self.node: Node | None = None
        self.arrived: Node | None = None
        self.owners: dict[Node, Call] = {}
        self._loss = Call(LOSS, 0, model)
        self._rows: deque[tuple[Call, str, ModuleCall]] = deque(maxlen=last)
        self._open: list[Call] = []
        self._n_calls: Counter[str] = Counter()
        self._operations: list[Operation] = []
        self._n_before = 0  # operations before the end of the culprit
        self._looking = self._in_backward = False
        self._handles: list[Any] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Registers its hooks on the model for a `with` block."""
        try:
            for name, m in named_modules(self.model).items():
                if not isinstance(m, torch.jit.ScriptModule):  # it calls no hooks
                    enter = register(
                        m.register_forward_pre_hook, partial(self._enter, name), with_kwargs=True
                    )
                    leave = register(m.register_forward_hook, self._leave, always_call=True)
                    self._handles += [enter, leave]
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    @contextmanager
    def forward(self, operations: bool) -> Iterator[None]:
        """Follows a forward in a `with` block, and with `operations` each operation too."""
        self._looking = True
        try:
            with _Operations(self._operation) if operations else nullcontext():
                yield
        finally:
            self._looking = False  # activation checkpointing runs forwards again in the backward

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self._looking, before = False, self._looking  # the tracer's own operations are not traced
        try:
            with torch.no_grad():
                yield
        finally:
            self._looking = before

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._looking:
            return
        with self._aside():
            given = kinds((args, kwargs))
        entries = frozenset(x.grad_fn for _, x in parts((args, kwargs)) if isinstance(x, Tensor))
        self._open.append(Call(name, self._n_calls[name], module, given, entries=entries))
        self._n_calls[name] += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._looking or not self._open:
            return
        call = self._open.pop()
        with self._aside():
            call.made, call.line = kinds(output), user_line()
            if self.culprit is None:
                self._rows.append((call, "", measured(call.module, tensors_in(output))))
        if self.culprit is None and call.made.bad and not call.given.bad:
            self.culprit, self._n_before = call, len(self._operations)
        if self.minus_inf is None and call.made.minus_inf and call.given.clean:
            self.minus_inf = call
        outputs = [(path, x) for path, x in parts(output) if isinstance(x, Tensor) and x.grad_fn]
        self._claim([x.grad_fn for _, x in outputs], call)
        (self._open[-1] if self._open else self._loss).inner.extend(call.entries)
        for path, x in outputs:
            self._handles.append(register(x.register_hook, partial(self._gradient, call, path)))

    def _claim(self, nodes: Iterable[Node | None], call: Call) -> None:
        """Notes that nodes, and unclaimed nodes behind them, were made in `call`."""
        for node in graph.walk([*nodes, *call.inner], call.entries, through=lambda x: x not in self.owners):
            self.owners.setdefault(node, call)

    def _operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._looking or not _can_make(func, args, kwargs):
            return func(*args, **kwargs)
        given = None
        if operator_schema(func).is_mutable:  # its input is its output
            with self._aside():
                given = kinds((args, kwargs))
        output = func(*args, **kwargs)
        with self._aside():
            made = kinds(output)
            if not made.clean and (given or kinds((args, kwargs))).clean:
                name = operator_schema(func).name.partition("::")[2]
                self._operations.append(Operation(name, made, user_line(), tuple(self._open)))
        return output

    def operation_of(self, call: Call | None) -> Operation | None:
        """The operation that made nonfinite numbers in a call, rather its own than one of a call inside.

        None stands for the loss function.
        """
        if call is None:
            return next((op for op in self._operations if not op.calls), None)
        of_call = [op for op in self._operations if call in op.calls]
        fitting = [op for op in of_call if op.made.bad or not call.made.bad]
        return min(fitting, key=lambda op: op.calls[-1] is not call, default=None)

    def last_minus_inf(self) -> Operation | None:
        """The last operation before the end of the culprit that made -inf, and nothing else, from numbers."""
        before = self._operations[: self._n_before] if self.culprit else self._operations
        return next((op for op in reversed(before) if not op.made.bad), None)

    # ---- the backward

    def backward(self, loss: Tensor, is_shared: bool = False) -> Kinds:
        """Runs the backward without changing `.grad`; returns the kinds of nonfinite gradients.

        Args:
            loss: the loss.
            is_shared: whether other ranks run it too, as gradients of sharded parameters need all of them.
        """
        params = [p for p in self.model.parameters() if p.requires_grad]
        if not params or loss.grad_fn is None:
            return FINITE
        self._claim([loss.grad_fn], self._loss)
        # nodes of leaves outlive the graph
        inner = [node for node in self.owners if not hasattr(node, "variable")]
        handles = [node.register_hook(partial(self._passed, node)) for node in inner]
        self._rows.clear()
        self._in_backward = True
        try:
            if is_shared:  # the whole graph, as the wrapper's hooks reduce what arrives at the parameters
                with preserve_attribute(params, "grad", None):
                    loss.sum().backward()  # type: ignore[no-untyped-call]
                    return kinds([p.grad for p in params])
            return kinds(torch.autograd.grad(loss.sum(), params, allow_unused=True))
        finally:
            self._in_backward = False
            for handle in handles:
                handle.remove()

    def _passed(self, node: Node, grad_inputs: Any, grad_outputs: Any) -> None:
        if self.node is None:
            if not kinds(grad_outputs).clean:
                self.arrived = self.arrived or node
            elif not kinds(grad_inputs).clean:
                self.node = node

    def _gradient(self, call: Call, path: str, grad: Tensor) -> None:
        over = self.node is not None and self._rows and self._rows[-1][2].nonfinite
        if self._in_backward and not over:
            with torch.no_grad():
                self._rows.append((call, path, measured(call.module, tensors_in(grad))))

    # ---- what came of it

    def name(self, call: Call) -> str:
        """Name of the module; for several calls with the number, `fc#1`."""
        name = call.name or MODEL
        return name if self._n_calls[call.name] < 2 else f"{name}#{call.k}"

    def calls(self) -> tuple[ModuleCall, ...]:
        """The last calls, up to the culprit."""
        return tuple(replace(row, name=self.name(call) + path) for call, path, row in self._rows)


def _can_make(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation computes its result: not uninitialized memory, nor an infinite argument."""
    given = [x for _, x in parts((args, kwargs))]
    if "empty" in operator_schema(func).name or any(
        isinstance(x, float) and not math.isfinite(x) for x in given
    ):
        return False
    return any(isinstance(x, Tensor) for x in given)
