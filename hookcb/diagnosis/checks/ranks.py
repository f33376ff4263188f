"""Check of gradients that several ranks average."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.fault import Result, Site
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import finding, ratio
from hookcb.diagnosis.run import Passed, Run, Skipped

MIN_STEPS = 4
ROUNDING = 1e-3  # relative difference of two norms that are rounded


@check(
    "grad.rescaled",
    site=Site.GRADIENTS,
    shown_by="params.norm",
    needs=("gradients",),
    exact=True,
    leads_to=("loss.*", "update.*"),
    subject="replicas",
)
def rescaled_gradients(evidence: Run) -> Iterator[Result]:
    """Gradients that are averaged or summed over ranks once more after DistributedDataParallel's backward.

    Exact: norm of a parameter's gradient as the optimizer gets it / norm after the backward, which is one
    over the number of ranks, or that number, within 0.001, in each of four inspected steps or more. A note
    for optimizers like Adam, which undo the factor. A loss, a hook or a communication hook that divides by
    the number of ranks before or in the backward cannot be told from a smaller learning rate: it is not seen.
    A GradScaler's gradients are not compared.

    Source: PyTorch, DistributedDataParallel, which averages gradients over ranks.
    """
    name, reduced = evidence.reduced
    param, after = evidence.params.get(name), dict(reduced)
    given = param.stats.get("clipped_norm") if param is not None else None
    every = [] if given is None else [(step, ratio(x, after.get(step, math.nan))) for step, x in given]
    steps = [(step, x) for step, x in every if math.isfinite(x)]
    if param is None or len(steps) < MIN_STEPS:
        yield Skipped(f"gradients were compared with those after the backward in {len(steps)} steps")
        return
    n = evidence.world
    ratios = sorted(ratio for _, ratio in steps)
    factor = next((x for x in (1 / n, n) if all(abs(ratio / x - 1) < ROUNDING for ratio in ratios)), None)
    if factor is None:
        yield Passed(f"gradients that are averaged over ranks twice ({ratios[len(ratios) // 2]:.3g} of them)")
        return
    what = f"divided by {n}" if factor < 1 else f"multiplied by {n}"
    size = "small" if factor < 1 else "large"
    effect = "undoes that" if param.is_adaptive else f"makes steps that are {n} times too {size}"
    yield finding(
        "grad.rescaled",
        "info" if param.is_adaptive else "warning",
        when=(steps[0][0], steps[-1][0]),
        value=ratios[0],
        limit=1.0,
        message=f"Gradients are {what}, the number of ranks, between the backward and the step, though "
        f"DistributedDataParallel has averaged them; the optimizer {effect}.",
        causes=("code from before DistributedDataParallel that reduces gradients itself",),
        next_steps=("Remove the code that divides or reduces gradients after the backward",),
    )
