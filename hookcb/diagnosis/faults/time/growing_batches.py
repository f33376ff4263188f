"""time.growing: batches that grow."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.rules import median, ratio
from hookcb.diagnosis.run import Passed, Run, Skipped

MIN_GROWTH = 2.0  # of a batch and of its time, from the first third of the training to the last
MIN_LONGER = 1e-3  # seconds; less is the noise of a machine
MIN_LOOKS, MIN_BATCHES = 9, 30  # at the size of a batch, and timed ones


@fault("time.growing", Site.RUN, needs="time")
class GrowingBatches(Fault):
    """Batches that grow, and steps that take longer and longer with them.

    Formula: median number of elements in the inputs of the last third of the inspected batches / that of the
    first third, and the same ratio of the time of a batch without its fetch, over all batches. Limit: 2, for
    both. It is a note, as a schedule may have it so.

    Source: the limit is a choice; a busy machine slows down a training without growing batches.
    """

    headline = "Batches grow and take longer"
    uses = (Curves, Inputs)
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        sizes, curves = run.measured(Inputs).sizes.values, run.measured(Curves)
        waits = dict(curves.waits)
        seconds = [x - waits.get(step, 0.0) for step, x in curves.batches]
        if len(sizes) < MIN_LOOKS or len(seconds) < MIN_BATCHES:
            yield Skipped(f"fewer than {MIN_BATCHES} batches were timed")
            return
        (size, before), (now, earlier) = _thirds(sizes), _thirds(seconds)
        if not (before and earlier > 0):
            yield Skipped(f"the {'times' if before else 'inputs'} of batches were not seen")
            return
        grown, slower = ratio(size, before), ratio(now, earlier)
        if not (grown >= MIN_GROWTH and slower >= MIN_GROWTH and now - earlier >= MIN_LONGER):
            yield Passed(f"growing batches (×{min(grown, slower):.1f})", min(grown, slower), MIN_GROWTH)
            return
        yield self.finding(
            when=run.measured(Inputs).sizes,
            value=min(grown, slower),
            limit=MIN_GROWTH,
            message=f"Batches grow, from {before:,.0f} to {size:,.0f} elements, and take {slower:.1f} times "
            f"as long: {1e3 * now:.1f} ms instead of {1e3 * earlier:.1f} ms (limit {MIN_GROWTH:g}).",
            causes=(
                "inputs that are appended to those of earlier batches",
                "samples that are sorted by length",
            ),
            next_steps=("Print the shape of the inputs in each batch",),
        )


def _thirds(values: list[float]) -> tuple[float, float]:
    """Medians of the last and of the first third."""
    n = len(values) // 3
    return median(values[-n:]), median(values[:n])
