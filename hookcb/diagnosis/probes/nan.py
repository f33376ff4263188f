"""Where the first NaN or infinity was made, found by running the batch again."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hookcb.core.batch import parts
from hookcb.core.restore import preserve_modes
from hookcb.diagnosis.evidence import Observation
from hookcb.diagnosis.probes.batch import nonfinite_input
from hookcb.hooks.modules import named_modules
from hookcb.nans.replay import Autocast, BatchStarts
from hookcb.nans.report import BATCH, LOSS, MODEL, NanReport
from hookcb.nans.search import search


class SeenBatch:
    """A batch of a loop that is not ours, in the way in which a learner has one, for a replay.

    The loss function is not known; the mean of what the model gives stands for it.
    """

    loss_func = None
    loss: Any = None

    def __init__(self, loop: Any) -> None:
        self.model: nn.Module = loop.model
        self.xb, self.yb, self.pred = loop.xb, (), loop.pred
        self.epoch, self.iter = loop.epoch, loop.iter

    def predict(self) -> Any:
        """The model's output."""
        return self.model(*self.xb) if isinstance(self.xb, tuple) else self.model(**self.xb)

    def get_loss(self) -> Tensor:
        """What stands for the loss."""
        outputs = [x for _, x in parts(self.pred) if isinstance(x, Tensor) and x.is_floating_point()]
        return torch.stack([x.float().mean() for x in outputs]).sum()

    def restored(self) -> AbstractContextManager[None]:
        """Puts the modes of all modules back afterwards."""
        return preserve_modes(self.model)


def look_for_origin(
    learn: Any, noticed: str, gradient: bool, step: int, autocast: Sequence[Autocast] | None
) -> Observation:
    """Runs the batch again, and names what made the first number that is not finite.

    Args:
        learn: the learner in the middle of a training batch, which is left as it was found, or a `SeenBatch`.
        noticed: what was seen, for the message.
        gradient: whether it was a gradient.
        step: number of the batch.
        autocast: how that was in the forward, where it is known.
    """
    if worn := _worn(learn.model):
        return _of_weights(worn, noticed, step)
    start = BatchStarts().note(learn)
    start.autocasts = list(autocast or start.autocasts)
    report = search(learn, start, noticed, gradient)
    if report.where == BATCH:
        return nonfinite_input(step, _n_bad(learn.xb))
    return _of_report(report, isinstance(learn, SeenBatch), noticed, step)


def _n_bad(xb: Any) -> int:
    inputs = [x for _, x in parts(xb) if isinstance(x, Tensor) and x.is_floating_point()]
    return sum(int(x.isfinite().logical_not().sum()) for x in inputs)


def _worn(model: nn.Module) -> list[str]:
    """Layers, in the order of the model, with a parameter that is not finite already."""
    return [
        name
        for name, m in named_modules(model).items()
        if any(not bool(p.detach().isfinite().all()) for p in m.parameters(recurse=False))
    ]


def _of_weights(layers: list[str], noticed: str, step: int) -> Observation:
    """The gradient that did it came from behind the last of these layers."""
    last = layers[-1]
    return Observation(
        "nonfinite.first",
        last,
        step=step,
        value=float(len(layers)),
        text=f"{noticed} at step {step}: weights of {len(layers)} layers are NaN or infinite, from a step "
        f"before; {last} is the last of them on the way to the loss.",
        causes=("a gradient that was not finite, or a step that was too large",),
        next_steps=("train with cbs=NanTrace(), which stops before the step and names the operation",),
    )


def _of_report(report: NanReport, is_followed: bool, noticed: str, step: int) -> Observation:
    own = report.where not in ("", MODEL, LOSS)
    layer = report.where.partition("#")[0].partition("[")[0] if own else ""
    by = f" by {report.op}" if report.op else ""
    line = f", at {report.line}: {report.code}" if report.line and report.code else ""
    if (report.where == LOSS and is_followed) or not report.repeated:
        how = "it did not repeat when the batch was run again"
        if is_followed:
            how = "the model's output is finite, so it is made behind it, in the loss or what leads to it"
    else:
        kind = f" ({report.type})" if report.type else ""
        how = f"made of finite numbers in the {report.direction} of {report.where}{kind}{by}{line}"
    hint = report.hint.partition(": ")
    return Observation(
        "nonfinite.first",
        layer,
        step=step,
        text=f"{noticed} at step {step}; {how}.",
        causes=(hint[0],) if hint[0] else (),
        next_steps=(hint[2] or "train with cbs=NanTrace() and look at learn.nan_trace.report",),
    )
