"""Runs a batch again without torch.compile, to read the graph of the loss."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.batch import called, parts
from hookcb.core.restore import preserve_modes
from hookcb.diagnosis.measurements.loss_graph import LossGraph, head_of, read_loss
from hookcb.diagnosis.reader import Way
from hookcb.nans.replay import Autocast, BatchStarts, as_at_start


class ExternalBatch:
    """Current batch of an external loop, with the interface of a Learner that a replay uses.

    The loss function is unknown; the mean of the model's outputs is used instead.
    """

    loss_func = None
    loss: Any = None

    def __init__(self, loop: Any) -> None:
        self.model: nn.Module = loop.model
        self.way: Way = loop.way
        self.replays: bool = loop.replays
        self.xb, self.yb, self.pred = loop.xb, (), loop.pred
        self.epoch, self.iter = loop.epoch, loop.iter

    def predict(self) -> Any:
        return called(self.model, self.xb)

    def get_loss(self) -> Tensor:
        outputs = [x for _, x in parts(self.pred) if isinstance(x, Tensor) and x.is_floating_point()]
        return torch.stack([x.float().mean() for x in outputs]).sum()

    def restored(self) -> AbstractContextManager[None]:
        return preserve_modes(self.model)


def graph_of_original(
    batch: Any, compiled: LossGraph, autocast: Sequence[Autocast] | None
) -> tuple[LossGraph, Any]:
    """The graph of the loss without torch.compile, and the output of a learner's model; leaves no trace.

    The batch is a learner in the middle of one, or an `ExternalBatch`, which has no loss function.
    """
    start = BatchStarts().note(batch)
    start.autocasts = list(autocast or start.autocasts)
    # saved tensors are dropped, so that the run needs no more memory than inference
    dropped = torch.autograd.graph.saved_tensors_hooks(_number_of, _some_number)
    with as_at_start(batch, start), start.autocast(), dropped:
        batch.pred = batch.predict()
        if isinstance(batch, ExternalBatch):
            outputs = [x for _, x in parts(batch.pred) if isinstance(x, Tensor) and x.requires_grad]
            node = outputs[0].grad_fn if len(outputs) == 1 else None  # any of several may be the loss's input
            head, hidden_by = ("", compiled.hidden_by) if node is None else head_of(node)
            return compiled._replace(head=head, hidden_by=hidden_by), None
        batch.loss = batch.get_loss()
        return read_loss(batch.loss.grad_fn), batch.pred


def _number_of(x: Tensor) -> Tensor | None:
    return x.detach() if x.numel() == 1 else None


def _some_number(x: Tensor | None) -> Tensor:
    return torch.empty(0, device="cpu") if x is None else x
