"""head.degenerate: a softmax over a single number."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.output import Output
from hookcb.diagnosis.run import Absent, Run, Skipped


@fault("head.degenerate", Site.LOSS, needs="batch", leads_to=EVERYTHING, exact=True)
class DegenerateHead(Fault):
    """A softmax or log_softmax over a dimension of size 1: its output is 1 whatever the weights are.

    Exact: length of that dimension, in the autograd graph between the loss and the last layer.

    Source: torch.nn.Softmax, whose outputs along `dim` sum to 1.
    """

    headline = "The softmax runs over one number"
    passed = "a softmax over one number"
    uses = (Loss, Output)

    def on_first_graph(self, run: Run) -> None:
        if (output := run.measured(Output)).is_degenerate:
            self.see(
                "The softmax before the loss normalizes over a dimension of size 1, so its output is 1 "
                "whatever the model computes, and no gradient reaches the weights.",
                at=output.layer,
                when=run.step,
                value=1.0,
                causes=("a softmax on a single output unit, or over the wrong dim",),
                next_steps=(
                    "For two classes and one output, remove the softmax and use nn.BCEWithLogitsLoss",
                    "For several classes, use one output per class, and a softmax over the dim of the "
                    "classes",
                ),
            )

    def findings(self, run: Run) -> Iterator[Result]:
        if run.measured(Loss).is_open or self.seen:
            yield from self.told(run, self.seen)
        elif "graph" in run.absent:
            yield Absent(run.absent["graph"])
        else:
            yield Skipped(run.missing.get("graph", "too little was seen of the graph"))
