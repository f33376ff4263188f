"""param.frozen: a model without a parameter that requires a gradient."""

from hookcb.diagnosis.fault import EVERYTHING, Fault, Site, fault
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Run


@fault("param.frozen", Site.MODULES, needs="batches", leads_to=EVERYTHING, exact=True)
class FrozenModel(Fault):
    """A model without a parameter that requires a gradient, whose loss has a graph, say, to the inputs.

    Exact: `requires_grad` of all parameters is False after the backwards and at the end.
    """

    headline = "No parameter of the model is trained"
    uses = (Steps,)
    passed = "a model that is frozen as a whole"
    unless = "too little was seen of the backward"

    def on_end(self, run: Run) -> None:
        params, steps = list(run.loop.model.parameters()), run.measured(Steps)
        n = steps.n_backward
        if steps.first_param is not None or not (n and params) or any(p.requires_grad for p in params):
            return
        held = {id(p) for opt in steps.optimizers.values() for x in opt.param_groups for p in x["params"]}
        self.see(
            f"Backward ran {n} time{'s' * (n != 1)}, but none of the {len(params)} parameters of the model "
            f"requires a gradient, so nothing is trained; the optimizer holds "
            f"{sum(id(p) in held for p in params)} of them.",
            value=float(len(params)),
            causes=("weights that are frozen on purpose, with adapters that were loaded frozen, too",),
            next_steps=(
                "Call requires_grad_() on what is to be trained, before the optimizer is created; PEFT does "
                "it with from_pretrained(…, is_trainable=True)",
            ),
        )

    def tell(self, run: Run) -> None:
        if run.measured(Steps).n_backward:
            self.unless = ""
