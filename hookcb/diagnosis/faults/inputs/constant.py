"""input.constant: samples that are all alike."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.run import Run

MIN_BATCHES = 3


@fault("input.constant", Site.INPUT, needs="batch", leads_to=EVERYTHING, exact=True)
class ConstantInputs(Fault):
    """All samples of a batch are identical, in each of at least three inspected batches.

    Formula: no element differs from that of the first sample; batches of one sample are left out.
    """

    headline = "All samples of a batch are alike"
    uses = (Inputs,)
    passed = "constant inputs"

    def findings(self, run: Run) -> Iterator[Result]:
        differs = run.measured(Inputs).differs
        n, do_differ = len(differs), any(x > 0 for x in differs.values)
        if do_differ or n < MIN_BATCHES:
            return self.told(run, (), "" if do_differ else run.why_unseen("samples that differ"))
        finding = self.finding(
            f"All samples of a batch are identical, in each of the {n} inspected batches, so the model "
            "cannot tell them apart.",
            when=differs.steps[0],
            value=0.0,
            causes=(
                "the dataset returns the same item each time, or inputs are overwritten or scaled to zero",
            ),
            next_steps=("Print two samples of your dataset, and follow them through your transforms",),
        )
        return self.told(run, [finding])
