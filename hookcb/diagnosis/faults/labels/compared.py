"""label.range and label.broadcast: targets that do not suit the outputs they are compared with."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.output import SLACK, Output
from hookcb.diagnosis.run import Run


class _OfOutput(Fault):
    """Base of faults of the targets beside the output."""

    uses = (Output,)

    def findings(self, run: Run) -> Iterator[Result]:
        return self.told(run, self.seen, run.measured(Output).why_unknown())


@fault("label.range", Site.INPUT, needs="batch graph", leads_to=EVERYTHING, exact=True)
class TargetsOutOfRange(_OfOutput):
    """Targets of a binary cross-entropy below 0 or above 1: the loss then has no minimum.

    Exact: the smallest and the largest target of the first batch, with 0.001 for rounding.

    Source: torch.nn.BCEWithLogitsLoss, whose targets are numbers between 0 and 1.
    """

    headline = "Targets are not between 0 and 1"
    passed = "targets of a binary cross-entropy"

    def on_first_graph(self, run: Run) -> None:
        if (seen := run.measured(Output).beside("binary cross-entropy")) is None:
            return
        y = seen.target.detach().float()
        low, high = float(y.min()), float(y.max())
        if low < -SLACK or high > 1 + SLACK:
            share = float(((y < -SLACK) | (y > 1 + SLACK)).float().mean())
            self.see(
                f"{share:.0%} of the targets of the binary cross-entropy are not in 0 to 1: they go from "
                f"{low:.3g} to {high:.3g}, so the loss has no minimum.",
                when=run.step,
                value=share,
                causes=("class indices, or values of a regression, in a loss for probabilities",),
                next_steps=(
                    "For several classes, use one output per class and nn.CrossEntropyLoss",
                    "For a regression, use nn.MSELoss; map labels of -1 and 1 to 0 and 1",
                ),
            )


@fault("label.broadcast", Site.INPUT, needs="batch graph", leads_to=EVERYTHING, exact=True)
class BroadcastTargets(_OfOutput):
    """One output and one target per sample whose shapes differ, so the loss compares all pairs of samples.

    Exact: shapes of the output and the targets where the loss subtracts them, such as (N, 1) and (N), which
    have the same sizes apart from dimensions of 1 and are broadcast to more elements than either has.

    Source: torch.nn.MSELoss, whose targets have the shape of the input.
    """

    headline = "Targets are broadcast to all pairs"
    passed = "targets that are broadcast"

    def on_first_graph(self, run: Run) -> None:
        output = run.measured(Output)
        if (seen := output.compared) is None or output.is_degenerate or not seen.is_broadcast:
            return
        ours, theirs = seen.shapes
        self.see(
            f"The output has shape {ours} and the targets have shape {theirs}: the loss broadcasts them to "
            f"{seen.term.shape}, and compares each output with the targets of all samples.",
            when=run.step,
            value=math.prod(seen.term.shape) / math.prod(ours),
            causes=("targets or outputs with a missing, or an extra, dimension of size 1",),
            next_steps=("Give both the same shape: y.unsqueeze(1), or pred.squeeze(1)",),
        )
