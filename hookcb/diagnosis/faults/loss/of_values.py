"""loss.of_values: classes in a loss for values."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.output import COMPARING, SQUARES, Output, name_of
from hookcb.diagnosis.rules import is_trivial
from hookcb.diagnosis.run import Run


@fault("loss.of_values", Site.LOSS, needs="batch graph", leads_to="loss.trivial loss.flat", exact=True)
class LossOfValues(Fault):
    """Classes, as 0 and 1 or one-hot, in a loss for values: a note.

    Exact: the targets of the first batch, one per sample or rows with a single 1, in a squared, absolute or
    Huber error. A warning if the training ends no better than a constant.

    Source: Goodfellow, Bengio & Courville, Deep Learning, 2016, section 6.2.2, on units that saturate.
    """

    headline = "Classes are in a loss for values"
    passed = "a loss for values given classes"
    uses = (Curves, Loss, Output)

    def on_first_graph(self, run: Run) -> None:
        loss, output = run.measured(Loss).graph, run.measured(Output)
        seen = output.beside(*COMPARING)
        if loss is None or seen is None or loss.sure_kind not in SQUARES or not _are_classes(seen.target):
            return
        ends = f"the {name_of(loss.head)}" if loss.head else "the output"
        error = {"mse": "squared", "mae": "absolute", "huber": "Huber"}[loss.kind]
        vanishes = "; their gradient vanishes where the model is sure and wrong"
        weak = {"Relu": "; an output of 0 gets no gradient", "Sigmoid": vanishes, "Softmax": vanishes}
        logits = "CrossEntropy" if seen.target.ndim > 1 and seen.target.shape[-1] > 1 else "BCEWithLogits"
        self.see(
            f"The targets are classes, as 0 and 1, and {ends} is compared with them by {error} errors"
            f"{weak.get(loss.head, '')}.",
            at=output.layer,
            when=run.step,
            causes=(f"a loss for values, and {ends} as the head of a classifier",),
            next_steps=(f"End the model in a linear layer and use nn.{logits}Loss",),
        )

    def findings(self, run: Run) -> Iterator[Result]:
        seen = [replace(x, severity="warning" if is_trivial(run) else "info") for x in self.seen]
        return self.told(run, seen, run.measured(Output).why_unknown())


def _are_classes(y: Tensor) -> bool:
    """Whether targets are both 0 and 1, one for each sample, or rows with a single 1."""
    if y.ndim not in (1, 2) or len(y) < 2 or not bool(((y == 0) | (y == 1)).all()):
        return False
    if y.ndim == 1 or y.shape[1] == 1:
        return bool((y != y.flatten()[0]).any())
    return bool((y.sum(1) == 1).all())
