"""Inspects one batch of a learner that was trained without Diagnose, to complete its records."""

import copy
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, IterableDataset

from hookcb.core.batch import split_batch
from hookcb.core.callback import Callback
from hookcb.core.events import Event
from hookcb.core.randomness import parts_of, saves_itself
from hookcb.core.restore import preserve_state
from hookcb.diagnosis.fault import FAULTS, Fault, parts_for
from hookcb.diagnosis.faults.labels.scaled import ScaledLabels
from hookcb.diagnosis.faults.model.dropout import ExtremeDropout, ScoresDropout
from hookcb.diagnosis.faults.model.initialization import Symmetric
from hookcb.diagnosis.faults.model.linear_stack import LinearStack
from hookcb.diagnosis.faults.steps.duplicated import Duplicated
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.origin import Found, Origin, find_origin
from hookcb.diagnosis.measurements.output import Output
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run, Series, Skipped
from hookcb.hooks.dry_run import preserve_loader
from hookcb.hooks.hook import Hook
from hookcb.hooks.modules import device_of, has_uninitialized, is_leaf, named_modules
from hookcb.nans.replay import BatchStarts, as_at_start

SOURCES = ("batch", "model", "graph")
OF_LOSS = (  # faults that the graph of the loss shows at any time
    *("head.activation", "head.degenerate", "head.range", "label.range", "label.broadcast"),
    *("loss.detached", "loss.of_values"),
)
BEFORE_LOSS = (Event.BEFORE_BATCH, Event.AFTER_PRED)  # a callback may change the loss's input there


def add_preflight(evidence: Run, learn: Any, cbs: list[Callback]) -> None:
    """Adds the evidence that one training batch gives at any time of a training, and leaves no trace.

    It runs a forward, the loss and its gradients, with the model in train mode and without torch.compile.
    Weights, buffers, gradients, modes, random state, the optimizer and the loader are restored. Checks that
    are meaningful only before training are left out. If the batch cannot be run, `Run.reasons` says why.

    Args:
        evidence: records of the callbacks.
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
        evidence.lack(Skipped(why), *SOURCES)


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
    if any(p.first_bad is not None for p in evidence.params.values()) and "scaler" in evidence.reasons:
        # this batch cannot say how NaN began in an earlier step, of which there are records
        if (origin := found.measured(Origin)).found.is_from_weights:
            origin.found = Found()
        found.lack(Skipped("the batch of the first NaN was not inspected; that needs Diagnose"), "inputs")
    # a fault at the end may have been there from the beginning, and then explains the others
    for part in found.parts.values():
        if isinstance(part, Fault) and {"batch", "model", "graph", "optimizers"}.issuperset(part.needs):
            part.seen = [replace(x, step=None, last_step=None) for x in part.seen]
    evidence.sources |= found.sources
    for what, reason in found.reasons.items():
        evidence.lack(reason, what)
    evidence.parts |= found.parts
    evidence.notes.append("one more batch after the training")


def _observe_model(found: Run, learn: Any) -> None:
    found.sources.add("model")
    found.measured(LinearStack).on_model(found)
    found.measured(Symmetric).on_model(found)
    found.measured(ExtremeDropout).on_model(found)
    if learn.opt is not None:
        found.measured(Steps).optimizers = {id(learn.opt): learn.opt}
        found.measured(Duplicated).on_end(found)


def _observe_batch(found: Run, learn: Any, step: int) -> None:
    inputs = found.measured(Inputs)
    inputs.add(step, learn.xb)
    with _last_called(learn.model) as called:
        learn.pred = learn.predict()
    learn.loss = learn.get_loss()
    is_finite = _is_finite(learn)
    found.sources.add("batch")
    origin = found.measured(Origin)
    origin.has_looked, origin.is_sought = is_finite, not is_finite
    inputs.tell(found)
    inputs.freeze()
    for one in (inputs.std, inputs.rms):
        one.steps = [0] * len(one)
    inputs.sizes = Series()
    if not is_finite:
        origin.found = find_origin(learn, "The loss or a gradient is not finite", True, step, None)
    _observe_loss(found, learn, called[-1] if called else "")


def _observe_loss(found: Run, learn: Any, last: str) -> None:
    for part in map(found.measured, parts_for(FAULTS[code] for code in OF_LOSS)):
        if hasattr(part, "on_first_graph"):
            part.on_first_graph(found)
        if isinstance(part, Output):
            part.layer = last
    found.measured(Output).on_loss(found)
    found.measured(Loss).tell(found)
    found.measured(ScoresDropout).look(learn.loss.grad_fn, last, None)
    found.measured(Targets).is_known = bool(learn.yb)
    if learn.yb:
        found.measured(ScaledLabels).on_first_graph(Run(loop=learn))
    found.measured(LinearStack).on_first_graph(found)


def _is_finite(learn: Any) -> bool:
    """Whether the loss and all gradients are finite; no parameter's `.grad` is changed."""
    loss, is_finite = learn.loss, math.isfinite(float(learn.loss.detach()))
    if not is_finite or loss.grad_fn is None:
        return is_finite
    params = [p for p in learn.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    known = (grad.coalesce().values() if grad.is_sparse else grad for grad in grads if grad is not None)
    return all(bool(values.isfinite().all()) for values in known)


@contextmanager
def _last_called(model: nn.Module) -> Iterator[list[str]]:
    """List of the names of the leaves that are called in the block, in their order."""
    called: list[str] = []
    with ExitStack() as hooks:
        for name, m in named_modules(model).items():
            if is_leaf(m) and not isinstance(m, torch.jit.ScriptModule):
                hooks.enter_context(Hook(m, lambda *_, name=name: called.append(name), detach=False))
        yield called


def why_not_readable(loader: Any) -> str:
    """Reason why reading a batch would change the loader, "" if it can be restored."""
    if any(hasattr(part, "__next__") for part in parts_of(loader)):
        return "the training data is an iterator, or reads from one, which can be read only once"
    if saves_itself(loader) or (not _is_plain(loader) and getattr(loader, "persistent_workers", False)):
        return f"{type(loader).__name__} continues from its position, so reading a batch changes the training"
    return ""


def first_batch(loader: Any) -> Any:
    """First batch of a pass over a loader, read without worker processes from a plain DataLoader.

    Raises:
        ValueError: If the loader has no batch.
    """
    if _is_plain(loader):  # persistent workers would advance their random state
        how: dict[str, Any] = {"collate_fn": loader.collate_fn, "generator": loader.generator}
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            how |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        else:
            how["batch_sampler"] = loader.batch_sampler
        loader = DataLoader(loader.dataset, **how)
    for batch in loader:
        return batch
    raise ValueError("the training loader has no batch")


def _is_plain(loader: Any) -> bool:
    """Whether it is a DataLoader with torch's own `__iter__`."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
