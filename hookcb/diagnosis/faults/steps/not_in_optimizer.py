"""param.not_in_optimizer: parameters with gradients that no optimizer has."""

from collections.abc import Iterator

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.faults.steps.replaced import Replaced
from hookcb.diagnosis.frame import Frame
from hookcb.diagnosis.measurements.parameters import Parameters
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Passed, Run, Skipped


@fault("param.not_in_optimizer", Site.OPTIMIZER, needs="gradients optimizers", leads_to="loss.*", exact=True)
class NotInOptimizer(Fault):
    """A parameter that gets gradients but is in no optimizer, so it is never updated.

    Formula: `.grad` is not None at some step, and no parameter group of a known optimizer contains the
    parameter. Left out is one that has changed, as something else updates it, and one of `param.replaced`.
    """

    headline = "The optimizer lacks some parameters"
    uses = (Parameters, Steps)

    def findings(self, run: Run) -> Iterator[Result]:
        if run.measured(Steps).is_by_hand:
            yield Skipped("the loop updates its weights without a torch.optim.Optimizer")
            return
        is_compared = "batches" in run.sources  # weights at the end with those at the beginning
        replaced = run.measured(Replaced).names
        with_gradient = [p for p in run.params.values() if p.stats and p.name not in replaced]
        params = [p for p in with_gradient if not p.is_optimized and not (is_compared and p.has_moved)]
        if not with_gradient:
            yield Skipped("no parameter had a gradient at a step")
            return
        if not params:
            yield Passed("parameters outside the optimizer")
            return
        others, cause = "", "the optimizer was created from a part of the model, or before layers were added"
        if run.measured(Frame).foreign.issuperset(p.shape for p in params):
            others = " The optimizer has others of the same shapes, which are not the model's."
            cause = "the optimizer was created before the model, or a part of it, was copied or created anew"
        yield self.finding(
            f"{len(params)} of {len(run.params)} parameters get gradients but are in no optimizer, "
            f"so they are never updated: {join_names([p.name for p in params], 4)}.{others}",
            at=params[0],
            value=float(len(params)),
            limit=0.0,
            causes=(cause,),
            next_steps=(
                "Give the optimizer all of model.parameters(), or freeze these with requires_grad_(False)",
            ),
        )
