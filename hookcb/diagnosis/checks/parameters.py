"""Exact checks of parameters: who gets no gradient, and who is never updated."""

from collections.abc import Iterator, Sequence

from hookcb.core.text import join_names
from hookcb.diagnosis.checks.finding import finding
from hookcb.diagnosis.evidence import Evidence, Param, Series
from hookcb.diagnosis.registry import Passed, Result, Site, Skipped, check
from hookcb.diagnosis.trends import records_needed
from hookcb.diagnosis.verdict import Finding

MANY, VISIBLE = 20, 1e-6  # steps, and an update ratio
FEW = 5  # steps that a parameter must have been without gradient


@check("param.unreachable", site=Site.BACKWARD, needs=("gradients",), exact=True, leads_to=("loss.flat",))
def unreachable(evidence: Evidence) -> Iterator[Result]:
    """A layer that was called in the forward, and to which no gradient has ever come.

    Formula: `requires_grad`, and `.grad` None in at least five steps looked at, or after one backward if
    there is no training. Parameters that are frozen, that had a gradient at some step, and those of layers
    that were not called, are left out. A warning if the calls of layers were not recorded.
    """
    steps, needed = evidence.steps.get("total_norm"), records_needed(evidence)
    if steps is None or len(steps) < needed:
        yield Skipped(f"fewer than {needed} steps were looked at")
        return
    ungraded = [p for p in evidence.params.values() if not p.stats and p.n_without >= needed]
    without = [p for p in ungraded if p.layer in evidence.layers]
    unknown = [p for p in ungraded if p.layer not in evidence.layers and p.layer not in evidence.silent]
    if unknown and not evidence.layers:
        yield _without_gradient(unknown, steps)
        return
    if not without and unknown:
        yield Skipped(f"{unknown[0].name} had no gradient, and whether its layer is used was not seen")
        return
    if not without:
        yield Passed("layers without gradient")
        return
    last = max(without, key=lambda p: evidence.layers[p.layer].place)  # nearest to where it was cut
    layers = list(dict.fromkeys(p.layer for p in without if p.layer != last.layer))
    more = f", nor to {join_names(layers, 3)}" if layers else ""
    yield finding(
        "param.unreachable",
        "error",
        at=last,
        when=steps,
        value=float(len(without)),
        limit=0.0,
        message=f"no gradient has come to {last.name} in {len(steps)} steps{more}; the layer is used in the "
        "forward.",
        causes=(
            "a .detach(), .data, no_grad or a step in NumPy behind this layer cuts it off from the loss",
        ),
        next_steps=(
            f"look at what happens to the output of {last.layer or 'the model'} on its way to the loss",
        ),
    )


def _without_gradient(params: Sequence[Param], steps: Series) -> Finding:
    """Parameters of layers that are not known to be called."""
    first, names, n = params[0], [p.name for p in params], len(steps)
    looks = "one backward" if n == 1 else f"{n} steps"
    others = f" or {join_names(names[1:], 3)}" if len(names) > 1 else ""
    return finding(
        "param.unreachable",
        "warning",
        at=first,
        when=steps,
        value=float(len(params)),
        limit=0.0,
        message=f"No gradient has come in {looks} to {first.name}{others}; the loss may not depend on it.",
        causes=("a layer that is not used in the forward, or whose output does not reach the loss",),
        next_steps=(f"Check that the forward uses {first.layer or first.name}, or freeze it",),
    )


@check(
    "param.not_in_optimizer",
    site=Site.OPTIMIZER,
    needs=("gradients", "optimizers"),
    exact=True,
    leads_to=("loss.*",),
)
def not_in_optimizer(evidence: Evidence) -> Iterator[Result]:
    """A parameter that gets gradients and that no optimizer has: it is never updated.

    Formula: `.grad` is not None at some step, and no group of an optimizer has the parameter.
    """
    if evidence.is_by_hand:
        yield Skipped("the loop moves its weights without an optimizer")
        return
    params = [p for p in evidence.params.values() if p.stats and not p.is_optimized]
    if not any(p.stats for p in evidence.params.values()):
        yield Skipped("no parameter had a gradient at a step")
        return
    if not params:
        yield Passed("parameters outside the optimizer")
        return
    first, names = params[0], [p.name for p in params]
    yield finding(
        "param.not_in_optimizer",
        "error",
        at=first,
        value=float(len(params)),
        limit=0.0,
        message=f"{len(params)} of {len(evidence.params)} parameters get gradients and are in no optimizer, "
        f"so they are never updated: {join_names(names, 4)}.",
        causes=("the optimizer was made from a part of the model, or before layers were added",),
        next_steps=(
            "give the optimizer all of model.parameters(), or freeze these with requires_grad_(False)",
        ),
    )


@check(
    "init.zero",
    site=Site.MODULES,
    needs=("gradients",),
    exact=True,
    leads_to=("loss.flat", "unit.dead", "grad.attenuated", "act.collapse"),
)
def zero_layer(evidence: Evidence) -> Iterator[Result]:
    """A hidden layer whose weight is all zero and gets no gradient, so that it stays so.

    Formula: norm of the weight and norm of its gradient are 0 in each of five steps looked at or more; it is
    not the last weight.

    A branch that begins with zeros on purpose gets gradients.
    """
    weights = [p for p in evidence.params.values() if p.is_weight and p.stats]
    if not any(len(p.series("norm")) >= FEW for p in weights):
        yield Skipped(f"no weight got a gradient in {FEW} steps that were looked at")
        return
    zero = [p for p in weights[:-1] if _is_zero(p, "weight_norm") and _is_zero(p, "norm")]
    if not zero:
        yield Passed("layers of zeros that stay so")
        return
    first, names = zero[0], [p.name for p in zero]
    yield finding(
        "init.zero",
        "error",
        at=first,
        when=first.series("norm"),
        value=0.0,
        message=f"the weight of {first.layer} is all zero and no gradient comes to it, so it stays zero"
        f"{'' if len(names) == 1 else f'; the same of {join_names(names[1:], 3)}'}.",
        causes=("all weights were initialised with zeros",),
        next_steps=(
            "initialise weights at random, torch.nn.init.kaiming_normal_(layer.weight); zeros are for biases",
        ),
    )


@check(
    "param.restored",
    site=Site.OPTIMIZER,
    needs=("gradients", "batches"),
    exact=True,
    leads_to=("loss.flat",),
)
def put_back(evidence: Evidence) -> Iterator[Result]:
    """A weight that steps move, and that is at the end where it was at the beginning, to the bit.

    Formula: update ratio above 1e-6 in the median of five steps looked at, twenty steps or more, and none of
    1,024 elements has changed.
    """
    moving = [p for p in evidence.params.values() if p.is_weight and _steps_move(p)]
    if evidence.n_steps < MANY or not moving:
        yield Skipped(f"fewer than {MANY} steps, or none of those looked at has moved a weight")
        return
    found = [p for p in moving if not p.has_moved]
    if not found:
        yield Passed("weights that are put back after each step")
        return
    first, names = found[0], [p.name for p in found]
    yield finding(
        "param.restored",
        "error",
        at=first,
        when=(first.series("update_ratio").steps[0], None),
        value=0.0,
        limit=0.0,
        message=f"each step moves {first.name}, and after {evidence.n_steps} steps it is what it was at the "
        f"beginning, to the bit{'' if len(names) == 1 else f'; the same of {join_names(names[1:], 3)}'}.",
        causes=("something puts the old value back after each step",),
        next_steps=("look for code that copies or loads weights inside the loop",),
    )


def _steps_move(param: Param) -> bool:
    ratios = param.series("update_ratio")
    return len(ratios) >= FEW and ratios.median() > max(VISIBLE, param.resolution)


def _is_zero(param: Param, stat: str) -> bool:
    series = param.series(stat)
    return len(series) >= FEW and not any(series.values)
