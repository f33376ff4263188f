"""label.form and label.out_of_range: targets for which a loss of torch raises an error."""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from hookcb.core.batch import parts
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import first_float, n_classes_of
from hookcb.diagnosis.run import Run

REFUSED = re.compile(r"Target (-?\d+) is out of bounds")  # error of cross-entropy


class Refusal(NamedTuple):
    """A form of targets that a loss of torch refuses."""

    error: str  # pattern of torch's message
    takes: str  # what the loss takes
    next_steps: tuple[str, ...]
    is_of_integers: bool | None = None  # whether it is about integer targets only, or about others only


REFUSALS = (
    Refusal(
        r"class probabilities, got",
        "Cross-entropy takes class indices of shape (N), or float probabilities of shape (N, C)",
        ("For one-hot targets, pass y.argmax(1)",),
    ),
    Refusal(
        r"multi-target not supported",
        "This loss takes class indices of shape (N)",
        ("For indices of shape (N, 1), pass y.squeeze(1)", "For one-hot targets, pass y.argmax(1)"),
    ),
    Refusal(
        r"expected (target dtype to be|scalar type) Long",
        "Cross-entropy takes class indices as integers",
        ("Pass y.long(); for probabilities, give them the shape of the scores",),
        is_of_integers=False,
    ),
    Refusal(
        r"Target size .* must be the same as input size|target size .* different to the input size",
        "Binary cross-entropy takes a target for each output, in the same shape",
        ("For one output, pass y.unsqueeze(1)", "For class indices, use nn.CrossEntropyLoss"),
    ),
    Refusal(
        r"can't be cast to the desired output type (Long|Int)|Found dtype (Long|Int) but expected Float",
        "This loss takes floats as targets",
        ("Pass y.float(); for class indices, use nn.CrossEntropyLoss",),
        is_of_integers=True,
    ),
    Refusal(
        r"Expected target size",
        "Cross-entropy takes scores of shape (N, C, …), with the classes in dim 1",
        ("Pass scores.transpose(1, 2), or flatten both: scores.flatten(0, 1) and y.flatten()",),
    ),
)


class _Error(Fault):
    """Base of faults for which a loss raises an error."""

    uses = (Curves,)

    def findings(self, run: Run) -> Iterator[Result]:
        has_begun = len(run.loss) or run.n_steps or "batches" not in run.sources  # else a single batch
        return self.told(run, self.seen, "" if has_begun else run.why_not("loss or steps"))


@fault("label.form", Site.INPUT, needs="batch", leads_to=EVERYTHING, exact=True)
class RefusedTargets(_Error):
    """Targets whose shape or type a loss of torch refuses, such as one-hot rows in place of class indices.

    Exact: the error that torch's loss has raised.

    Source: torch.nn.CrossEntropyLoss and torch.nn.BCEWithLogitsLoss, "Shape".
    """

    headline = "The loss refuses the form of the targets"
    passed = "targets that the loss refuses"

    def on_error(self, run: Run, error: BaseException) -> None:
        if not isinstance(error, RuntimeError | ValueError):
            return
        y = next((y for _, y in parts(run.loop.yb) if isinstance(y, Tensor)), None)
        is_of_integers = None if y is None else not (y.is_floating_point() or y.is_complex())
        for refusal in REFUSALS:
            if refusal.is_of_integers in (None, is_of_integers) and re.search(refusal.error, str(error)):
                about = "" if y is None else f"; the targets are {y.dtype} of shape {tuple(y.shape)}"
                self.see(
                    f"{refusal.takes}{about}. PyTorch says: {str(error).splitlines()[0]:.120}",
                    when=run.step,
                    causes=("targets in the form of another loss",),
                    next_steps=refusal.next_steps,
                )
                return


@fault("label.out_of_range", Site.INPUT, needs="batch", leads_to=EVERYTHING, exact=True)
class LabelsOutOfRange(_Error):
    """A class index below 0 or not below the number of classes, for which the loss raised an error.

    Formula: largest index ≥ C or smallest < 0, in the batch for which torch's loss raised an error.

    Source: torch.nn.CrossEntropyLoss, targets are in [0, C) or `ignore_index`.
    """

    headline = "Labels are out of range"
    passed = "labels out of range"

    def on_error(self, run: Run, error: BaseException) -> None:
        # without that error they are fine: a loss may ignore indices that are out of range, as 255
        if isinstance(error, IndexError):
            with suppress(RuntimeError):  # reading from a GPU that has failed
                self._read(run, error)

    def _read(self, run: Run, error: IndexError) -> None:
        refused, scores = REFUSED.search(str(error)), first_float(run.loop.pred)
        y = next((y for _, y in parts(run.loop.yb) if isinstance(y, Tensor) and y.dtype == torch.int64), None)
        n_classes = high = None
        if scores is not None and y is not None and y.numel():
            n_classes, high = n_classes_of(scores, y), int(y.max())
        worst = int(refused[1]) if refused else high
        if worst is None or not (refused or (n_classes is not None and worst >= n_classes)):
            return
        valid = f"; the model has {n_classes} scores, so valid labels are 0 to {(n_classes or 0) - 1}"
        self.see(
            f"A label of batch {run.step} is {worst}, which has no score{valid if n_classes else ''}.",
            when=run.step,
            value=float(worst),
            causes=("labels that count from 1, or a last layer with too few outputs",),
            next_steps=(
                f"Give the last layer {worst + 1} outputs, or map the labels to the outputs it has"
                if worst >= 0
                else "Map the labels to 0 and above, or pass ignore_index to the loss",
            ),
        )
