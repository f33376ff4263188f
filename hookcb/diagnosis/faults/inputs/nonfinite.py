"""input.nonfinite: NaN or infinity in the inputs."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.origin import Origin
from hookcb.diagnosis.run import Run


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
            is_known = len(inputs.nonfinite) > 0 and "inputs" not in run.missing
            return self.told(run, (), "" if is_known else run.why_unseen("inputs"))
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
