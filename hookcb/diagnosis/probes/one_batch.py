"""Inspects one batch of a learner that was trained without Diagnose, to complete its records."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from hookcb.core.batch import split_batch
from hookcb.core.callback import Callback
from hookcb.core.events import Event
from hookcb.core.restore import preserve_state
from hookcb.diagnosis.fault import FAULTS
from hookcb.diagnosis.faults.model.dropout_scores import ScoresDropout
from hookcb.diagnosis.faults.model.linear_stack import LinearStack
from hookcb.diagnosis.probes.batch import (
    column_squares,
    guess_of,
    input_numbers,
    observe_inputs,
    observe_scaled_labels,
)
from hookcb.diagnosis.probes.first_batch import first_batch, preserve_loader, why_not_readable
from hookcb.diagnosis.probes.head import is_comparison_known, observe_output
from hookcb.diagnosis.probes.loss_graph import read_loss
from hookcb.diagnosis.probes.model import observe_model, observe_optimizers
from hookcb.diagnosis.probes.nan import find_origin, is_from_weights
from hookcb.diagnosis.run import Run, Series
from hookcb.hooks.hook import Hook
from hookcb.hooks.modules import device_of, has_uninitialized, is_leaf, named_modules
from hookcb.nans.replay import BatchStarts, as_at_start

SOURCES = ("batch", "model", "graph")
BEFORE_LOSS = (Event.BEFORE_BATCH, Event.AFTER_PRED)  # a callback may change the loss's input there


def add_preflight(evidence: Run, learn: Any, cbs: list[Callback]) -> None:
    """Adds the evidence that one training batch gives at any time of a training, and leaves no trace.

    It runs a forward, the loss and its gradients, with the model in train mode and without torch.compile.
    Weights, buffers, gradients, modes, random state, the optimizer and the loader are restored. Checks that
    are meaningful only before training are left out.

    Args:
        evidence: records of the callbacks; if the batch cannot be run its `missing` says why.
        learn: the learner, outside of a fit.
        cbs: its callbacks, also from its last fit; none of them is called.
    """
    why = _why_not(learn, cbs)
    if not why:
        try:
            _inspect(evidence, learn)
        except Exception as error:  # the batch, model and loss function are the user's own
            why = f"inspecting one batch failed with {type(error).__name__}: {str(error)[:80]}"
    if why:
        evidence.missing |= dict.fromkeys(SOURCES, why)


def _why_not(learn: Any, cbs: list[Callback]) -> str:
    """Reason not to run a batch, "" if there is none."""
    if learn.fitting:
        return "a fit is running, which another batch would disturb"
    if has_uninitialized(learn.model) or not any(p.requires_grad for p in learn.model.parameters()):
        return "no parameter of the model requires a gradient"
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "other processes take part in each call of the model"
    for cb in cbs:
        is_users = not type(cb).__module__.startswith("hookcb.") or type(cb) is Callback
        if is_users and any(cb.handler(event) is not None for event in BEFORE_LOSS):
            return f"{type(cb).__name__} acts before the loss, and inspecting one batch would leave it out"
    return why_not_readable(learn.dls.train)


def _inspect(evidence: Run, learn: Any) -> None:
    found, loader = Run(loop=learn), learn.dls.train
    modules = [m for m in (learn.model, learn.loss_func) if isinstance(m, nn.Module)]
    with preserve_loader(loader), learn.restored(), preserve_state(*modules):
        batch = copy.deepcopy(first_batch(loader))  # models may change their input in place
        learn.xb, learn.yb = split_batch(batch, device_of(learn.model), learn.n_inp)
        with as_at_start(learn, BatchStarts().note(learn)):
            learn.model.train()
            _observe_model(found, learn)
            _observe_batch(found, learn, step=evidence.n_batches)
    if any(p.first_bad is not None for p in evidence.params.values()) and "scaler" in evidence.absent:
        _leave_out_later(found)
    at_any_time = {"batch", "model", "graph", "optimizers"}.issuperset
    # a fault at the end may have been there from the beginning, and then explains the others
    lasting = [replace(x, step=None) for x in found.observations if at_any_time(FAULTS[x.code].needs)]
    evidence.observations += lasting
    evidence.sources |= found.sources
    evidence.missing |= found.missing
    evidence.observed |= found.observed
    evidence.loss_kind, evidence.loss_kinds, evidence.guess = found.loss_kind, found.loss_kinds, found.guess
    evidence.input_std, evidence.input_rms = found.input_std, found.input_rms
    evidence.input_columns = found.input_columns
    evidence.parts |= found.parts
    evidence.notes.append("one more batch after the training")


def _leave_out_later(found: Run) -> None:
    """Leaves out what this batch cannot say: how NaN began in an earlier step, of which there are records."""
    found.observations = [x for x in found.observations if not is_from_weights(x)]
    found.observed.discard("inputs")
    found.missing["inputs"] = "the batch of the first NaN was not inspected; that needs Diagnose"


def _observe_model(found: Run, learn: Any) -> None:
    found.observations += observe_model(learn.model)
    found.measured(LinearStack).on_model(found)
    found.sources.add("model")
    if learn.opt is not None:
        found.observations += observe_optimizers(learn.model, [learn.opt])
        found.observed.add("groups of the optimizer")


def _observe_batch(found: Run, learn: Any, step: int) -> None:
    numbers, squares = input_numbers(learn.xb), column_squares(learn.xb)
    with _last_called(learn.model) as called:
        learn.pred = learn.predict()
    learn.loss = learn.get_loss()
    is_finite = _is_finite(learn)
    found.sources.add("batch")
    found.observed |= {"loss"} | ({"backward"} if is_finite else set())
    if not is_finite:
        found.observations.append(
            find_origin(learn, "The loss or a gradient is not finite", True, step, None)
        )
    if numbers is not None:
        row = numbers.tolist()
        found.observed |= {"inputs"} | ({"samples that differ"} if row[-1] > 0 else set())
        found.observations += observe_inputs([step], [row], is_harmful=not is_finite)
        found.input_std, found.input_rms = Series.of([0], row[:1]), Series.of([0], row[1:2])
    if squares is not None:
        found.input_columns = [squares.sqrt().tolist()]
    _observe_loss(found, learn, called[-1] if called else "")


def _observe_loss(found: Run, learn: Any, last: str) -> None:
    graph = read_loss(learn.loss.grad_fn)
    found.guess = guess_of(graph, learn.pred, learn.yb)
    found.loss_kind, found.loss_kinds = graph.sure_kind, graph.kinds
    found.observations += observe_output(graph, learn.loss.grad_fn, learn.pred, learn.yb, last, 0)
    found.measured(ScoresDropout).look(learn.loss.grad_fn, last, None)
    found.observations += observe_scaled_labels(learn.xb, learn.yb, 0)
    found.measured(LinearStack).on_first_graph(found)
    found.observed |= {"targets"} if learn.yb else set()
    is_known = is_comparison_known(graph, learn.loss.grad_fn, learn.pred, learn.yb)
    found.observed |= {"output beside its targets"} if is_known else set()
    found.observed |= {"penalty"} if graph.has_penalty else set()
    found.observed |= set() if graph.hidden_by else {"graph"}
    if graph.why_hidden:
        found.missing["graph"] = graph.why_hidden
    else:
        found.sources.add("graph")


def _is_finite(learn: Any) -> bool:
    """Whether the loss and all gradients are finite; no parameter's `.grad` is changed."""
    loss = learn.loss
    if not math.isfinite(float(loss.detach())):
        return False
    if loss.grad_fn is None:
        return True
    params = [p for p in learn.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    return all(bool(_values(grad).isfinite().all()) for grad in grads if grad is not None)


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


@contextmanager
def _last_called(model: nn.Module) -> Iterator[list[str]]:
    """List of the names of the leaves that are called in the block, in their order."""
    called: list[str] = []
    hooks: list[Hook] = []
    try:
        for name, m in named_modules(model).items():
            if is_leaf(m) and not isinstance(m, torch.jit.ScriptModule):
                hooks.append(Hook(m, lambda *_, name=name: called.append(name), detach=False))
        yield called
    finally:
        for hook in hooks:
            hook.remove()
