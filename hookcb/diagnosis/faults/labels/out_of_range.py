"""label.out_of_range: class indices without a score."""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hookcb.core.batch import parts
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import n_classes_of, scores_of
from hookcb.diagnosis.run import Run

REFUSED = re.compile(r"Target (-?\d+) is out of bounds")  # error of cross-entropy


@fault("label.out_of_range", Site.INPUT, needs="batch", leads_to=EVERYTHING, exact=True)
class LabelsOutOfRange(Fault):
    """A class index below 0 or not below the number of classes, for which the loss raised an error.

    Formula: largest index ≥ C or smallest < 0, in the batch for which torch's loss raised an error.

    Source: torch.nn.CrossEntropyLoss, targets are in [0, C) or `ignore_index`.
    """

    headline = "Labels are out of range"
    uses = (Curves,)
    passed = "labels out of range"

    def on_error(self, run: Run, error: BaseException) -> None:
        # without that error they are fine: a loss may ignore indices that are out of range, as 255
        if isinstance(error, IndexError):
            with suppress(RuntimeError):  # reading from a GPU that has failed
                self._read(run, error)

    def _read(self, run: Run, error: IndexError) -> None:
        refused = REFUSED.search(str(error))
        n_classes, high = _range_of(run.loop.pred, run.loop.yb)
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

    def findings(self, run: Run) -> Iterator[Result]:
        return self.told(run, self.seen, run.measured(Curves).why_unseen(run))


def _range_of(pred: Any, yb: Any) -> tuple[int | None, int | None]:
    """Number of classes that have a score, and the largest label; None if unknown."""
    scores = scores_of(pred)
    labels = next((y for _, y in parts(yb) if isinstance(y, Tensor) and y.dtype == torch.int64), None)
    if scores is None or labels is None or not labels.numel():
        return None, None
    return n_classes_of(scores, labels), int(labels.max())
