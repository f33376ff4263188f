"""label.single_class: labels that are all the same."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run


@fault(
    "label.single_class",
    Site.INPUT,
    needs="batch graph",
    leads_to="loss.* grad.* update.too_small unit.*",
    exact=True,
)
class SingleClass(Fault):
    """All labels that a classifier is trained with are one class.

    Exact: no label of the inspected batches differs from the others; 512 samples in 8 batches or more. Read
    if the loss is a cross-entropy of the model's raw scores, or of their sigmoid or softmax, and there is one
    optimizer.
    """

    headline = "All labels are of a single class"
    uses = (Targets, Loss)
    severity = "warning"
    passed = "labels of a single class"
    is_known = False

    def tell(self, run: Run) -> None:
        targets, self.seen = run.measured(Targets), []
        y = targets.classes(run.measured(Loss).graph_of_one)
        self.is_known = y is not None
        if y is not None and bool((y == y.flatten()[0]).all()):
            self.see(
                f"All {y.numel():,} labels read from {targets.n_batches} inspected batches are "
                f"{y.flatten()[0].item():g}, so predicting that class is enough.",
                value=1.0,
                causes=("data sorted by class and not shuffled", "labels that were lost, or a wrong column"),
                next_steps=("Count the labels of the data set: labels.unique(return_counts=True)",),
            )

    def findings(self, run: Run) -> Iterator[Result]:
        return self.told(run, self.seen, "" if self.is_known else run.why_not("labels of a classifier"))
