"""param.duplicated: parameters that are in the groups of an optimizer more than once."""

from collections import Counter
from collections.abc import Iterator

from hookcb.core.text import join_names
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.held import HeldWeights
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Run
from hookcb.hooks.params import named_params

MIN_SHARED = 2  # batches


@fault("param.duplicated", Site.OPTIMIZER, needs="batch optimizers", leads_to="update.* loss.*", exact=True)
class Duplicated(Fault):
    """A parameter that is in the optimizers' groups more than once, so each step updates it several times.

    Formula: number of occurrences of a parameter in the groups of one optimizer > 1; or two optimizers that
    have each made a step on it with the same gradient, in two batches or more. Nothing is said of optimizers
    that take turns, or that each have a backward of their own.
    """

    headline = "A parameter is twice in the optimizer"
    uses = (HeldWeights, Steps)
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

    def findings(self, run: Run) -> Iterator[Result]:
        shared = {name: n for name, n in run.measured(HeldWeights).shared.items() if n >= MIN_SHARED}
        if self.seen or not shared:
            yield from super().findings(run)
            return
        (name, n), *_ = shared.items()
        yield self.finding(
            f"In {n} inspected batches two optimizers have each made a step with the same gradient on "
            f"{join_names(list(shared), 3)}.",
            "warning",
            at=run.params.get(name, ""),
            param=name,
            value=float(n),
            causes=("a part of the model that two optimizers were given",),
            next_steps=("Give each parameter to one optimizer",),
        )
