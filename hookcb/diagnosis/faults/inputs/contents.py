"""input.constant and input.nonfinite: samples that are all alike, and NaN or infinity among them."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.origin import Origin
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
            return self.told(run, (), "" if do_differ else run.why_not("samples that differ"))
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


@fault("input.nonfinite", Site.INPUT, needs="batch", leads_to=EVERYTHING, exact=True)
class NonfiniteInputs(Fault):
    """NaN or infinity in the inputs of a batch.

    Formula: any element that is not finite, in an inspected batch or in one whose loss is not finite.
    """

    headline = "The inputs contain NaN or infinity"
    uses = (Inputs, Origin)
    passed = "NaN in the inputs"

    def findings(self, run: Run) -> Iterator[Result]:
        inputs, origin = run.measured(Inputs), run.measured(Origin)
        found = next(((step, n) for step, n in inputs.nonfinite if n > 0), None)
        if (began := origin.found.n_inputs) and (origin.step is not None or found):
            found = (found[0] if origin.step is None and found else origin.step or 0), float(began)
        if found is None:
            is_known = len(inputs.nonfinite) > 0 and "inputs" not in run.reasons
            return self.told(run, (), "" if is_known else run.why_not("inputs"))
        step, n = found
        finding = self.finding(
            f"The inputs of batch {step} contain {n:,.0f} NaN or infinite number{'s' * (n != 1)}.",
            self.severity if origin.is_sought else "info",  # a model may handle NaN as a missing value
            when=step if "batches" in run.sources else (None, None),
            value=float(n),
            causes=("missing values in the data, or a division by zero in a transform",),
            next_steps=("Find these samples with torch.isfinite(x), then fill or drop them",),
        )
        return self.told(run, [finding])
