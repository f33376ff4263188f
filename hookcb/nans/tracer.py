"""Tracer: the first call of a model, and the first node of its backward, to make a nonfinite number."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.restore import preserve_attribute
from hookcb.hooks.modules import named_modules
from hookcb.hooks.own import register
from hookcb.nans.nonfinite import FINITE, Kinds, kinds, measured, tensors_in
from hookcb.nans.origins import Made, Origins, run_forward, user_line
from hookcb.nans.report import LOSS, MODEL, ModuleCall


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


class Tracer:
    """Follows one forward of a model without wrappers, and then its backward.

    Attributes:
        pred, loss, grads: kinds of nonfinite numbers in the output of the model, the loss and the gradients.
        made: origin of those in the loss, if operations were followed; else None.
        error: why the replay itself has failed, else "".
        culprit: first call that made NaN or +inf from inputs without any; None if there was none.
        minus_inf: first call that made -inf from finite inputs, or None.
        node: first node of the backward that made nonfinite gradients from finite ones, or None.
        arrived: first node that received nonfinite gradients, or None.
        owners: the call in which each node was made.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.error = model, ""
        self.pred = self.loss = self.grads = FINITE
        self.made: Made | None = None
        self.culprit: Call | None = None
        self.minus_inf: Call | None = None
        self.node: Node | None = None
        self.arrived: Node | None = None
        self.owners: dict[Node, Call] = {}
        self._loss = Call(LOSS, 0, model)
        self._rows: list[tuple[Call, str, ModuleCall]] = []
        self._open: list[Call] = []
        self._n_calls: Counter[str] = Counter()
        self._origins = Origins(self._open)
        self._origins.is_on = self._in_backward = False
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

    @property
    def has_repeated(self) -> bool:
        """Whether there was a nonfinite number."""
        return not (self.loss.clean and self.grads.clean)

    def forward(self, learn: Any, operations: bool) -> None:
        """Follows a forward of `learn` and its loss, and with `operations` each operation too."""
        self._origins.is_on = True
        try:
            with self._origins if operations else nullcontext():
                run_forward(learn)
        finally:
            self._origins.is_on = False  # activation checkpointing runs forwards again in the backward
        self.pred, self.loss = kinds(learn.pred), kinds(learn.loss)
        self.made = self._origins.origin([learn.loss])

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self._origins.is_on = False  # the tracer's own operations are not traced
        try:
            with torch.no_grad():
                yield
        finally:
            self._origins.is_on = True

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._origins.is_on:
            return
        with self._aside():
            given = kinds((args, kwargs))
        entries = frozenset(x.grad_fn for _, x in parts((args, kwargs)) if isinstance(x, Tensor))
        self._open.append(Call(name, self._n_calls[name], module, given, entries=entries))
        self._n_calls[name] += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._origins.is_on or not self._open:
            return
        call = self._open.pop()
        with self._aside():
            call.made, call.line = kinds(output), user_line()
            self._rows.append((call, "", measured(call.module, tensors_in(output))))
        if self.culprit is None and call.made.bad and not call.given.bad:
            self.culprit = call
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

    # ---- the backward

    def backward(self, loss: Tensor, is_shared: bool) -> None:
        """Follows a backward, without changing `.grad`.

        Args:
            loss: the loss.
            is_shared: whether other ranks run it too, as gradients of sharded parameters need all of them.
        """
        params = [p for p in self.model.parameters() if p.requires_grad]
        if not params or loss.grad_fn is None:
            return
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
                    self.grads = kinds([p.grad for p in params])
            else:
                self.grads = kinds(torch.autograd.grad(loss.sum(), params, allow_unused=True))
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

    def calls(self, last: int, culprit: Call | None) -> tuple[ModuleCall, ...]:
        """The last calls, up to a culprit if there is one."""
        end = next((i for i, (call, *_) in enumerate(self._rows, 1) if call is culprit), len(self._rows))
        rows = self._rows[max(0, end - last) : end]
        return tuple(replace(row, name=self.name(call) + path) for call, path, row in rows)
