"""Search for the origin of a nonfinite loss or gradient: a replay of the batch, and its report."""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookcb.core.alone import ALONE, Ranks
from hookcb.core.files import as_plain, save_whole
from hookcb.core.torch_private import plain_class
from hookcb.hooks.modules import unsaved_buffers
from hookcb.nans.nonfinite import kinds, tensors_in
from hookcb.nans.origins import line_of, shown_line
from hookcb.nans.replay import BatchStart, as_at_start, has_observers, versions_of
from hookcb.nans.report import BATCH, LOSS, MODEL, NanReport
from hookcb.nans.tracer import Call, Tracer
from hookcb.processes.groups import is_sharded

SOFTMAX = (nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.MultiheadAttention)  # -inf is a valid input of these


@dataclass(slots=True)
class _Cause:
    """The fields of a `NanReport` that name the cause."""

    where: str = ""
    type: str = ""
    direction: str = "forward"
    op: str = ""
    line: str = ""
    call: Call | None = None


def search(
    learn: Any, start: BatchStart, noticed: str, gradient: bool, last: int = 21, ranks: Ranks = ALONE
) -> NanReport:
    """Replays the batch of `learn` and finds the origin of the first nonfinite number.

    Args:
        learn: the learner, in the middle of a training batch; its state is restored.
        start: state at the beginning of the batch.
        noticed: the symptom, for the report.
        gradient: whether a gradient was nonfinite; then the backward is replayed too.
        last: number of calls in the report.
        ranks: ranks that search at the same time, each in its own batch, as a replay needs all of them.
    """
    moved = versions_of(learn) != start.versions
    found = _replayed(learn, start, gradient, ranks)
    cause = _cause(learn, found)
    line, code = shown_line(cause.line)
    notes = [note for note in (*_notes(learn, found, cause), _MOVED if moved else "", found.error) if note]
    where = learn.epoch, learn.iter
    named = cause.where, cause.type, cause.direction
    calls = found.calls(last, cause.call if cause.direction == "forward" else None)
    return NanReport(*named, *where, noticed, cause.op, line, code, calls, tuple(notes))


_MOVED = "the model changes the batch in place; the replay began with the changed batch"


def _replayed(learn: Any, start: BatchStart, gradient: bool, ranks: Ranks) -> Tracer:
    found = None
    if ranks.world == 1 and has_observers(learn):  # which need not see it, unless it does not repeat so
        with suppress(Exception):
            found = _replay(learn, start, gradient, ranks, operations=True, with_observers=False)
        if found is not None and found.has_repeated:
            return found
    with suppress(Exception):  # some operations, as of higher order, cannot be dispatched to a mode
        found = _replay(learn, start, gradient, ranks, operations=True)
    is_found = found is not None and found.has_repeated
    if any(ranks.max([is_found])):
        return found or Tracer(learn.model)
    try:  # without following operations
        return _replay(learn, start, gradient, ranks, operations=False)
    except Exception as error:
        failed = Tracer(learn.model)
        failed.error = f"the replay itself failed: {error!r}"
        return failed


def _replay(
    learn: Any,
    start: BatchStart,
    gradient: bool,
    ranks: Ranks,
    operations: bool,
    with_observers: bool = True,
) -> Tracer:
    with as_at_start(learn, start, with_observers):
        tracer, failure = Tracer(learn.model), None
        with tracer.hooked():
            try:
                # in anomaly mode each node of the graph keeps the lines that made it
                with torch.autograd.set_detect_anomaly(gradient, check_nan=False), start.autocast():
                    tracer.forward(learn, operations)
            except Exception as error:
                failure = error
            is_over = any(ranks.max([failure is not None or not gradient or not tracer.loss.clean]))
            if failure is not None:
                raise failure
            if not is_over:
                tracer.backward(learn.loss, is_shared=ranks.world > 1)
        return tracer


# ---- the cause


def _cause(learn: Any, tracer: Tracer) -> _Cause:
    if not tracer.loss.clean:
        return _forward_cause(learn, tracer)
    if not tracer.grads.clean:
        return _backward_cause(learn, tracer)
    return _Cause(direction="not repeated")


def _forward_cause(learn: Any, tracer: Tracer) -> _Cause:
    made, op = tracer.made and tracer.made.to_blame, ""
    if tracer.made is not None and tracer.made.given.minus_inf and _bad_parts(learn, minus_inf=True):
        made = None  # a mask, or data
    if made is not None and made.how == "made":
        call, op = made.call, made.op
    else:
        call = _culprit(tracer)
        if call is None and _bad_parts(learn):
            return _Cause(BATCH)
        if learn.loss_func is None and not tracer.pred.bad:  # -inf by a mask, and an unknown loss
            return _Cause(LOSS)
    line = made.line if made is not None else call.line if call is not None else ""
    if call is not None:
        kind = plain_class(call.module).__name__
        return _Cause(tracer.name(call), kind, "forward", op, line, call)
    if tracer.pred.bad:  # by the user's own predict(), around the model
        return _Cause(MODEL, "", "forward", op, line)
    return _Cause(LOSS, _loss_type(learn), "forward", op, line)


def _culprit(tracer: Tracer) -> Call | None:
    """The call to blame as far as inputs and outputs of calls tell; None for the loss function."""
    call = tracer.culprit
    if call is not None and (isinstance(call.module, SOFTMAX) or not _is_torchs(call.module)):
        return call  # which may be given -inf, as a mask
    return tracer.minus_inf or call if (tracer.pred if call is None else call.given).minus_inf else call


def _is_torchs(module: nn.Module) -> bool:
    return plain_class(module).__module__.startswith("torch.nn.modules")


def _backward_cause(learn: Any, tracer: Tracer) -> _Cause:
    node = tracer.node or tracer.arrived
    call = tracer.owners.get(node) if node is not None else None
    if node is None or call is None:
        return _Cause(MODEL, plain_class(learn.model).__name__, "backward")
    if call.given.bad and _bad_parts(learn):
        return _Cause(BATCH, direction="backward")
    op = node.name() if tracer.node is not None else ""  # else a sum of gradients or a hook made it
    if call.name == LOSS:
        return _Cause(LOSS, _loss_type(learn), "backward", op, line_of(node))
    kind = plain_class(call.module).__name__
    return _Cause(tracer.name(call), kind, "backward", op, line_of(node) or call.line, call)


def _loss_type(learn: Any) -> str:
    function = learn.loss_func
    return getattr(function, "__name__", None) or type(function).__name__ if function is not None else ""


def _bad_parts(learn: Any, minus_inf: bool = False) -> list[str]:
    """Paths of tensors in the batch with NaN or +inf, or else with -inf."""
    tensors = [*tensors_in(learn.xb, "xb"), *tensors_in(learn.yb, "yb")]
    return [path for path, x in tensors if (kinds(x).minus_inf if minus_inf else kinds(x).bad)]


def _notes(learn: Any, tracer: Tracer, cause: _Cause) -> list[str]:
    notes = []
    for what, bad in (("NaN or inf", _bad_parts(learn)), ("-inf", _bad_parts(learn, minus_inf=True))):
        if bad:
            notes.append(f"the batch contains {what} in {', '.join(bad)}")
    if cause.call is not None:
        module = cause.call.module
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if worn := [name for name, x in own if not kinds(x).clean]:
            notes.append(
                f"its {', '.join(worn)} already contained NaN or inf: from an earlier step, or a file"
            )
    if cause.direction == "forward" and tracer.minus_inf and tracer.name(tracer.minus_inf) != cause.where:
        notes.append(f"-inf was first in the output of {tracer.name(tracer.minus_inf)}")
    if cause.direction == "backward" and tracer.culprit is not None:
        notes.append(
            f"the output of {tracer.name(tracer.culprit)} had NaN or inf, which did not reach the loss"
        )
    if cause.direction == "backward" and not cause.op:
        notes.append("no single operation made it: a sum of finite gradients did, or a hook on a tensor")
    if cause.direction == "not repeated" and not tracer.error:
        notes.append(_NOT_REPEATED)
    return notes


_NOT_REPEATED = (
    "the same batch, weights, random numbers, buffers and autocast gave finite numbers: look for state that "
    "modules keep outside of buffers, callbacks that change pred, loss or gradients, and the hardware"
)


# ---- a bundle to reproduce it


def write_bundle(learn: Any, start: BatchStart, report: NanReport, path: str | Path) -> NanReport:
    """Writes a file to replay the batch elsewhere; `torch.load(path, weights_only=True)` reads it.

    A dict: `model` (state_dict when the batch began), `buffers` (those not in it), `modes` (train or eval, by
    name), `xb`, `yb`, `random` (for `hookcb.core.randomness.set_random_state`), `autocast` (device,
    enabled, dtype), `report` and `torch`, its version. Tensors are on the CPU; objects other than plain
    values and containers of these are replaced by their repr. Of a sharded model it has no weights.
    """
    with as_at_start(learn, start):
        model = learn.model
        saved = {} if is_sharded(model) else model.state_dict()
        state = {
            "model": saved,
            "buffers": unsaved_buffers(model, saved),
            "modes": {name: m.training for name, m in model.named_modules()},
            "xb": learn.xb,
            "yb": learn.yb,
            "random": start.random_state(),
            "autocast": list(start.autocasts),
            "report": asdict(report),
            "torch": str(torch.__version__),
        }
        return replace(report, bundle=str(save_whole(as_plain(state), path)))
