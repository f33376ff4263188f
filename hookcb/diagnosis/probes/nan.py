"""Finds the origin of the first NaN or infinity by running the batch again."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.ranks import is_sharded
from hookcb.core.restore import preserve_modes
from hookcb.core.text import as_layer
from hookcb.diagnosis.reader import ADVICE, Way, way_of
from hookcb.diagnosis.run import Observation
from hookcb.hooks.modules import named_modules
from hookcb.nans.loss_operation import operation_in_loss
from hookcb.nans.nonfinite import tensors_in
from hookcb.nans.replay import Autocast, BatchStarts
from hookcb.nans.report import BATCH, LOSS, MODEL, NanReport
from hookcb.nans.search import search

FROM_WEIGHTS = "a gradient that was not finite, or a step that was too large"


class ExternalBatch:
    """Current batch of an external loop, with the interface of a Learner that a replay uses.

    The loss function is unknown; the mean of the model's outputs is used instead.
    """

    loss_func = None
    loss: Any = None

    def __init__(self, loop: Any) -> None:
        self.model: nn.Module = loop.model
        self.way: Way = loop.way
        self.xb, self.yb, self.pred = loop.xb, (), loop.pred
        self.epoch, self.iter = loop.epoch, loop.iter

    def predict(self) -> Any:
        """The model's output."""
        return self.model(*self.xb) if isinstance(self.xb, tuple) else self.model(**self.xb)

    def get_loss(self) -> Tensor:
        """Mean of the model's float outputs, which replaces the loss."""
        outputs = [x for _, x in parts(self.pred) if isinstance(x, Tensor) and x.is_floating_point()]
        return torch.stack([x.float().mean() for x in outputs]).sum()

    def restored(self) -> AbstractContextManager[None]:
        """Restores the train or eval mode of all modules after the block."""
        return preserve_modes(self.model)


def find_origin(
    learn: Any,
    noticed: str,
    gradient: bool,
    step: int,
    autocast: Sequence[Autocast] | None,
    loss_node: Any = None,
) -> Observation:
    """Runs the batch again to find the operation that produced the first non-finite number.

    Of a loss function that is unknown, it reads the graph instead.

    Args:
        learn: learner in the middle of a training batch, which is left as it was, or an `ExternalBatch`.
        noticed: observation to begin the message with.
        gradient: whether that was a gradient.
        step: number of the batch.
        autocast: state of autocast in the forward, if known.
        loss_node: autograd node of the loss, if its graph may still be read.
    """
    is_external = isinstance(learn, ExternalBatch)
    advice = ADVICE["NaN"][way_of(learn.way if is_external else "learner")]
    if layers := _nonfinite_layers(learn.model):
        return _from_weights(layers, noticed, step, advice)
    if is_sharded(learn.model):
        text = (
            f"{noticed} at step {step}. To find where it began, all ranks would have to run the batch again."
        )
        return Observation("nonfinite.first", step=step, text=text, next_steps=(advice,))
    start = BatchStarts().note(learn)
    start.autocasts = list(autocast or start.autocasts)
    report = search(learn, start, noticed, gradient)
    if report.where == BATCH:
        return Observation("input.nonfinite", step=step, value=float(_n_bad(learn.xb)))
    is_behind = report.repeated and report.where != LOSS
    if is_external and not is_behind:
        report = replace(report, op=operation_in_loss(loss_node, graph.roots(learn.pred)))
    return _from_report(report, is_external, noticed, step, advice)


def _n_bad(xb: Any) -> int:
    return sum(int(x.isfinite().logical_not().sum()) for _, x in tensors_in(xb))


def _nonfinite_layers(model: nn.Module) -> list[str]:
    """Layers with a parameter that is already non-finite, in the order of the model."""
    return [
        name
        for name, m in named_modules(model).items()
        if any(not bool(x.isfinite().all()) for _, x in tensors_in(list(m.parameters(recurse=False))))
    ]


def _from_weights(layers: list[str], noticed: str, step: int, advice: str) -> Observation:
    """Observation of non-finite weights; the gradient that caused them came from behind the last layer."""
    last = layers[-1]
    return Observation(
        "nonfinite.first",
        last,
        step=step,
        value=float(len(layers)),
        text=f"{noticed} at step {step}: weights of {len(layers)} layer{'s' * (len(layers) != 1)} became NaN "
        f"or infinite in an earlier step; {as_layer(last)} is the last of them before the loss.",
        causes=(FROM_WEIGHTS,),
        next_steps=(advice,),
    )


def is_from_weights(observation: Observation) -> bool:
    """Whether the NaN was in the weights already, so that it began in an earlier step."""
    return observation.code == "nonfinite.first" and FROM_WEIGHTS in observation.causes


def _from_report(report: NanReport, is_external: bool, noticed: str, step: int, advice: str) -> Observation:
    is_layer = report.where not in ("", MODEL, LOSS)
    layer = report.where.partition("#")[0].partition("[")[0] if is_layer else ""
    by = f"{report.op} in " if report.op else ""
    line = f", at {report.line}: {report.code}" if report.line and report.code else ""
    if report.repeated and not (report.where == LOSS and is_external):
        kind = f" ({report.type})" if report.type else ""
        origin = f"{by}the {report.direction} of {as_layer(report.where)}{kind}"
        how = f"The first NaN or infinity comes from {origin}, with finite inputs{line}"
    elif is_external and report.op:
        how = f"The model's output is finite; the first NaN or infinity comes from {report.op} in the loss"
    elif is_external:
        how = "The model's output is finite, so it comes from the loss, or from code between the two"
    else:
        how = "It did not repeat when the batch was run again"
    hint = report.hint.partition(": ")
    return Observation(
        "nonfinite.first",
        layer,
        step=step,
        text=f"{noticed} at step {step}. {how}.",
        causes=(hint[0],) if hint[0] else (),
        next_steps=(hint[2] or advice,),
    )
