"""label.range: targets of a binary cross-entropy that are not between 0 and 1."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.output import SLACK, Output
from hookcb.diagnosis.run import Run


@fault("label.range", Site.INPUT, needs="batch graph", leads_to=EVERYTHING, exact=True)
class TargetsOutOfRange(Fault):
    """Targets of a binary cross-entropy below 0 or above 1: the loss then has no minimum.

    Exact: the smallest and the largest target of the first batch, with 0.001 for rounding.

    Source: torch.nn.BCEWithLogitsLoss, whose targets are numbers between 0 and 1.
    """

    headline = "Targets are not between 0 and 1"
    passed = "targets of a binary cross-entropy"
    uses = (Output,)

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

    def findings(self, run: Run) -> Iterator[Result]:
        return self.told(run, self.seen, run.measured(Output).why_unknown())
