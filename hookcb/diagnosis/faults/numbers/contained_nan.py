"""nonfinite.contained: NaN and infinity that never reach a parameter."""

from collections.abc import Iterator

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.run import Passed, Run, Skipped


@fault(
    "nonfinite.contained",
    Site.BACKWARD,
    needs="gradients",
    exact=True,
    shown_by="params.nonfinite",
    draws_limit=True,
)
class ContainedNan(Fault):
    """A NaN or infinite gradient of a layer's output, at a step with finite gradients of all parameters.

    Formula: number of NaN or infinite elements > 0 in the gradient of an output, = 0 in those of parameters,
    at one step. `GradientHealth(activations=True)` records the gradients of outputs.
    """

    headline = "NaN arises inside the backward"
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        known = [layer for layer in run.layers.values() if "grad_nonfinite" in layer.stats]
        if not known:
            is_command = run.reader == "command"
            why = "needs gradients of outputs, from GradientHealth(activations=True)"
            yield Skipped("gradients of the outputs of layers were not recorded" if is_command else why)
            return
        bad = {step for p in run.params.values() for step, n in p.series("nonfinite") if n > 0}
        records = [(step, n, x) for x in known for step, n in x.series("grad_nonfinite") if n > 0]
        contained = [record for record in records if record[0] not in bad]
        if not contained:
            yield Passed("NaN inside the backward")
            return
        step, n, layer = min(contained, key=lambda record: record[0])
        yield self.finding(
            f"The gradient of the output of {as_layer(layer.name)} has {n:,.0f} NaN or infinite elements "
            f"at step {step}, but the gradients of all parameters are finite.",
            at=layer,
            when=(step, None),
            value=n,
            limit=0.0,
            causes=("an operation with an infinite gradient, followed by a mask or a selection of elements",),
            next_steps=("Mask the input of that operation rather than its output",),
        )
