"""nonfinite.contained and nonfinite.first: where NaN and infinity arise."""

import math
from collections.abc import Iterator

from hookcb.core.text import as_layer, join_names
from hookcb.diagnosis.fault import EVERYTHING, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.origin import Origin
from hookcb.diagnosis.reader import why_unseen
from hookcb.diagnosis.run import Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding

UNSEEN = "too little was seen of the backward"


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


@fault(
    "nonfinite.first",
    Site.MODULES,
    leads_to=EVERYTHING,
    exact=True,
    shown_by="layers.nonfinite",
    draws_limit=True,
)
class FirstNan(Fault):
    """The first module that makes NaN or infinity from finite inputs, or from finite gradients.

    Formula: the batch is run again, see `hookcb.nans.search`. Without `Diagnose`: the parameters with NaN or
    infinite gradients at the first step with any. Steps that a GradScaler with a scale above 1 has skipped
    are left out.
    """

    headline = "A number is NaN or infinite"
    uses = (Origin,)

    def findings(self, run: Run) -> Iterator[Result]:
        origin = run.measured(Origin)
        if (found := origin.found).message:
            named = self.finding(
                found.message, at=found.at, when=(origin.step, origin.step), value=found.value,
                causes=found.causes, next_steps=found.next_steps,
            )  # fmt: skip
            yield from self.told(run, [named])
            return
        bad = _nonfinite_gradients(run)
        step = next((step for step, x in run.loss if not math.isfinite(x)), None)
        if bad:
            yield self._nonfinite(run, bad)
        elif step is not None:
            yield Skipped(f"the loss of step {step} was not finite; its origin was not searched for")
        elif run.is_one_backward:
            yield Passed("NaN and infinite gradients")
        elif "batch" in run.sources:
            yield Passed("NaN and infinities") if origin.has_looked else Skipped(UNSEEN)
        else:
            yield Skipped(why_unseen(["batch"], run.reader))

    def _nonfinite(self, run: Run, bad: dict[str, int]) -> Finding:
        step = min(bad.values())
        first, *others = [run.params[name] for name, at in bad.items() if at == step]
        n = dict(first.series("nonfinite")).get(step, math.nan)
        number = "" if math.isnan(n) else f"{n:,.0f} "
        more = f", as have {join_names([p.name for p in others], 3)}" if others else ""
        return self.finding(
            f"The gradient of {first.name} has {number}NaN or infinite element{'s' * (n != 1)} at step "
            f"{step}{more}.",
            at=first,
            when=(step, None),
            value=n,
            limit=0.0,
            causes=(
                "an operation in the forward or backward that is not defined for its input, such as 0/0",
            ),
            next_steps=(run.advise("NaN"),),
        )


def _nonfinite_gradients(run: Run) -> dict[str, int]:
    """First step with a NaN or infinite gradient that no GradScaler handles, by parameter."""
    scale, skipped = (dict(run.steps.get(stat, Series())) for stat in ("scale", "skipped"))
    bad = {}
    for p in run.params.values():
        steps = [step for step, n in p.series("nonfinite") if n > 0]
        steps = [step for step in steps if not (skipped.get(step, 0) > 0 and scale.get(step, 1) > 1)]
        if p.first_bad is not None or steps:
            bad[p.name] = steps[0] if p.first_bad is None else p.first_bad
    return bad
