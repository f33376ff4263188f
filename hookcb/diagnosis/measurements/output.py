"""Output: what the first loss compares the model's output with, and the softmaxes before that loss."""

import math
from typing import Any, NamedTuple

from torch import Tensor

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.torch_private import input_shape, saved
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.layer_rows import LayerRows
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.loss_terms import MAX_NODES, Term, main_term, read_terms
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run

NAMES = {"Relu": "ReLU", "LogSoftmax": "log_softmax", "LogSigmoid": "logsigmoid", "Hardtanh": "hard tanh"}
SQUARES = ("mse", "mae", "huber")  # losses of values
COMPARING = (*SQUARES, "binary cross-entropy")  # losses that compare each output with a target
SLACK = 1e-3  # rounding of targets at the ends of a range


class Compared(NamedTuple):
    """An output of the model, what a loss compares it with element by element, and the term that does."""

    output: Tensor
    target: Tensor
    term: Term

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of output and targets as the loss gets them, before torch's loss has expanded them."""
        theirs = list(zip(self.target.shape, self.target.stride(), strict=True))
        while theirs and theirs[0][1] == 0:
            del theirs[0]
        ours = self.term.given_shape or tuple(self.output.shape)
        return ours, tuple(n if stride else 1 for n, stride in theirs)

    @property
    def is_broadcast(self) -> bool:
        """Whether one output and one target per sample, of different shapes, are compared in all pairs.

        Targets of shape (N, N) are such pairs already, as the sum of rewards (N) and values (N, 1).
        """
        ours, theirs = self.shapes
        if len(ours) == 2 and ours[0] > 1 == ours[1] and theirs == (ours[0], ours[0]):
            return True
        is_on_purpose = len(ours) > self.output.ndim  # such as output[:, None]
        is_same = [n for n in ours if n > 1] == [n for n in theirs if n > 1]
        differs = is_same and len(ours) != len(theirs) and not is_on_purpose
        return differs and math.prod(self.term.shape) > math.prod(ours)


class Output(Measurement):
    """The model's output beside its targets, in the first loss."""

    cadence = EVERY
    uses = (LayerRows, Loss, Targets)

    def __init__(self) -> None:
        self.layer = ""  # the last one that was called before the loss
        self.is_degenerate = False  # whether the loss takes a softmax over one number
        self.is_known = False  # whether it is known what it compares, or that it does something else
        self.compared: Compared | None = None  # known to `on_first_graph` only

    def on_first_graph(self, run: Run) -> None:
        node, self.layer = run.loop.loss_node, run.measured(LayerRows).last
        nodes = graph.walk([node], at_most=MAX_NODES, through=_is_in_loss, nearest_first=True)
        softmaxes = [
            (input_shape(at), saved(at, "dim")) for at in nodes if graph.name(at) in ("Softmax", "LogSoftmax")
        ]
        self.is_degenerate = any(dim is not None and shape and shape[dim] == 1 for shape, dim in softmaxes)
        self.compared = compared(node, run.loop.pred, run.measured(Targets).of_batch(run))
        loss = run.measured(Loss).graph
        is_other = loss is not None and loss.kind not in ("", *COMPARING)
        self.is_known = is_other or self.compared is not None

    def on_loss(self, run: Run) -> None:
        self.compared, self.done = None, True

    def beside(self, *kinds: str) -> Compared | None:
        """Tensors that a loss of one of these kinds compares in pairs, if nothing else is wrong with it."""
        seen = None if self.is_degenerate else self.compared
        return seen if seen is not None and seen.term.kind in kinds and not seen.is_broadcast else None

    def why_unknown(self) -> str:
        return "" if self.is_known else "too little was seen of the output beside its targets"


def name_of(operation: str) -> str:
    """Name of an operation of a graph, as PyTorch has it: "ReLU"."""
    return NAMES.get(operation, operation.lower())


def compared(node: Any, pred: Any, yb: Any) -> Compared | None:
    """Two tensors that the loss compares element by element; None if it does not, or if that is unknown.

    Of a sum of losses, one of which compares an output of the model, it is that one; another may compare that
    of another model. The targets are those that a loss of torch has saved, else the only tensor of `yb`.
    """
    terms = read_terms(node)
    outputs = [x for _, x in parts(pred) if isinstance(x, Tensor) and x.grad_fn is not None]
    ends = {graph.peel(x.grad_fn): x for x in reversed(outputs)}
    main = main_term([term for term in terms if term.given in ends]) or main_term(terms)
    if main is None or main.kind not in COMPARING:
        return None
    x = ends.get(main.given)
    targets = [y for _, y in parts(yb) if isinstance(y, Tensor)] if main.target is None else [main.target]
    y = targets[0] if len(targets) == 1 else None
    if x is None or y is None or y.is_complex() or not y.numel():
        return None
    sizes = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return Compared(x, y, main) if all(a == b or 1 in (a, b) for a, b in sizes) else None


def _is_in_loss(node: Any) -> bool:
    """Whether a node is neither a layer nor weighs something else, as a softmax may."""
    name = graph.name(node)
    return name not in graph.LAYERS and not (name == "Mul" and len(graph.inputs(node)) > 1)
