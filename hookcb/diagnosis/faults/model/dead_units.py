"""unit.dead: units that get no gradient."""

import math
from collections.abc import Iterator
from itertools import takewhile

from hookcb.core.text import as_layer
from hookcb.diagnosis.advice import lower_rate
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.dead_units import MIN_EXAMPLES, MIN_LOOKS, Dead, DeadUnits
from hookcb.diagnosis.rules import LATEST, finite, in_order, place, records_needed, trailing, weights
from hookcb.diagnosis.run import Param, Passed, Run, Series, Skipped, Span
from hookcb.diagnosis.verdict import Finding

Shares = dict[str, tuple[Param, float]]  # a weight and the share of its units, by layer

MAX_DEAD, MAX_DEAD_WARNING = 0.6, 0.8  # share of units; the worst of 75 healthy trainings had 0.44
MIN_UNITS = 8
MIN_LEFT, LARGE_STEP = 0.05, 0.2  # share of the first loss; an update ratio that may have killed all units
ALL_DEAD, NO_DIAGNOSE, SILENT = 0.999, 0.99, 0.95  # share of rows, of rows in records, of zero activations


@fault(
    "unit.dead",
    Site.MODULES,
    needs="gradients",
    leads_to="grad.attenuated update.too_small loss.flat loss.trivial act.collapse param.not_stepped "
    "param.unreachable",
    shown_by="params.zero_rows",
    draws_limit=True,
)
class UnitsWithoutGradient(Fault):
    """Units that no sample activates, so their weights get no gradient and never change.

    Formula: share of the rows of a weight with a gradient of exactly zero in each of 8 inspected steps with
    512 examples; positions of an image or sequence are examples, too, but at most 8 of each, so 64 images
    suffice, from a share of 0.8 on. Without `Diagnose` the number of examples is unknown: then it is the
    smallest share of zero rows in 8 records, from 0.99 on, and dead units are never ruled out. Or no weight
    of the model has a gradient at all, in five records or after one backward. Limit: 0.6, and 0.8 for an
    error; healthy ReLU networks reach 0.44 in narrow layers. A layer is not dead if one of its weights gets
    gradients, such as an LSTM that gets sequences of one element. If whole layers are dead, those before
    them get no gradient either; the finding then names the layer at which the activations become zero.

    Source: Lu et al., "Dying ReLU and Initialization", 2019.
    """

    headline = "Units of a layer get no gradient"
    uses = (DeadUnits,)

    def findings(self, run: Run) -> Iterator[Result]:
        if silent := _silent_since(run):
            since = f"All gradients have been exactly zero since step {silent.first}"
            yield self._all_silent(run, silent, since)
        elif shares := _dead_shares(run, has_converged=run.converged_at() < math.inf):
            yield self._of_shares(run, shares)
        elif silent := _silent_weights(run):
            yield self._all_silent(run, silent, "The gradients of all weights are exactly zero")
        else:
            yield Skipped(f"no weight was inspected {MIN_LOOKS} times and with {MIN_EXAMPLES} examples")

    def _of_shares(self, run: Run, shares: Shares) -> Result:
        worst = max(share for _, share in shares.values())
        if worst < MAX_DEAD:
            if any(p.name in run.measured(DeadUnits).of for p, _ in shares.values()):
                return Passed(f"dead units ({worst:.0%})", worst, MAX_DEAD)
            layers = "units are counted in linear and convolutional layers with 8 of them or more"
            why = "dead units are counted by Diagnose, which knows the number of examples"
            return Skipped(f"{layers}, and there are none" if "batches" in run.sources else why)
        all_dead = [p for p, share in shares.values() if share >= ALL_DEAD]
        begins = _first_silent(run, shares) if all_dead else None
        if all_dead and not begins:
            if _is_silent_throughout(run):
                return Skipped("every gradient is exactly zero, so no layer differs from another")
            begins = _last_dead(run, all_dead)
        param = begins or next(p for p, share in shares.values() if share == worst)
        others = sum(share >= MAX_DEAD for _, share in shares.values()) - (shares[param.layer][1] >= MAX_DEAD)
        return self._dead(run, param, max(worst if begins else 0.0, shares[param.layer][1]), others)

    def _all_silent(self, run: Run, span: Span, what: str) -> Finding:
        param = _first_silent(run, {p.layer: (p, 1.0) for p in weights(run)})
        where = f", and all outputs from {as_layer(param.layer)} on are zero" if param else ""
        return self.finding(
            f"{what}{where}: the model learns nothing.",
            at=param,
            when=span,
            value=1.0,
            limit=MAX_DEAD,
            causes=(
                "a step that was too large, after which no unit is active",
                "an output or a loss that is constant",
            ),
            next_steps=(
                *lower_rate(run),
                "Look at the outputs and the loss at this step: they no longer depend on the weights",
            ),
        )

    def _dead(self, run: Run, param: Param, share: float, others: int) -> Finding:
        rows = param.series("zero_rows")
        span = trailing(rows, lambda x: x >= min(share, MAX_DEAD_WARNING))
        more = f" The same is true of {others} more layer{'s' * (others > 1)}." if others else ""
        known = run.measured(DeadUnits).of.get(param.name)
        n_units = known.n_units if known else param.shape[0]
        name, n = param.layer or param.name, round(min(1.0, share) * n_units)
        looks = f"{len(rows)} records"
        if known:
            positions = " of several positions each" if known.n_places > 1 else ""
            looks = f"{known.n_looked} steps with {known.n_examples:,} examples{positions}"
        return self.finding(
            f"Layer {name}: {share:.0%} of its units ({n} of {n_units}) had no gradient in "
            f"{looks} (limit {MAX_DEAD:.0%}).{more}",
            "error" if share >= MAX_DEAD_WARNING else "warning",
            at=param,
            when=(known.since if known else span.first if span else None, span.last if span else None),
            value=share,
            limit=MAX_DEAD,
            causes=("a bias far below zero or weights that are too large", "a step that was too large"),
            next_steps=(
                f"Look at the bias of {as_layer(name)}, and at the inputs of the layer",
                *lower_rate(run),
                "Use LeakyReLU or GELU instead of ReLU",
            ),
        )


def _silent_since(run: Run) -> Span | None:
    """The last records, if all their gradients are zero and a small loss does not explain it."""
    norms = list(run.steps.get("total_norm", Series()))
    silent = [step for step, _ in takewhile(lambda at: at[1] == 0, reversed(norms))]
    if len(silent) < LATEST or len(silent) == len(norms):
        return None
    if len(run.loss):
        is_fault = abs(run.loss.values[-1]) > MIN_LEFT * abs(run.first_loss)
    else:
        ratios = [x for p in weights(run) for step, x in p.series("update_ratio") if step < silent[-1]]
        is_fault = max(ratios, default=0.0) > LARGE_STEP
    return Span(silent[-1], silent[0], len(silent)) if is_fault else None


def _silent_weights(run: Run) -> Span | None:
    """All records, if all weights have zero gradients; in a training, another parameter must have one."""
    norms = [p.series("norm") for p in weights(run) if p.stats]
    if min(map(len, norms), default=0) < records_needed(run) or any(any(x.values) for x in norms):
        return None
    is_constant = not run.is_one_backward and _is_silent_throughout(run)
    return None if is_constant else Span(norms[0].steps[0], norms[0].steps[-1], len(norms[0]))


def _dead_shares(run: Run, has_converged: bool) -> Shares:
    """The weight with the fewest dead units and their share, by layer in order; in a list, the most."""
    shares: Shares = {}
    known = run.measured(DeadUnits).of
    for p in weights(run):
        share = _dead_share(p, known.get(p.name), has_converged)
        before = shares[p.layer][1] if p.layer in shares else math.nan
        is_list = p.kind.startswith("Parameter")  # its weights have nothing else in common
        if not math.isnan(share) and not (share <= before if is_list else share >= before):
            shares[p.layer] = p, share
    return shares


def _dead_share(param: Param, known: Dead | None, has_converged: bool) -> float:
    is_zero = len(sizes := param.series("weight_norm")) > 0 and not any(sizes.values)  # see init.zero
    if (known.n_units if known else param.shape[0]) < MIN_UNITS or is_zero:
        return math.nan
    if known:
        share = known.never if has_converged else known.lately
        is_doubtful = known.n_examples < MIN_EXAMPLES and MAX_DEAD <= share < MAX_DEAD_WARNING
        return share if known.is_enough and not is_doubtful else math.nan
    if len(rows := finite(param.series("zero_rows").values)) < MIN_LOOKS:
        return math.nan
    return min(rows) if min(rows) >= NO_DIAGNOSE else 0.0


def _is_silent_throughout(run: Run) -> bool:
    """Whether no parameter has ever had a gradient, as with a constant loss."""
    return not any(x > 0 for p in run.params.values() for x in p.series("norm").values)


def _first_silent(run: Run, shares: Shares) -> Param | None:
    """Weight of the first layer after which, before the next layer with weights, all outputs are zero."""
    last: Param | None = None
    with_weights = {p.layer for p in weights(run)}
    for layer in in_order(run):
        if layer.name in with_weights:
            last = shares[layer.name][0] if layer.name in shares else None
        if last and layer.series("zeros").median() >= SILENT:
            return last
    return None


def _last_dead(run: Run, dead: list[Param]) -> Param | None:
    """The dead weight nearest to the loss, except those fed with zeros only: their bias has a gradient."""
    biases = [p for p in run.params.values() if len(p.shape) == 1]
    with_bias = {p.layer for p in biases if any(x > 0 for x in p.series("norm").values)}
    ordered = sorted(dead, key=place)
    return next((p for p in reversed(ordered) if p.layer not in with_bias), ordered[-1])
