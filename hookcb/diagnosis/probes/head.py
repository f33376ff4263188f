"""Observes where the model's output, the loss and the targets meet: heads that do not suit them."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.torch_private import input_shape, saved
from hookcb.diagnosis.probes.loss_graph import LossGraph, main_term
from hookcb.diagnosis.probes.loss_terms import MAX_NODES, Term, factor_of, read_terms
from hookcb.diagnosis.run import Observation

RANGES = {  # of the outputs of operations
    "Softmax": (0.0, 1.0),
    "Sigmoid": (0.0, 1.0),
    "Hardsigmoid": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Relu": (0.0, math.inf),
    "Softplus": (0.0, math.inf),
    "Exp": (0.0, math.inf),
    "LogSoftmax": (-math.inf, 0.0),
    "LogSigmoid": (-math.inf, 0.0),
}
NAMES = {"Relu": "ReLU", "LogSoftmax": "log_softmax", "LogSigmoid": "logsigmoid", "Hardtanh": "hard tanh"}
SOFTMAXES = ("Softmax", "LogSoftmax")
SQUARES = ("mse", "mae", "huber")  # losses of values
COMPARING = (*SQUARES, "binary cross-entropy")  # losses that compare each output with a target
MAX_SHARE = 0.05  # of targets out of range
TINY = 1e-12  # of errors, so that none are no division by 0
SLACK = 1e-3  # rounding of targets at the ends of a range
HEAD_ADVICE = {  # by the function that the loss applies itself
    "softmax": ("which applies a softmax itself", "pass the raw scores (logits) to the loss"),
    "sigmoid": (
        "which applies a sigmoid itself",
        "pass the raw scores (logits) to the loss, or use binary_cross_entropy",
    ),
}


class Head(NamedTuple):
    """The operation that limits a model's output.

    Attributes:
        name: name of the operation in the graph, "Sigmoid".
        low, high: range of the model's output, whatever its weights are.
    """

    name: str
    low: float
    high: float

    def __str__(self) -> str:
        low = "-∞" if self.low == -math.inf else f"{self.low:.3g}"
        high = "∞" if self.high == math.inf else f"{self.high:.3g}"
        return f"range {low} to {high} of the {_label(self.name)}"


class Compared(NamedTuple):
    """Two tensors that a loss compares element by element.

    Attributes:
        output: an output of the model.
        target: what it is compared with.
        term: the term of the loss that compares them.
    """

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


def observe_output(
    graph: LossGraph, node: Any, pred: Any, yb: Any, layer: str, step: int
) -> Iterator[Observation]:
    """Heads and targets that do not suit the loss, as one batch shows them.

    Args:
        graph: what the loss is.
        node: `loss.grad_fn`, or None.
        pred: output of the model.
        yb: targets; those that a loss of torch has saved come first.
        layer: the last layer that was called.
        step: number of the batch.
    """
    if node is None:
        yield detached_loss(step)
    if any(_softmax_size(at) == 1 for at in _softmaxes(node)):
        yield degenerate_head(layer, step)
        return
    yield from observe_activation(graph, layer, step, graph.head in operations_between(node, pred))
    seen = compared(node, pred, yb)
    if seen is None:
        return
    if seen.is_broadcast:
        yield broadcast_targets(seen, step)
        return
    if seen.term.kind in SQUARES and (head := read_head(seen.output)):
        yield from observe_range(head, layer, seen.target, step)
    if graph.kind in SQUARES and graph.sure_kind:
        yield from observe_classes(graph, seen.target, layer, step)
    if seen.term.kind == "binary cross-entropy":
        yield from observe_bits(seen.target, step)


def operations_between(node: Any, pred: Any) -> list[str]:
    """Operations from the loss back to the model's output; none if they do not lead there."""
    ends = graph.roots(pred)
    between = list(graph.walk([node], ends, MAX_NODES))
    leads_there = any(behind in ends for at in between for behind in graph.inputs(at))
    return [graph.name(at) for at in between] if leads_there else []


def is_comparison_known(graph: LossGraph, node: Any, pred: Any, yb: Any) -> bool:
    """Whether it is known what the loss compares element by element, or that it does something else."""
    is_other = graph.kind not in ("", *COMPARING)
    return is_other or compared(node, pred, yb) is not None


def stuck_share(graph: LossGraph, node: Any, pred: Any, yb: Any) -> Tensor | None:
    """Share of the squared error from outputs that a ReLU holds at 0, below their targets; None if unknown.

    These outputs get no gradient. The share is a number on its device. For absolute errors, 0 may be the best
    output nevertheless: the median.
    """
    seen = compared(node, pred, yb) if graph.head == "Relu" and graph.kind == "mse" else None
    if seen is None or seen.is_broadcast:
        return None
    x, y = seen.output.detach(), seen.target.detach()
    x = x.reshape(seen.term.given_shape) if seen.term.given_shape else x
    errors = (x - y).float().square()
    return (errors * ((x == 0) & (y > 0))).sum() / errors.sum().clamp_min(TINY)


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
    if x is None or y is None or y.is_complex() or not _can_be_compared(x, y):
        return None
    return Compared(x, y, main)


def _can_be_compared(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors can be broadcast to one shape."""
    pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return y.numel() > 0 and all(a == b or 1 in (a, b) for a, b in pairs)


def read_head(x: Tensor) -> Head | None:
    """Head of the model that computed `x`, None if no operation limits it or if that is unknown.

    Between the head and `x`, the output may be reshaped, and scaled or shifted by numbers. Numbers that are
    added do not stay in the graph: the shift is the difference between the mean of `x` and that of the scaled
    output of the head.
    """
    node, scale, is_shifted = x.grad_fn, 1.0, False
    while (name := graph.name(node)) not in (*RANGES, "Hardtanh"):
        factor = _factor(node, name)
        if factor is None or not math.isfinite(factor):
            return None
        scale *= factor
        is_shifted |= name in graph.SHIFTING
        node = graph.only_input(node)
    ends = (saved(node, "min_val"), saved(node, "max_val")) if name == "Hardtanh" else RANGES[name]
    shift = _shift(x, node, scale) if is_shifted else 0.0
    if math.isnan(shift) or not all(isinstance(end, int | float) for end in ends):
        return None
    return Head(name, *sorted(shift + scale * end for end in ends))


def _factor(node: Any, name: str) -> float | None:
    """Factor of a node's only input; None if the node does more than reshape, scale or shift it."""
    if graph.only_input(node) is None:
        return None
    if name in graph.SHIFTING:
        return -1.0 if graph.is_subtracted(node) else 1.0
    return factor_of(node) if name in (*graph.SHAPING, *graph.SCALING, "Neg") else None


def _shift(x: Tensor, node: Any, scale: float) -> float:
    """The number added to `scale` times the head's output, NaN if it is not the same for all elements."""
    output = graph.read_saved(node, "result")
    if not isinstance(output, Tensor) or output.numel() != x.numel():
        return math.nan
    x, output = x.detach().double(), output.detach().double() * scale
    if not bool(torch.isclose(x.std(correction=0), output.std(correction=0), rtol=1e-3, atol=1e-6)):
        return math.nan
    return round(float(x.mean() - output.mean()), 6)


def _softmaxes(node: Any) -> Iterator[Any]:
    """Softmax nodes between the loss and the last layers, except those that weigh something else."""
    nodes = graph.walk([node], at_most=MAX_NODES, through=_is_in_loss, nearest_first=True)
    return (at for at in nodes if graph.name(at) in SOFTMAXES)


def _is_in_loss(node: Any) -> bool:
    name = graph.name(node)
    return name not in graph.LAYERS and not (name == "Mul" and len(graph.inputs(node)) > 1)


def _softmax_size(node: Any) -> int:
    """Length of the dimension over which a softmax node normalizes; 0 if unknown."""
    shape, dim = input_shape(node), saved(node, "dim")
    return 0 if dim is None or not shape else shape[dim]


def _label(name: str) -> str:
    return NAMES.get(name, name.lower())


def detached_loss(step: int) -> Observation:
    """A loss without a graph."""
    return Observation(
        "loss.detached",
        step=step,
        text="The loss does not depend on any parameter, so there is nothing to train.",
        causes=(
            "a .detach(), .item() or no_grad between the model and the loss",
            "all parameters are frozen",
        ),
        next_steps=("Follow the model's output to the loss, and print .requires_grad on the way",),
    )


def degenerate_head(layer: str, step: int) -> Observation:
    """A softmax over a single number."""
    return Observation(
        "head.degenerate",
        layer,
        step=step,
        value=1.0,
        text="The softmax before the loss normalizes over a dimension of size 1, so its output is 1 whatever "
        "the model computes, and no gradient reaches the weights.",
        causes=("a softmax on a single output unit, or over the wrong dim",),
        next_steps=(
            "For two classes and one output, remove the softmax and use nn.BCEWithLogitsLoss",
            "For several classes, use one output per class, and a softmax over the dim of the classes",
        ),
    )


def observe_activation(
    graph: LossGraph, layer: str, step: int, is_after_model: bool = False
) -> Iterator[Observation]:
    """A final activation, of the model or after it, before a loss that has its own or needs another one."""
    name, takes = _label(graph.head), graph.takes
    ends = f"a {name}" if name else "a linear layer"
    end = f"The model ends in {ends}, and its output goes to {graph.kind}"
    place = "left in the model"
    if is_after_model:
        layer, place = "", "between the model and the loss"
        end = f"The output of the model goes through {ends} to {graph.kind}"
    is_binary = graph.kind == "binary cross-entropy"
    logits = "BCEWithLogitsLoss" if is_binary else "CrossEntropyLoss"
    raw = f"End the model in a linear layer and use nn.{logits}"
    if graph.head and graph.applies:
        why, advice = HEAD_ADVICE[graph.applies]
        text = f"{end}, {why}."
        cause = f"a {name} {place}, which squeezes the scores and their gradients"
        advice = f"Remove the {name}: {advice}"
    elif takes == "log-probabilities" and graph.head:
        text, cause = f"{end}, which expects log-probabilities.", f"a {name} in place of a log_softmax"
        advice = f"Remove the {name}: use log_softmax, or cross_entropy on the scores"
    elif takes == "probabilities" and (graph.is_raw or graph.head == "Relu"):
        text = (
            f"{end}, which takes its logarithm as if it were a probability; but it is not limited to 0 to 1."
        )
        cause, advice = f"a missing {'sigmoid' if is_binary else 'softmax'}", raw
    elif takes == "probabilities" and graph.head == "Sigmoid" and not is_binary:
        text, cause = (
            f"{end} over several classes, whose probabilities must sum to 1.",
            "a sigmoid, not a softmax",
        )
        advice = raw
    else:
        return
    yield Observation("head.activation", layer, step=step, text=text, causes=(cause,), next_steps=(advice,))


def observe_range(head: Head, layer: str, target: Tensor, step: int) -> Iterator[Observation]:
    """Targets that the head cannot reach, if they are more than one in twenty."""
    y = target.detach().float()
    share = float(((y < head.low - SLACK) | (y > head.high + SLACK)).float().mean())
    if share > MAX_SHARE:
        yield Observation(
            "head.range",
            layer,
            step=step,
            value=share,
            text=f"{share:.0%} of the targets are outside the {head} that the model ends in: they go from "
            f"{float(y.min()):.3g} to {float(y.max()):.3g}.",
            causes=(f"a {_label(head.name)} at the end of a model for other targets",),
            next_steps=(
                f"Remove the {_label(head.name)}, so that a linear layer is last; or scale the targets",
            ),
        )


def broadcast_targets(seen: Compared, step: int) -> Observation:
    """Outputs and targets that broadcasting compares in all pairs."""
    ours, theirs = seen.shapes
    return Observation(
        "label.broadcast",
        step=step,
        value=math.prod(seen.term.shape) / math.prod(ours),
        text=f"The output has shape {ours} and the targets have shape {theirs}: the loss broadcasts them to "
        f"{seen.term.shape}, and compares each output with the targets of all samples.",
        causes=("targets or outputs with a missing, or an extra, dimension of size 1",),
        next_steps=("Give both the same shape: y.unsqueeze(1), or pred.squeeze(1)",),
    )


def observe_classes(graph: LossGraph, target: Tensor, layer: str, step: int) -> Iterator[Observation]:
    """Classes, as 0 and 1 or one-hot, in a loss that compares values."""
    if not _are_classes(target):
        return
    ends = f"the {_label(graph.head)}" if graph.head else "the output"
    error = {"mse": "squared", "mae": "absolute", "huber": "Huber"}[graph.kind]
    weak = {
        "Relu": "; an output of 0 gets no gradient",
        "Sigmoid": "; their gradient vanishes where the model is sure and wrong",
        "Softmax": "; their gradient vanishes where the model is sure and wrong",
    }
    logits = "CrossEntropy" if target.ndim > 1 and target.shape[-1] > 1 else "BCEWithLogits"
    yield Observation(
        "loss.of_values",
        layer,
        step=step,
        text=f"The targets are classes, as 0 and 1, and {ends} is compared with them by {error} errors"
        f"{weak.get(graph.head, '')}.",
        causes=(f"a loss for values, and {ends} as the head of a classifier",),
        next_steps=(f"End the model in a linear layer and use nn.{logits}Loss",),
    )


def _are_classes(y: Tensor) -> bool:
    """Whether targets are both 0 and 1, one for each sample, or rows with a single 1."""
    if y.ndim not in (1, 2) or len(y) < 2 or not bool(((y == 0) | (y == 1)).all()):
        return False
    if y.ndim == 1 or y.shape[1] == 1:
        return bool((y != y.flatten()[0]).any())
    return bool((y.sum(1) == 1).all())


def observe_bits(target: Tensor, step: int) -> Iterator[Observation]:
    """Targets of a binary cross-entropy that are not between 0 and 1."""
    y = target.detach().float()
    low, high = float(y.min()), float(y.max())
    if low < -SLACK or high > 1 + SLACK:
        share = float(((y < -SLACK) | (y > 1 + SLACK)).float().mean())
        yield Observation(
            "label.range",
            step=step,
            value=share,
            text=f"{share:.0%} of the targets of the binary cross-entropy are not in 0 to 1: they go from "
            f"{low:.3g} to {high:.3g}, so the loss has no minimum.",
            causes=("class indices, or values of a regression, in a loss for probabilities",),
            next_steps=(
                "For several classes, use one output per class and nn.CrossEntropyLoss",
                "For a regression, use nn.MSELoss; map labels of -1 and 1 to 0 and 1",
            ),
        )
