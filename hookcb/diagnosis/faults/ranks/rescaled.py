"""grad.rescaled: gradients that several ranks average once more."""

import math
from collections.abc import Iterator

from hookcb.core.optim import detached_scalar
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curve
from hookcb.diagnosis.measurements.processes import Processes
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.rules import ratio
from hookcb.diagnosis.run import Passed, Run, Series, Skipped
from hookcb.hooks.params import find_params

MIN_STEPS = 4
ROUNDING = 1e-3  # relative difference of two norms that are rounded


@fault(
    "grad.rescaled",
    Site.GRADIENTS,
    needs="gradients",
    leads_to="loss.* update.*",
    subject="replicas",
    exact=True,
    shown_by="params.norm",
)
class RescaledGradients(Fault):
    """Gradients that are averaged or summed over ranks once more after DistributedDataParallel's backward.

    Exact: norm of a parameter's gradient as the optimizer gets it / norm after the backward, which is one
    over the number of ranks, or that number, within 0.001, in each of four inspected steps or more. A note
    for optimizers like Adam, which undo the factor. A loss, a hook or a communication hook that divides by
    the number of ranks before or in the backward cannot be told from a smaller learning rate: it is not seen.
    A GradScaler's gradients are not compared.

    Source: PyTorch, DistributedDataParallel, which averages gradients over ranks.
    """

    headline = "Gradients are averaged over ranks twice"
    uses = (Steps, Processes)
    severity = "warning"

    def __init__(self) -> None:
        super().__init__()
        self._norms, self.norms = Curve(), Series()  # of a gradient after the backward
        self.name, self.world = "", 1  # of its parameter; number of ranks

    def on_batch(self, run: Run) -> None:
        replicas = run.measured(Processes).own.replicas
        self.done, self.world = len(replicas) < 2, len(replicas)

    def on_gradients(self, run: Run) -> None:
        loop, param = run.loop, run.measured(Steps).first_param
        is_scaled = loop.scaler is not None and loop.scaler.is_enabled()
        if is_scaled or param is None or param.grad is None:
            return
        if not self.name:
            self.name = next((name for name, p, _ in find_params(loop.model) if p is param), "")
        self._norms.add((run.step, detached_scalar(param.grad.norm())))

    def tell(self, run: Run) -> None:
        self.norms = self._norms.series()

    def freeze(self) -> None:
        self._norms = Curve()

    def findings(self, run: Run) -> Iterator[Result]:
        param, after = run.params.get(self.name), dict(self.norms)
        given = () if param is None else param.series("clipped_norm")
        every = [(step, ratio(x, after.get(step, math.nan))) for step, x in given]
        steps = [(step, x) for step, x in every if math.isfinite(x)]
        if param is None or len(steps) < MIN_STEPS:
            yield Skipped(f"gradients were compared with those after the backward in {len(steps)} steps")
            return
        n, ratios = self.world, sorted(x for _, x in steps)
        factor = next((x for x in (1 / n, n) if all(abs(y / x - 1) < ROUNDING for y in ratios)), None)
        if factor is None:
            usual = ratios[len(ratios) // 2]
            yield Passed(f"gradients that are averaged over ranks twice ({usual:.3g} of them)")
            return
        what, size = (f"divided by {n}", "small") if factor < 1 else (f"multiplied by {n}", "large")
        effect = "undoes that" if param.is_adaptive else f"makes steps that are {n} times too {size}"
        yield self.finding(
            f"Gradients are {what}, the number of ranks, between the backward and the step, though "
            f"DistributedDataParallel has averaged them; the optimizer {effect}.",
            "info" if param.is_adaptive else "warning",
            when=(steps[0][0], steps[-1][0]),
            value=ratios[0],
            limit=1.0,
            causes=("code from before DistributedDataParallel that reduces gradients itself",),
            next_steps=("Remove the code that divides or reduces gradients after the backward",),
        )
