"""loss.constant_derivative: a derivative that enters the loss without a graph, as a constant."""

from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.torch_private import in_backward, input_shape
from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.heard import Ear, heard
from hookcb.diagnosis.run import Run

N_DENSE, MIN_FOUND = 16, 2  # steps in which each batch is looked at; batches in which it must be so
MAX_NEAR, N_POINTS, MIN_POINTS = 256, 256, 12  # nodes before the loss; elements that are compared
EXACT, FAR = 2e-6, 1e-4  # share of a residual that is left with the derivative, and without it
COMBINING = "Add", "Sub", "Rsub", "Mul", "Div"
MAX_APART = 0.01  # between its factors in two batches; those of a curve that fits by chance change


class Derivative(NamedTuple):
    """A derivative without a graph, some of its elements, and of what it is the derivative of."""

    tensor: Any  # a weak reference
    values: Tensor
    of: Tensor | None
    n: int


class ConstantDerivatives(Ear):
    """Calls of torch.autograd.grad for inputs of a model, with gradients on but without create_graph."""

    calls = ((torch.autograd, "grad", "observe"),)
    options: ClassVar[dict[str, bool]] = {"nested": False}

    def __init__(self) -> None:
        self.wants = False
        self.latest: deque[Derivative] = deque(maxlen=4)

    def observe(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        result: Any = yield
        if not self.wants or create_graph or not torch.is_grad_enabled() or in_backward():
            return
        of = next((x for _, x in parts(outputs) if isinstance(x, Tensor)), None)
        for x, g in zip((x for _, x in parts(inputs)), result, strict=False):
            is_input = isinstance(x, Tensor) and x.is_leaf and not isinstance(x, nn.Parameter)
            if is_input and type(g) is Tensor and not g.requires_grad:
                whole = None if of is None or of.numel() != g.numel() else _points(of)
                self.latest.append(Derivative(TensorWeakRef(g), _points(g), whole, g.numel()))


@fault("loss.constant_derivative", Site.LOSS, needs="batches", leads_to="loss.* train.unfinished", exact=True)
class ConstantDerivative(Fault):
    """A derivative by an input of the model that is a constant in the loss, as create_graph=True is missing.

    Exact: torch.autograd.grad was called for an input that is a leaf, before the backward, without
    create_graph; and the loss, in which other parts have a graph, has it: its operations have saved that
    tensor; or a residual, on a CPU, is to 2e-6 a sum of it, the output and their products, with the same
    factors in two batches, and without it is not to 1e-4; or a constant is added to the loss. It is read
    before the backward frees the graph: in a Learner, by the command, or if the loss is reported. Adversarial
    examples, which are inputs of another call, and derivatives that are logged do not enter the loss.

    Source: torch.autograd.grad, `create_graph`; Raissi et al., "Physics-informed neural networks", 2019.
    """

    headline = "A derivative in the loss is a constant"
    cadence = N_DENSE
    hears = (ConstantDerivatives,)
    severity = "warning"
    passed = "derivatives that are constants in the loss"
    unless = "too little was seen of the graph of the loss"

    def __init__(self) -> None:
        super().__init__()
        self._n_found = 0
        self._factors: list[float] = []  # of the derivative in a residual, in the batch before
        # some elements of the outputs of the model since the last step, and their number: the derivative ends
        # the batch of a loop that is watched, and a point on the boundary begins another
        self._outputs: deque[tuple[Tensor, int]] = deque(maxlen=4)

    def on_prediction(self, run: Run) -> None:
        given = [x for _, x in parts(run.loop.pred) if isinstance(x, Tensor) and x.is_floating_point()][:2]
        self._outputs.extend((_points(x), x.numel()) for x in given)

    def on_batch(self, run: Run) -> None:
        heard(ConstantDerivatives).wants = run.n_steps < N_DENSE

    def on_between(self, run: Run) -> None:
        self._outputs.clear()
        heard(ConstantDerivatives).latest.clear()

    def on_loss(self, run: Run) -> None:
        self.unless = "" if run.loop.loss_node is not None else self.unless
        derivatives = list((ear := heard(ConstantDerivatives)).latest)
        ear.latest.clear()
        if not derivatives or not (how := self._how(run.loop.loss_node, derivatives)):
            return
        self._n_found += 1
        if self._n_found == MIN_FOUND:
            self.done = True
            ear.wants = False
            self.see(
                f"A derivative by an input is taken without create_graph=True, and {how}: it is a constant "
                "there, so no gradient of the loss goes through it to the weights.",
                when=run.step,
                value=0.0,
                causes=("torch.autograd.grad(…) without create_graph=True",),
                next_steps=("Call torch.autograd.grad(…, create_graph=True) for what enters the loss",),
            )

    def _how(self, loss: Any, derivatives: list[Derivative]) -> str:
        """How one of these enters the loss; "" if none does."""
        if loss is None:
            return ""
        tensors = [x for x in (d.tensor() for d in derivatives) if x is not None]
        outputs = list(self._outputs)
        for node in graph.near(loss, MAX_NEAR):
            saved = [
                x
                for x in (graph.read_saved(node, name) for name in ("self", "other"))
                if isinstance(x, Tensor)
            ]
            if any(x is g for x in saved for g in tensors):
                return "the loss multiplies with it"
            if saved and _adds_constant(graph.behind(node)):
                before, self._factors = self._factors, _factors(saved[0], outputs, derivatives)
                if self._factors and _are_alike(before, self._factors):
                    return "a residual in the loss contains it"
                if self._factors:
                    return ""
        if _has_constant(loss):
            return "a term of the loss has no graph"
        return ""

    def close(self, run: Run) -> None:
        heard(ConstantDerivatives).latest.clear()
        self._outputs.clear()


def _has_constant(node: Any) -> bool:
    """Whether a tensor without a graph is added to the loss as a whole."""
    nodes = graph.walk([node], at_most=8, through=lambda at: graph.name(at) in COMBINING)
    return any(_adds_constant(at) and not input_shape(at) for at in nodes)


def _adds_constant(node: Any) -> bool:
    return graph.name(node) in ("Add", "Sub", "Rsub") and len(graph.inputs(node)) == 1


def _factors(
    residual: Tensor, outputs: list[tuple[Tensor, int]], derivatives: list[Derivative]
) -> list[float]:
    """Factors of derivatives and their products with outputs in a residual; [] if it is no such sum."""
    same = [d for d in derivatives if d.n == residual.numel()]
    if not same or not residual.is_cpu or residual.numel() < MIN_POINTS or not residual.is_floating_point():
        return []
    r, gs = _points(residual).double(), [d.values.double() for d in same]
    us = [x.double() for x, n in outputs if n == residual.numel()]
    us = us or [d.of.double() for d in same if d.of is not None]
    plain = [torch.ones_like(r), *us]
    columns = [*plain, *gs, *(u * g for u in us for g in gs)]
    if len(columns) > len(r) // 2 or _fit(r, plain)[1] < FAR:
        return []
    factors, left = _fit(r, columns)
    return factors[len(plain) :] if left < EXACT else []


def _are_alike(before: list[float], now: list[float]) -> bool:
    if len(before) != len(now):
        return False
    return max(abs(x - y) for x, y in zip(before, now, strict=True)) < MAX_APART * max(map(abs, now))


def _fit(r: Tensor, columns: list[Tensor]) -> tuple[list[float], float]:
    """Factors by least squares, and the share of the norm of `r` that is left."""
    a = torch.stack(columns, 1)
    factors = torch.linalg.lstsq(a, r[:, None]).solution
    return factors[:, 0].tolist(), float((r - (a @ factors)[:, 0]).norm() / r.norm().clamp(min=1e-30))


def _points(x: Tensor) -> Tensor:
    return x.detach().reshape(-1)[:N_POINTS].clone()
