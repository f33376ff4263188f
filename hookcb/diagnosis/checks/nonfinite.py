"""Checks of NaN and infinity: their origin, and those that never reach a parameter."""

import math
from collections.abc import Iterator

from hookcb.core.text import as_layer, join_names
from hookcb.diagnosis.checks.observed import passed_on
from hookcb.diagnosis.fault import EVERYTHING, Result, Site
from hookcb.diagnosis.reader import why_unseen
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import finding
from hookcb.diagnosis.run import Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding


@check(
    "nonfinite.first",
    site=Site.MODULES,
    shown_by="layers.nonfinite",
    draws_limit=True,
    needs=(),
    exact=True,
    leads_to=EVERYTHING,
)
def nonfinite_first(evidence: Run) -> Iterator[Result]:
    """The first module that makes NaN or infinity from finite inputs, or from finite gradients.

    Formula: the batch is run again, see `hookcb.nans.search`. Without `Diagnose`: the parameters with NaN or
    infinite gradients at the first step with any. Steps that a GradScaler with a scale above 1 has skipped
    are left out.
    """
    is_named = any(x.code == "nonfinite.first" for x in evidence.observations)
    bad = {} if is_named else _nonfinite_gradients(evidence)
    step = next((step for step, x in evidence.loss if not math.isfinite(x)), None)
    if bad:
        yield _nonfinite(evidence, bad)
    elif step is not None and not is_named:
        yield Skipped(f"the loss of step {step} was not finite; its origin was not searched for")
    elif evidence.is_one_backward:
        yield Passed("NaN and infinite gradients")
    elif "batch" in evidence.sources:
        yield from passed_on(evidence, "nonfinite.first", "error", "NaN and infinities", requires="backward")
    else:
        yield Skipped(why_unseen(["batch"], evidence.reader))


def _nonfinite_gradients(evidence: Run) -> dict[str, int]:
    """First step with a NaN or infinite gradient that no GradScaler handles, by parameter."""
    scale, skipped = (dict(evidence.steps.get(stat, Series())) for stat in ("scale", "skipped"))
    bad = {}
    for p in evidence.params.values():
        steps = [step for step, n in p.series("nonfinite") if n > 0]
        steps = [step for step in steps if not (skipped.get(step, 0) > 0 and scale.get(step, 1) > 1)]
        if p.first_bad is not None or steps:
            bad[p.name] = steps[0] if p.first_bad is None else p.first_bad
    return bad


def _nonfinite(evidence: Run, bad: dict[str, int]) -> Finding:
    step = min(bad.values())
    first, *others = [evidence.params[name] for name, at in bad.items() if at == step]
    n = dict(first.series("nonfinite")).get(step, math.nan)
    number = "" if math.isnan(n) else f"{n:,.0f} "
    more = f", as have {join_names([p.name for p in others], 3)}" if others else ""
    return finding(
        "nonfinite.first",
        "error",
        at=first,
        when=(step, None),
        value=n,
        limit=0.0,
        message=f"The gradient of {first.name} has {number}NaN or infinite element{'s' * (n != 1)} at step "
        f"{step}{more}.",
        causes=("an operation in the forward or backward that is not defined for its input, such as 0/0",),
        next_steps=(evidence.advise("NaN"),),
    )


@check(
    "nonfinite.contained",
    site=Site.BACKWARD,
    shown_by="params.nonfinite",
    draws_limit=True,
    needs=("gradients",),
    exact=True,
)
def nonfinite_contained(evidence: Run) -> Iterator[Result]:
    """A NaN or infinite gradient of a layer's output, at a step with finite gradients of all parameters.

    Formula: number of NaN or infinite elements > 0 in the gradient of an output, = 0 in those of parameters,
    at one step. `GradientHealth(activations=True)` records the gradients of outputs.
    """
    known = [layer for layer in evidence.layers.values() if "grad_nonfinite" in layer.stats]
    if not known:
        yield Skipped(
            "gradients of the outputs of layers were not recorded"
            if evidence.reader == "command"
            else "needs gradients of outputs, from GradientHealth(activations=True)"
        )
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
        message=f"The gradient of the output of {as_layer(layer.name)} has {n:,.0f} NaN or infinite elements "
        f"at step {step}, but the gradients of all parameters are finite.",
        causes=("an operation with an infinite gradient, followed by a mask or a selection of elements",),
        next_steps=("Mask the input of that operation rather than its output",),
    )
