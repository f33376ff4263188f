"""loss.rising: a loss that rises again, though nothing was seen to have changed."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault, findings_of
from hookcb.diagnosis.faults.loss.worse import N, risen_since_lowest
from hookcb.diagnosis.measurements.spikes import Spikes
from hookcb.diagnosis.moves import moves_since, text_of
from hookcb.diagnosis.run import Passed, Run, Skipped

TOLD = ("loss.worse", "loss.diverging")  # by which a rise is told


@fault("loss.rising", Site.RUN, needs="loss", shown_by="run.loss")
class RisingLoss(Fault):
    """A loss that rises again, though nothing that was followed has changed: what has moved since, as a note.

    Formula: the median of the last 32 losses is above the lowest one of 32 in a row, the first ones excepted,
    by six standard errors and by 5 %. Then numbers of layers and parameters in inspected batches are compared
    between before and after: the standard deviation and the largest magnitude of outputs, the RMS of
    gradients and the norms of weights. One has moved if the median of its last two looks differs from that of
    the five before the rise by a factor of two and by twice their largest change in a row, in logarithms. It
    may be a cause or an effect. Not told if `loss.worse` or `loss.diverging` tell of the rise, or
    `loss.spike` of one that has not healed.

    Source: the limits are ours.
    """

    headline = "The loss rises again"
    severity = "info"
    uses = (Spikes,)

    def findings(self, run: Run) -> Iterator[Result]:
        if len(run.loss) < 3 * N:
            yield Skipped(f"fewer than {3 * N} batches")
            return
        rise = risen_since_lowest(run)
        is_told = any(findings_of(code, run) for code in TOLD)
        is_told |= any(spike.lasted is None for spike in run.measured(Spikes).found)
        if rise is None or is_told:
            yield Passed("a loss that rises again")
            return
        moves = moves_since(run, rise.step, rise.step + N)
        yield self.finding(
            f"The loss was {rise.low:.3g} about step {rise.step:,}, and is {rise.last:.3g} at the end."
            f"{text_of(moves)}",
            at=moves[0].places[0] if moves else None,
            when=(rise.step, run.loss.steps[-1]),
            value=rise.last,
            causes=("data that have become harder", "weights, gradients or updates that shrink or grow"),
            next_steps=(f"Look at what the program does from step {rise.step:,} on",),
        )
