"""LargestLosses: the samples of inspected batches with the largest losses."""

import heapq

from torch import Tensor

from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import first_float
from hookcb.diagnosis.measurements.spikes import sample_losses, worst_of
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run
from hookcb.records.content import SampleLoss

N_KEPT = 10
MAX_ELEMENTS = 1 << 20  # of a prediction; their losses take some 3 ms on a CPU


class LargestLosses(Measurement):
    """Samples with the largest losses, of the batches that are inspected; on a CPU only.

    On another device they are not computed, as their number would have to be waited for.

    Attributes:
        found: at most ten samples, the largest losses first, at most three of a batch.
    """

    uses = (Curves, Targets)

    def __init__(self) -> None:
        self.found: list[SampleLoss] = []

    def on_loss(self, run: Run) -> None:
        loss, pred = run.measured(Curves).last_loss, first_float(run.loop.pred)
        if loss is None or isinstance(loss, Tensor) or pred is None or pred.numel() > MAX_ELEMENTS:
            return
        of_sample = sample_losses(run.loop, run.measured(Targets).of_batch(run))
        if of_sample is None or not of_sample.is_cpu:
            return
        usual = float(of_sample.nanmedian())
        worst = [SampleLoss(run.step, index, x, usual) for index, x in worst_of(of_sample) if x > usual]
        self.found = heapq.nlargest(N_KEPT, [*self.found, *worst], key=lambda sample: sample.loss)
