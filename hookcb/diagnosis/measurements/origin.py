"""Origin: where the first NaN or infinity comes from, found by running the batch again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.core.optim import detached_scalar
from hookcb.core.text import as_layer
from hookcb.core.whose import in_package
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.plain_run import ExternalBatch
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.measurements.targets import Ignored, ignored_targets
from hookcb.diagnosis.reader import ADVICE, Way, also, way_of
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules
from hookcb.nans.loss_operation import operation_in_loss
from hookcb.nans.nonfinite import kinds, tensors_in
from hookcb.nans.replay import Autocast, BatchStarts
from hookcb.nans.report import BATCH, LOSS, MODEL, NanReport
from hookcb.nans.search import search
from hookcb.processes.groups import is_sharded

LOOK = "Print the smallest and largest number of its inputs at that place"
MAX_OUTPUT = 65_536  # elements of an output that is checked in each batch
FROM_WEIGHTS = "a gradient that was not finite, or a step that was too large"


@dataclass(frozen=True)
class Found:
    """Result of the search for a NaN or infinity: a finding, unless it is in the inputs of the batch."""

    message: str = ""  # "" if nothing was found
    at: str = ""
    value: float = math.nan
    causes: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    n_inputs: int = 0  # number of elements of the inputs that are not finite

    @property
    def is_from_weights(self) -> bool:
        """Whether it began in an earlier step."""
        return FROM_WEIGHTS in self.causes


class Origin(Measurement):
    """Origin of the first NaN or infinity of a loss, a gradient or an output; looked for once."""

    cadence = EVERY
    uses = (Steps,)  # and `Loss`, without which it does its work

    def __init__(self) -> None:
        self.found = Found()
        self.step: int | None = None  # in which one was seen, if known
        self.is_sought = self.has_looked = False  # whether one was seen, and whether a backward was
        self._n_losses = 0

    def on_prediction(self, run: Run) -> bool:
        if self._n_losses < max(1, run.n_batches) and run.loop.is_external:  # which may never tell its loss
            outputs = [x for _, x in parts(run.loop.pred) if isinstance(x, Tensor) and x.is_floating_point()]
            at_hand = [x.detach() for x in outputs if x.is_cpu and x.numel() <= MAX_OUTPUT]
            # -inf alone is how scores are masked
            if not all(bool(x.isfinite().all()) for x in at_hand) and kinds(at_hand).bad:
                return self._seek(run, "The model's output is not finite")
        return False

    def on_loss(self, run: Run) -> bool:
        self._n_losses += 1
        number = detached_scalar(run.loop.loss)
        if isinstance(number, float) and not math.isfinite(number):
            return self._seek(run, f"The loss is {number}", loss_node=run.loop.loss_node)
        return False

    def on_gradients(self, run: Run) -> bool:
        """Checks the first layer's gradient, which any non-finite number in the backward reaches."""
        self.has_looked, scaler = True, run.loop.scaler
        param = run.measured(Steps).first_param
        if (scaler is not None and scaler.is_enabled()) or param is None or (grad := param.grad) is None:
            return False
        if grad.is_cpu and not math.isfinite(grad.sum().item()):
            return self._seek(run, "A gradient is not finite", gradient=True)
        return False

    def _seek(self, run: Run, noticed: str, gradient: bool = False, loss_node: Any = None) -> bool:
        if self.is_sought:
            return False
        loop, self.step, self.is_sought = run.loop, run.step, True
        ignored = None if loss_node is None else ignored_targets(loss_node, loop.loss, loop.pred)
        if ignored is not None and bool(ignored.are_all):
            self.found = _of_nothing(noticed, run.step, ignored)
            return True
        batch, autocasts = ExternalBatch(loop) if loop.is_external else loop, run.measured(Loss).autocasts
        self.found = find_origin(batch, noticed, gradient, run.step, autocasts, loss_node)
        return True


def _of_nothing(noticed: str, step: int, ignored: Ignored) -> Found:
    return Found(
        f"{noticed} at step {step}: all targets of its batch are {ignored.label}, the index that it "
        "ignores, so it is a mean of nothing, 0/0.",
        causes=("labels that are all masked, such as in sequences that were cut before the answer began",),
        next_steps=("Leave such samples out of the data, or skip a batch without a label",),
    )


def find_origin(
    learn: Any,
    noticed: str,
    gradient: bool,
    step: int,
    autocast: Sequence[Autocast] | None,
    loss_node: Any = None,
) -> Found:
    """Runs the batch again to find the operation that produced the first non-finite number.

    The batch is that of a learner in the middle of it, which is left as it was, or an `ExternalBatch`. Of a
    loss function that is unknown, it reads the graph behind `loss_node` instead, if that is still there.
    The message begins with what was `noticed`, say, of a `gradient`.
    """
    is_external = isinstance(learn, ExternalBatch)
    way = way_of(learn.way if is_external else "learner")
    advice = ADVICE["NaN"][way]
    layers = [
        name
        for name, m in named_modules(learn.model).items()
        if any(not bool(x.isfinite().all()) for _, x in tensors_in(list(m.parameters(recurse=False))))
    ]
    if layers:  # the gradient that caused them came from behind the last one
        text = (
            f"{noticed} at step {step}: weights of {len(layers)} layer{'s' * (len(layers) != 1)} became NaN "
            f"or infinite in an earlier step; {as_layer(layers[-1])} is the last of them before the loss."
        )
        return Found(text, layers[-1], float(len(layers)), (FROM_WEIGHTS,), (advice,))
    if is_sharded(learn.model):
        how = "To find where it began, all ranks would have to run the batch again"
        return Found(f"{noticed} at step {step}. {how}.", next_steps=(advice,))
    if replays := not is_external or learn.replays:
        start = BatchStarts().note(learn)
        start.autocasts = list(autocast or start.autocasts)
        report = search(learn, start, noticed, gradient)
    else:  # what is known without
        where = BATCH if _n_bad(learn.xb) else ""
        report = NanReport(where, "", "not repeated", learn.epoch, learn.iter, noticed)
    if report.where == BATCH:
        return Found(n_inputs=_n_bad(learn.xb))
    if is_external and not (report.repeated and report.where != LOSS):
        report = replace(report, op=operation_in_loss(loss_node, graph.roots(learn.pred)))
    if not replays and (kinds(learn.pred).bad or not report.op):
        how = "A batch of a test is not run again, which would find where it began"
        return Found(f"{noticed} at step {step}. {how}.", next_steps=(advice,))
    output = "has no NaN" if is_external and kinds(learn.pred).minus_inf else "is finite"
    return _from_report(report, output if is_external else "", noticed, step, way)


def _n_bad(inputs: Any) -> int:
    """Number of elements that are not finite."""
    return sum(int(x.isfinite().logical_not().sum()) for _, x in tensors_in(inputs))


def _from_report(report: NanReport, output: str, noticed: str, step: int, way: Way) -> Found:
    """Result of a search; the `output` of the model "is finite" if the loss function is unknown, else ""."""
    advice = ADVICE["NaN found"][way]
    is_layer = report.where not in ("", MODEL, LOSS)
    layer = report.where.partition("#")[0].partition("[")[0] if is_layer else ""
    by = f"{report.op} in " if report.op else ""
    installed = in_package(report.line)  # which is not the reader's to change
    line = f", at {installed or report.line}: {report.code}" if report.line and report.code else ""
    is_known = report.repeated and not (report.where == LOSS and output)
    if is_known:
        kind = f" ({report.type})" if report.type else ""
        origin = f"{by}the {report.direction} of {as_layer(report.where)}{kind}"
        how = f"The first NaN or infinity comes from {origin}, with finite inputs{line}"
    elif output and report.op:
        how = f"The model's output {output}; the first NaN or infinity comes from {report.op} in the loss"
    elif output:
        how = f"The model's output {output}, so it comes from the loss, or from code between the two"
    else:
        how = "It did not repeat when the batch was run again"
    hint = report.hint.partition(": ")
    causes = (hint[0],) if hint[0] else ()
    if is_known:
        advice = LOOK if installed else hint[2] or LOOK
    elif hint[2]:
        advice = f"{hint[2]}{also('line', way)}"
    return Found(f"{noticed} at step {step}. {how}.", layer, causes=causes, next_steps=(advice,))
