"""head.axis, head.degenerate: a softmax over a wrong axis, or over a single number."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.core import graph
from hookcb.core.torch_private import input_shape, saved
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.loss_terms import main_term, read_terms
from hookcb.diagnosis.measurements.output import Output
from hookcb.diagnosis.run import Run

FEATURES = {"Convolution": 1, "Addmm": -1, "Mm": -1, "Linear": -1}  # axis of the features by layer
MAX_ELEMENTS = 4_000_000  # of the scores that are followed


class ClassScores(NamedTuple):
    """The scores of which a cross-entropy takes the softmax, followed from the last layer."""

    features: Tensor  # number of the layer's feature at each place of the tensor that the softmax gets
    n_features: int  # of the layer
    axis: int  # over which the softmax runs
    is_direct: bool  # whether the loss gets the output of the softmax as it is


@fault("head.axis", Site.LOSS, needs="batch graph", leads_to=EVERYTHING, exact=True)
class ClassAxis(Fault):
    """A cross-entropy over another axis than that of the classes, as after a view in place of a permute.

    Exact: which output of the last layer is at each place of the tensor that the softmax before the loss
    gets, followed through views, permutes and slices of the first graph. Along the axis of the classes it
    must be the same outputs at all positions. Or a log_softmax over another axis than torch's loss takes.
    Tensors of up to 4 million scores are followed; an axis of positions, as of a softmax over an image, is
    not meant.

    Source: torch.nn.CrossEntropyLoss, "Shape"; torch.Tensor.view, which keeps the order of the elements.
    """

    headline = "The softmax runs over the wrong axis"
    passed = "classes on another axis"
    unless = "too little was seen of the axis of the classes"

    def on_first_graph(self, run: Run) -> None:
        if (scores := class_scores(run.loop.loss_node)) is None:
            return
        self.unless = ""
        shape, axis = tuple(scores.features.shape), scores.axis
        size = "×".join(map(str, shape))
        classes = min(1, len(shape) - 1)  # of torch's losses
        if len(shape) == 2 and shape[0] == shape[1] and axis == 0:
            return  # scores of all pairs of samples, as of a contrastive loss, may be normalized both ways
        if scores.is_direct and axis != classes:
            text, cause, next_step = (
                f"log_softmax runs over dimension {axis} of a {size} output, but the loss takes the "
                f"{shape[classes]} classes on dimension {classes}.",
                "a wrong dim, as in nn.LogSoftmax(dim=0), which normalizes over the samples",
                f"Use dim={classes}, or pass the raw scores to F.cross_entropy",
            )
        elif _is_mixed(scores):
            text, cause, next_step = (
                f"The loss takes {shape[axis]} classes on dimension {axis} of a {size} tensor, but "
                "there the outputs of the last layer at different positions are mixed: a reshape has cut "
                "across them.",
                "view or reshape in place of permute or transpose before the loss",
                "Move the axis of the classes with permute or transpose, and reshape only then",
            )
        else:
            return
        self.see(text, value=1.0, causes=(cause,), next_steps=(next_step,))


@fault("head.degenerate", Site.LOSS, needs="batch", leads_to=EVERYTHING, exact=True)
class DegenerateHead(Fault):
    """A softmax or log_softmax over a dimension of size 1: its output is 1 whatever the weights are.

    Exact: length of that dimension, in the autograd graph between the loss and the last layer.

    Source: torch.nn.Softmax, whose outputs along `dim` sum to 1.
    """

    headline = "The softmax runs over one number"
    passed = "a softmax over one number"
    uses = (Loss, Output)

    def on_first_graph(self, run: Run) -> None:
        if (output := run.measured(Output)).is_degenerate:
            self.see(
                "The softmax before the loss normalizes over a dimension of size 1, so its output is 1 "
                "whatever the model computes, and no gradient reaches the weights.",
                at=output.layer,
                when=run.step,
                value=1.0,
                causes=("a softmax on a single output unit, or over the wrong dim",),
                next_steps=(
                    "For two classes and one output, remove the softmax and use nn.BCEWithLogitsLoss",
                    "For several classes, use one output per class, and a softmax over the dim of the "
                    "classes",
                ),
            )

    def findings(self, run: Run) -> Iterator[Result]:
        return self.told(run, self.seen, "" if run.measured(Loss).is_open else run.why_not("graph"))


def class_scores(node: Any) -> ClassScores | None:
    """The scores of a loss, None if it is another one, or if they could not be followed."""
    main = main_term(read_terms(node))
    if main is None or main.kind != "cross-entropy" or main.node is None:
        return None
    given = main.node.next_functions[0][0]
    softmax = graph.peel(given, graph.SAME_ORDER)
    if graph.name(softmax) != "LogSoftmax" or (found := _features(softmax)) is None:
        return None
    axis = saved(softmax, "dim", 1) % max(1, len(input_shape(softmax)))
    return ClassScores(*found, axis, softmax is given)


def _features(softmax: Any) -> tuple[Tensor, int] | None:
    """Number of the layer's feature for each score that the softmax gets, and the number of features.

    None if there is another operation between them, or the scores are too many.
    """
    *path, node = graph.chain(graph.inputs(softmax)[0], graph.MOVING)
    shape = input_shape(node)
    if graph.name(node) not in FEATURES or len(shape) < 2 or math.prod(shape) > MAX_ELEMENTS:
        return None
    axis = FEATURES[graph.name(node)] % len(shape)
    sizes = [n if i == axis else 1 for i, n in enumerate(shape)]
    scores = torch.arange(shape[axis], dtype=torch.int32, device="cpu").view(sizes).expand(shape)
    for at in reversed(path):
        if (moved := _moved(scores, at)) is None or tuple(moved.shape) != input_shape(at):
            return None
        scores = moved
    return scores, shape[axis]


def _moved(x: Tensor, node: Any) -> Tensor | None:
    """A tensor after the operation of a node, None if that does more than move elements."""
    name, shape = graph.name(node), input_shape(node)
    if name == "Transpose":
        return x.transpose(saved(node, "dim0", 0), saved(node, "dim1", 0))
    if name == "Permute":
        return x.permute(saved(node, "dims"))
    if name == "T":
        return x.t()
    if name == "Slice":
        dim, start = saved(node, "dim", 0), saved(node, "start", 0)
        start = max(0, start + x.shape[dim] if start < 0 else start)
        return x.narrow(dim, start, shape[dim]) if saved(node, "step", 1) == 1 else None
    return x.reshape(shape) if math.prod(shape) == x.numel() else None


def _is_mixed(scores: ClassScores) -> bool:
    """Whether the scores along the axis are not the same features everywhere, or a part of them.

    An axis of positions is meant, as in a softmax over an image; so is one longer than the features.
    """
    rows = scores.features.movedim(scores.axis, -1).flatten(0, -2)
    n, n_features = rows.shape[1], scores.n_features
    if n < 2 or n_features < 2 or n > n_features or not len(rows):
        return False
    steps = rows - rows[:, :1]
    if n != n_features and not bool(steps.any()):
        return False
    return not bool((steps == steps[:1]).all()) or len(set(steps[0].tolist())) < n
