"""Runs a batch again without torch.compile, to read the graph of the loss."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookcb.core.batch import parts
from hookcb.diagnosis.measurements.external_batch import ExternalBatch
from hookcb.diagnosis.measurements.loss_graph import LossGraph, head_of, read_loss
from hookcb.nans.replay import Autocast, BatchStarts, as_at_start


def graph_of_original(
    batch: Any, compiled: LossGraph, autocast: Sequence[Autocast] | None
) -> tuple[LossGraph, Any]:
    """Runs the batch without torch.compile and reads the graph of its loss; leaves no trace.

    Args:
        batch: learner in the middle of a batch, or an `ExternalBatch`, which has no loss function.
        compiled: graph of the loss with torch.compile.
        autocast: state of autocast in the forward, if known.

    Returns:
        The graph without torch.compile, and the output of a learner's model.

    Raises:
        Exception: Any exception of the model or the loss function.
    """
    start = BatchStarts().note(batch)
    start.autocasts = list(autocast or start.autocasts)
    # saved tensors are dropped, so that the run needs no more memory than inference
    dropped = torch.autograd.graph.saved_tensors_hooks(_number_of, _some_number)
    with as_at_start(batch, start), start.autocast(), dropped:
        batch.pred = batch.predict()
        if isinstance(batch, ExternalBatch):
            node = _only_output(batch.pred)
            head, hidden_by = ("", compiled.hidden_by) if node is None else head_of(node)
            return compiled._replace(head=head, hidden_by=hidden_by), None
        batch.loss = batch.get_loss()
        return read_loss(batch.loss.grad_fn), batch.pred


def _only_output(pred: Any) -> Any:
    """Node of the model's output; None if there are several, as any of them may be the loss's input."""
    outputs = [x for _, x in parts(pred) if isinstance(x, Tensor) and x.requires_grad]
    return outputs[0].grad_fn if len(outputs) == 1 else None


def _number_of(x: Tensor) -> Tensor | None:
    return x.detach() if x.numel() == 1 else None


def _some_number(x: Tensor | None) -> Tensor:
    return torch.empty(0, device="cpu") if x is None else x
