"""label.broadcast: targets that broadcasting compares with the outputs of all samples."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.output import Output
from hookcb.diagnosis.run import Run


@fault("label.broadcast", Site.INPUT, needs="batch graph", leads_to=EVERYTHING, exact=True)
class BroadcastTargets(Fault):
    """One output and one target per sample whose shapes differ, so the loss compares all pairs of samples.

    Exact: shapes of the output and the targets where the loss subtracts them, such as (N, 1) and (N), which
    have the same sizes apart from dimensions of 1 and are broadcast to more elements than either has.

    Source: torch.nn.MSELoss, whose targets have the shape of the input.
    """

    headline = "Targets are broadcast to all pairs"
    passed = "targets that are broadcast"
    uses = (Output,)

    def on_first_graph(self, run: Run) -> None:
        output = run.measured(Output)
        seen = output.compared
        if seen is None or output.is_degenerate or not seen.is_broadcast:
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

    def findings(self, run: Run) -> Iterator[Result]:
        return self.told(run, self.seen, run.measured(Output).why_unknown())
