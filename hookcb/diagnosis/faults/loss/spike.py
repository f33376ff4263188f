"""loss.spike: single losses far above those before them."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.rules import spread
from hookcb.diagnosis.run import Passed, Run, Series, Skipped

SPIKE, SPIKE_WINDOW, SPIKE_BEFORE, N_SPIKES = 6.0, 128, 32, 2  # standard deviations, batches before
N_LATEST = 4_096  # batches that are searched for spikes, so that a long run takes less than a second


@fault("loss.spike", Site.RUN, needs="loss", shown_by="run.loss", draws_limit=True)
class LossSpikes(Fault):
    """Single losses far above those before them: a note, never an alarm.

    Formula: at least two of the last 4,096 losses are above the median of the up to 128 batches before them
    (at least 32) by six robust standard deviations.

    Source: P. J. Huber, "Robust Statistics", 1981, for the median absolute deviation.
    """

    headline = "The loss jumps in single batches"
    uses = (Curves,)
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        if len(run.loss) <= SPIKE_BEFORE:
            yield Skipped(f"fewer than {SPIKE_BEFORE} batches")
        elif len(spikes := _spikes(run.loss)) < N_SPIKES:
            yield Passed(f"spikes of the loss ({len(spikes)})")
        else:
            step, value, limit = max(spikes, key=lambda spike: spike[1] - spike[2])
            yield self.finding(
                f"The loss jumps in {len(spikes):,} batches, most at step {step}: to {value:.3g}, while up "
                f"to {limit:.3g} is noise.",
                when=(spikes[0][0], spikes[-1][0]),
                value=value,
                limit=limit,
                causes=("unusual samples", "a learning rate that is slightly too high"),
                next_steps=(f"Look at the batch of step {step}", run.advise("clip")),
            )


def _spikes(loss: Series) -> list[tuple[int, float, float]]:
    """Step and loss of each spike, and the loss up to which it would have been noise."""
    spikes = []
    steps, values = loss.steps[-N_LATEST:], loss.values[-N_LATEST:]
    in_order: list[float] = []  # the finite ones of the window
    for i, value in enumerate(values):
        if i >= SPIKE_BEFORE and values[i - 1] < value < math.inf and in_order and value > _least(in_order):
            middle, sigma = spread(in_order)
            if value > (limit := middle + SPIKE * max(sigma, 1e-3 * abs(middle))):
                spikes.append((steps[i], value, limit))
        if math.isfinite(value):
            insort(in_order, value)
        if i >= SPIKE_WINDOW and math.isfinite(old := values[i - SPIKE_WINDOW]):
            del in_order[bisect_left(in_order, old)]
    return spikes


def _least(in_order: Sequence[float]) -> float:
    """A number that is quickly found, and not above the limit of a spike.

    The median absolute deviation is at least the smaller distance from the median to a quartile.
    """
    n = len(in_order)
    lower, upper = in_order[(n - 1) // 2], in_order[n // 2]
    return lower + SPIKE * min(in_order[-1 - n // 4] - upper, lower - in_order[n // 4])
