"""Exact checks of parameters that get no gradient or are never updated."""

from collections.abc import Iterator, Sequence

from hookcb.core.text import as_layer, join_names
from hookcb.diagnosis.fault import Result, Site
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import VISIBLE_UPDATE, finding, has_learned, records_needed
from hookcb.diagnosis.run import Param, Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding

MIN_RECORDS = 5  # inspected steps
MIN_STEPS = 20  # of the run


@check(
    "param.unreachable",
    site=Site.BACKWARD,
    shown_by="params.norm",
    needs=("gradients",),
    exact=True,
    leads_to=("loss.flat", "loss.trivial"),
)
def unreachable(evidence: Run) -> Iterator[Result]:
    """A layer that was called in the forward and never received a gradient.

    Formula: `requires_grad`, and `.grad` is None in at least five inspected steps, or after one backward
    without a training. Left out are parameters that are frozen, had a gradient at some step, or belong to a
    layer that was not called, or in less than half of the inspected batches, as a branch that is switched
    off. A warning if the calls of layers were not recorded. Nothing is said if no backward was seen at all.
    """
    steps, needed = evidence.steps.get("total_norm"), records_needed(evidence)
    if steps is None or len(steps) < needed:
        yield Skipped(f"fewer than {needed} steps were inspected")
        return
    if "cleared gradients" in evidence.observed:
        yield Skipped("gradients were cleared between the backward and the step")
        return
    is_watched = "batches" in evidence.sources  # so that a backward would have been seen
    has_backward = not evidence.observed.isdisjoint(("backward", "backward beside the model"))
    if is_watched and not has_backward and not any(p.stats for p in evidence.params.values()):
        yield Skipped("no backward was seen")
        return
    ungraded = [p for p in evidence.params.values() if not p.stats and p.n_without >= needed]
    without = [p for p in ungraded if p.layer in evidence.layers and _takes_part(evidence, p.layer)]
    unknown = [p for p in ungraded if p.layer not in evidence.layers and p.layer not in evidence.silent]
    if unknown and "activations" not in evidence.sources and any(p.stats for p in evidence.params.values()):
        yield _without_gradient(unknown, steps)
        return
    if not without and unknown:
        yield Skipped(f"{unknown[0].name} had no gradient, and it is not known whether its layer is used")
        return
    if not without:
        yield Passed("layers without gradient")
        return
    last = max(without, key=lambda p: evidence.layers[p.layer].place)  # nearest to where the graph was cut
    layers = list(dict.fromkeys(p.layer for p in without if p.layer != last.layer))
    more = f", nor did {join_names(map(as_layer, layers), 3)}" if layers else ""
    yield finding(
        "param.unreachable",
        "error",
        at=last,
        when=steps,
        value=float(len(without)),
        limit=0.0,
        message=f"Parameter {last.name} received no gradient in {len(steps)} steps{more}, although its layer "
        "is used in the forward.",
        causes=("a .detach(), .data, no_grad or NumPy operation after this layer cuts it off from the loss",),
        next_steps=(
            f"Follow the output of {as_layer(last.layer) or 'the model'} to the loss; find where it is cut",
        ),
    )


def _takes_part(evidence: Run, layer: str) -> bool:
    """Whether a layer was called in most of the batches in which any layer was."""
    most = max(_n_calls(evidence, name) for name in evidence.layers)
    return 2 * _n_calls(evidence, layer) > most or not most


def _n_calls(evidence: Run, layer: str) -> int:
    return max(map(len, evidence.layers[layer].stats.values()), default=0)


def _without_gradient(params: Sequence[Param], steps: Series) -> Finding:
    """Finding about parameters of layers that may not have been called."""
    first, names, n = params[0], [p.name for p in params], len(steps)
    looks = "one backward" if n == 1 else f"{n} steps"
    is_one = len(names) == 1
    subject, it = (
        (f"Parameter {names[0]}", "it") if is_one else (f"Parameters {join_names(names, 4)}", "them")
    )
    return finding(
        "param.unreachable",
        "warning",
        at=first,
        when=steps,
        value=float(len(params)),
        limit=0.0,
        message=f"{subject} received no gradient in {looks}; the loss may not depend on {it}.",
        causes=("a layer that is not used in the forward, or an output that does not reach the loss",),
        next_steps=(f"Check that the forward uses {as_layer(first.layer) or first.name}, or freeze it",),
    )


@check(
    "param.not_in_optimizer",
    site=Site.OPTIMIZER,
    needs=("gradients", "optimizers"),
    exact=True,
    leads_to=("loss.*",),
)
def not_in_optimizer(evidence: Run) -> Iterator[Result]:
    """A parameter that gets gradients but is in no optimizer, so it is never updated.

    Formula: `.grad` is not None at some step, and no parameter group of a known optimizer contains the
    parameter. Left out is one that has changed, as something else updates it.
    """
    if evidence.is_by_hand:
        yield Skipped("the loop updates its weights without a torch.optim.Optimizer")
        return
    is_compared = "batches" in evidence.sources  # weights at the end with those at the beginning
    params = [
        p
        for p in evidence.params.values()
        if p.stats and not p.is_optimized and not (is_compared and p.has_moved)
    ]
    if not any(p.stats for p in evidence.params.values()):
        yield Skipped("no parameter had a gradient at a step")
        return
    if not params:
        yield Passed("parameters outside the optimizer")
        return
    is_of_copy = evidence.foreign.issuperset(p.shape for p in params)
    copies = " The optimizer has others of the same shapes, which are not the model's." if is_of_copy else ""
    part = "the optimizer was created from a part of the model, or before layers were added"
    copied = "the optimizer was created before the model, or a part of it, was copied or created anew"
    yield finding(
        "param.not_in_optimizer",
        "error",
        at=params[0],
        value=float(len(params)),
        limit=0.0,
        message=f"{len(params)} of {len(evidence.params)} parameters get gradients but are in no optimizer, "
        f"so they are never updated: {join_names([p.name for p in params], 4)}.{copies}",
        causes=(copied if is_of_copy else part,),
        next_steps=(
            "Give the optimizer all of model.parameters(), or freeze these with requires_grad_(False)",
        ),
    )


@check(
    "init.zero",
    site=Site.MODULES,
    shown_by="params.norm",
    needs=("gradients",),
    exact=True,
    leads_to=("loss.flat", "loss.trivial", "unit.dead", "grad.attenuated", "act.collapse"),
)
def zero_layer(evidence: Run) -> Iterator[Result]:
    """A hidden layer whose weight is all zero and gets no gradient, so it stays zero.

    Formula: the norms of the weight and of its gradient are 0 in each of at least five inspected steps, and
    it is not the last weight. A note if the loss falls by a fifth and the model is better than a constant, as
    a branch may be masked to zero on purpose.

    A branch that begins with zeros on purpose gets gradients.
    """
    weights = [p for p in evidence.params.values() if p.is_weight and p.stats and 0 not in p.shape]
    if not any(len(p.series("norm")) >= MIN_RECORDS for p in weights):
        yield Skipped(f"no weight had a gradient in {MIN_RECORDS} inspected steps")
        return
    zero = [p for p in weights[:-1] if _is_zero(p, "weight_norm") and _is_zero(p, "norm")]
    if not zero:
        yield Passed("layers of zeros that stay so")
        return
    first, *others = zero
    yield finding(
        "init.zero",
        "info" if has_learned(evidence, evidence.first_loss) else "error",
        at=first,
        when=first.series("norm"),
        value=0.0,
        message=f"{first.name} and its gradient are all zero, so it stays zero{_also(others)}.",
        causes=("all weights were initialized with zeros", "a branch that is masked to zero"),
        next_steps=(
            "Initialize weights randomly, torch.nn.init.kaiming_normal_(layer.weight); zeros are for biases",
        ),
    )


@check(
    "param.restored",
    site=Site.OPTIMIZER,
    shown_by="params.update_ratio",
    needs=("gradients", "batches"),
    exact=True,
    leads_to=("loss.flat", "loss.trivial"),
)
def restored(evidence: Run) -> Iterator[Result]:
    """A weight that steps change, but that ends bit-identical to how it began.

    Formula: the median update ratio of at least five inspected steps is above 1e-6, there were twenty steps
    or more, and none of 1,024 elements has changed.
    """
    moving = [p for p in evidence.params.values() if p.is_weight and _steps_move(p)]
    if evidence.n_steps < MIN_STEPS or not moving:
        yield Skipped(f"fewer than {MIN_STEPS} steps, or no inspected step changed a weight")
        return
    unchanged = [p for p in moving if not p.has_moved]
    if not unchanged:
        yield Passed("weights that are put back after each step")
        return
    first, *others = unchanged
    yield finding(
        "param.restored",
        "error",
        at=first,
        when=(first.series("update_ratio").steps[0], None),
        value=0.0,
        limit=0.0,
        message=f"Steps change {first.name}, but after {evidence.n_steps} steps it is bit-identical to how "
        f"it began{_also(others)}.",
        causes=("something puts the old value back after each step",),
        next_steps=("Look for code that copies or loads weights inside the loop",),
    )


def _also(others: list[Param]) -> str:
    """Names of other parameters that a message applies to."""
    return f"; the same is true of {join_names([p.name for p in others], 3)}" if others else ""


def _steps_move(param: Param) -> bool:
    ratios = param.series("update_ratio")
    return len(ratios) >= MIN_RECORDS and ratios.median() > max(VISIBLE_UPDATE, param.resolution)


def _is_zero(param: Param, stat: str) -> bool:
    series = param.series(stat)
    return len(series) >= MIN_RECORDS and not any(series.values)
