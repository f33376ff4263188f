"""param.duplicated: parameters that are in the groups of an optimizer more than once."""

from collections import Counter

from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Run
from hookcb.hooks.params import named_params


@fault("param.duplicated", Site.OPTIMIZER, needs="batch optimizers", leads_to="update.* loss.*", exact=True)
class Duplicated(Fault):
    """A parameter that is in the optimizers' groups more than once, so each step updates it several times.

    Formula: number of occurrences of a parameter in the groups of all optimizers > 1.
    """

    headline = "A parameter is twice in the optimizer"
    uses = (Steps,)
    passed = "parameters twice in the optimizer"
    unless = "too little was seen of the groups of the optimizer"

    def on_end(self, run: Run) -> None:
        several: Counter[int] = Counter()  # highest count in one optimizer, by id of the parameter
        for opt in run.measured(Steps).optimizers.values():
            self.unless = ""
            several |= Counter(id(p) for group in opt.param_groups for p in group["params"])
        for name, p in named_params(run.loop.model).items():
            if (n := several[id(p)]) > 1:
                self.see(
                    f"Parameter {name} is in the optimizer's groups {n} times, and is updated as often.",
                    at=name.rpartition(".")[0],
                    param=name,
                    value=float(n),
                    causes=("tied weights, or a part of the model that was passed twice",),
                    next_steps=("Pass each parameter once: list(dict.fromkeys(params)) removes duplicates",),
                )
