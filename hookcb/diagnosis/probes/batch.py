"""What the inputs and targets of a batch tell."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts
from hookcb.diagnosis.evidence import Observation
from hookcb.diagnosis.probes.loss_graph import LossGraph

COLUMNS = ("std", "rms", "nonfinite", "differs")  # `differs`: whether any two samples do
REFUSED = re.compile(r"Target (-?\d+) is out of bounds")  # of cross-entropy
FEWEST = 3  # batches that must be constant


def input_numbers(xb: Any) -> Tensor | None:
    """`COLUMNS` of the inputs of a batch, float32 `(4,)` on their device; None where there is no tensor.

    Standard deviation and root mean square of the first float tensor with dimensions, NaN without one; the
    number of elements that are not finite, of all; whether samples differ, NaN of a single one.
    """
    tensors = [x.detach() for _, x in parts(xb) if isinstance(x, Tensor) and has_stats(x) and x.numel()]
    if not tensors:
        return None
    floats = [x for x in tensors if x.is_floating_point()]
    nothing = torch.full((), math.nan, device=tensors[0].device)
    std = rms = nothing
    bad = torch.zeros((), device=tensors[0].device)
    if floats:
        first = next((x for x in floats if x.ndim), nothing).float()  # a number beside them has no scale
        std, rms = first.std(correction=0), first.square().mean().sqrt()
        bad = torch.stack([x.isfinite().logical_not().sum().to(bad.device) for x in floats]).sum().float()
    several = [x for x in tensors if x.ndim and len(x) > 1]
    differs = [_differs(x).to(bad.device) for x in several]
    return torch.stack([std, rms, bad, torch.stack(differs).any().float() if differs else nothing])


def _differs(x: Tensor) -> Tensor:
    """Whether any sample differs from the first; NaN is like NaN."""
    first = x[:1]
    return ((x != first) & ~((x != x) & (first != first))).any()


def observe_inputs(steps: list[int], numbers: list[list[float]], is_harmful: bool) -> Iterator[Observation]:
    """What the numbers of the batches looked at say; NaN is a note where nothing comes of it.

    A model may take NaN for a value that is missing, and deal with it.
    """
    bad = [(step, row[2]) for step, row in zip(steps, numbers, strict=True) if row[2] > 0]
    if bad:
        step, n = bad[0]
        found = nonfinite_input(step, n)
        yield found if is_harmful else replace(found, severity="info")
    known = [(step, row[3]) for step, row in zip(steps, numbers, strict=True) if not math.isnan(row[3])]
    if len(known) >= FEWEST and not any(differs for _, differs in known):
        yield Observation(
            "input.constant",
            step=known[0][0],
            value=0.0,
            text=f"all samples of a batch are the same, in each of the {len(known)} batches looked at, so "
            "there is nothing to tell them apart by.",
            causes=("the dataset gives the same item each time, or inputs are cleared or scaled to nothing",),
            next_steps=("print two samples of your dataset, and follow them through your transforms",),
        )


def nonfinite_input(step: int, n: float) -> Observation:
    """NaN or infinities in the inputs."""
    return Observation(
        "input.nonfinite",
        step=step,
        value=n,
        text=f"the inputs of batch {step} hold {n:,.0f} NaN or infinite number{'s' * (n != 1)}.",
        causes=("missing values in the data, or a division by zero in a transform",),
        next_steps=("find these samples with torch.isfinite(x), then fill or drop them",),
    )


def observe_labels(pred: Any, yb: Any, error: BaseException, step: int) -> Iterator[Observation]:
    """Class indices that the scores have no place for, where the loss has refused them.

    What a loss ignores, as 255 in segmentation, may be out of range; so only an IndexError makes it a fault.

    Args:
        pred: scores, `(N, C, …)`.
        yb: targets; the first integer tensor counts.
        error: what has ended the training.
        step: number of the batch.
    """
    if not isinstance(error, IndexError):
        return
    told = REFUSED.search(str(error))
    n_classes, high = _range_of(pred, yb)
    worst = int(told[1]) if told else high
    if worst is None or not (told or (n_classes is not None and worst >= n_classes)):
        return
    most = (
        f"; the model gives scores of {n_classes} classes, so labels are 0 to {n_classes - 1}"
        if n_classes
        else ""
    )
    yield Observation(
        "label.out_of_range",
        step=step,
        value=float(worst),
        text=f"a label of batch {step} is {worst}, for which there is no score{most}.",
        causes=("labels that count from 1, or a last layer with too few outputs",),
        next_steps=(
            f"give the last layer {worst + 1} outputs, or map labels to what it has"
            if worst >= 0
            else "map labels to 0 and above, or pass ignore_index to the loss",
        ),
    )


def _range_of(pred: Any, yb: Any) -> tuple[int | None, int | None]:
    """Number of classes that there are scores of, and the largest label; None where not known."""
    scores = _scores(pred)
    labels = next((y for _, y in parts(yb) if isinstance(y, Tensor) and y.dtype == torch.int64), None)
    if scores is None or labels is None or not labels.numel():
        return None, None
    return _n_classes(scores, labels), int(labels.max())


def _scores(pred: Any) -> Tensor | None:
    """The first float tensor of what the model has given."""
    return next((x for _, x in parts(pred) if isinstance(x, Tensor) and x.is_floating_point()), None)


def _n_classes(scores: Tensor, labels: Tensor) -> int | None:
    if scores.ndim == labels.ndim + 1:
        of_first, of_last = scores.shape[:1] + scores.shape[2:], scores.shape[:-1]
        return (
            scores.shape[1]
            if of_first == labels.shape
            else scores.shape[-1]
            if of_last == labels.shape
            else None
        )
    return None


def guess_of(graph: LossGraph, pred: Any, yb: Any) -> float:
    """The loss of guessing: ln C of cross-entropy, of MSE the mean square of the targets; else NaN."""
    scores = _scores(pred)
    targets = next((y for _, y in parts(yb) if isinstance(y, Tensor)), None)
    if scores is None or not graph.is_pure:
        return math.nan
    if graph.kind == "cross-entropy":
        n = None if targets is None else _n_classes(scores, targets)
        n = n or (scores.shape[-1] if scores.ndim == 2 else None)
        return graph.scale * math.log(n) if n else math.nan
    if graph.kind == "binary cross-entropy":
        return graph.scale * math.log(2)
    if targets is not None and graph.kind == "mse" and targets.is_floating_point():
        is_alike = targets.shape == scores.shape
        return graph.scale * float(targets.float().square().mean()) if is_alike else math.nan
    return math.nan


def constant_of(graph: LossGraph, yb: Any) -> float:
    """The loss of the best constant for the targets of a batch: their entropy, or variance; NaN if unknown.

    Targets of a batch that are all the same have a constant without loss: then it is 0.
    """
    y = next((y for _, y in parts(yb) if isinstance(y, Tensor) and y.ndim and y.numel()), None)
    if y is None or not graph.is_pure or y.is_complex():
        return math.nan
    if graph.kind == "mse":
        return graph.scale * float(y.detach().float().var(0, correction=0).mean())
    if graph.kind == "cross-entropy":
        return graph.scale * float(_entropy(_class_shares(y.detach())).sum())
    if graph.kind == "binary cross-entropy":
        p = y.detach().float().mean(0)
        return graph.scale * float((_entropy(p) + _entropy(1 - p)).mean())
    return math.nan


def _class_shares(y: Tensor) -> Tensor:
    """Of class indices, of which negative ones are ignored, or of soft targets `(N, C, …)`."""
    if y.is_floating_point():
        return y.transpose(0, 1).flatten(1).float().mean(1) if y.ndim > 1 else y.float()
    counts = torch.bincount(y[y >= 0].long())
    return counts / counts.sum()


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p)


HEAD_ADVICE = {  # by what the loss applies itself
    "softmax": ("cross-entropy applies a softmax itself", "give it the scores as they are, logits"),
    "sigmoid": (
        "this loss applies a sigmoid itself",
        "give it the scores as they are, or use binary_cross_entropy",
    ),
    "": ("NLLLoss takes logarithms of probabilities", "use log_softmax, or cross_entropy on the scores"),
}


def observe_head(graph: LossGraph, layer: str, step: int) -> Iterator[Observation]:
    """An activation whose output goes to a loss that applies its own, or needs another."""
    is_nll = graph.kind == "nll" and graph.head in ("Softmax", "Sigmoid")
    if not graph.head or not (graph.applies or is_nll):
        return
    why, what = HEAD_ADVICE[graph.applies]
    name = {"Relu": "ReLU"}.get(graph.head, graph.head.lower())
    yield Observation(
        "head.activation",
        layer,
        step=step,
        text=f"the model ends in a {name}, and its output goes to {graph.kind}; {why}.",
        causes=(f"the {name} squeezes the scores, and gradients with them",),
        next_steps=(f"take the {name} away: {what}",),
    )
