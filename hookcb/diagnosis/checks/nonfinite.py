"""Checks of NaN and infinity: where they began, and those that never reach a parameter."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.checks.finding import finding
from hookcb.diagnosis.checks.observed import EVERYTHING, passed_on
from hookcb.diagnosis.evidence import Evidence
from hookcb.diagnosis.registry import Passed, Result, Site, Skipped, check


@check("nonfinite.first", site=Site.MODULES, needs=("batch",), exact=True, leads_to=EVERYTHING)
def nonfinite_first(evidence: Evidence) -> Iterator[Result]:
    """The first module that turns finite inputs, or finite gradients, into NaN or infinity.

    Formula: the batch is run again, see `hookcb.nans.search`.
    """
    is_named = any(observation.code == "nonfinite.first" for observation in evidence.observations)
    step = None if is_named else _not_finite(evidence)
    if step is None:
        yield from passed_on(evidence, "nonfinite.first", "error", "NaN and infinities", requires="backward")
    else:
        yield Skipped(f"step {step} was not finite, but no search for the origin was made")


def _not_finite(evidence: Evidence) -> int | None:
    """First step whose loss or, without a GradScaler, whose gradients are known not to be finite."""
    steps = [step for step, x in evidence.loss if not math.isfinite(x)]
    if "scaler" in evidence.absent:
        bad = (step for p in evidence.params.values() for step, n in p.series("nonfinite") if n > 0)
        steps.extend(bad)
    return min(steps, default=None)


@check("nonfinite.contained", site=Site.BACKWARD, needs=("gradients",), exact=True)
def nonfinite_contained(evidence: Evidence) -> Iterator[Result]:
    """The gradient of a layer's output is NaN or infinite, but those of all parameters are finite.

    Formula: number of NaN or infinite elements > 0 in the gradient of an output, = 0 in those of parameters,
    at one step.

    Needs the gradients of outputs, which `GradientHealth(activations=True)` records.
    """
    known = [layer for layer in evidence.layers.values() if "grad_nonfinite" in layer.stats]
    if not known:
        yield Skipped("needs gradients of outputs, from GradientHealth(activations=True)")
        return
    bad = {step for p in evidence.params.values() for step, n in p.series("nonfinite") if n > 0}
    records = [(step, n, x) for x in known for step, n in x.series("grad_nonfinite") if n > 0]
    contained = [record for record in records if record[0] not in bad]
    if not contained:
        yield Passed("NaN inside the backward")
        return
    step, n, layer = min(contained, key=lambda record: record[0])
    yield finding(
        "nonfinite.contained",
        "warning",
        at=layer,
        when=(step, None),
        value=n,
        limit=0.0,
        message=f"The gradient of the output of {layer.name} has {n:,.0f} NaN or infinite elements at step "
        f"{step}, but those of all parameters are finite.",
        causes=("an operation with an infinite gradient, followed by a mask or a selection of elements",),
        next_steps=("Mask the input of that operation rather than its output",),
    )
