"""input.scale: inputs far above or below 1."""

import math
from collections.abc import Iterator

from hookcb.diagnosis import rules
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.dead_units import DeadUnits
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Layer, Param, Passed, Run, Skipped

MAX_RMS, MIN_RMS = 30.0, 0.02
LEARNS = 0.5  # of the loss of a constant
N_FIRST = 3  # records
MAX_TIMES_OTHERS = 10.0  # of the inputs of other ranks
MAX_FIRST_LOSS, MAX_DEAD = 3.0, 0.5  # times the loss of guessing; share of units


@fault(
    "input.scale",
    Site.INPUT,
    needs="batch gradients",
    leads_to="act.* attn.* grad.* loss.* nonfinite.* unit.* update.*",
    shown_by="run.input_rms",
    draws_limit=True,
)
class InputScale(Fault):
    """Inputs on a scale far above 1 that harm the training, or far below 1 where nothing is learned.

    Formula: median root mean square of the first three inspected batches above 30, of all inputs or of one
    column of a table with up to 256 columns, and one of these harms: in the first three records, an update
    above a fifth of a weight, a first loss above three times that of guessing, or saturated or dead units; a
    loss that ends no better than that of a constant; or inputs to a recurrent layer, as saturated gates are
    not seen. Only harm on the way from the inputs counts: in layers before the first normalization, which
    takes the scale away, but not that of one column from a layer that has mixed it with others. A note if
    the loss ends below half of that of a constant, as the model learns all the same.
    On several ranks, ten times those of the other ranks are such a harm, and no note: a batch norm may hide
    the scale in training, but a validation uses the statistics of one rank. A warning below 0.02, if in 50
    batches or more the loss has not fallen by a fifth or is no better than that of a constant.

    Of 110 healthy trainings, those with such a harm have inputs of 9.2 at most, and tables have columns of
    1.6. Columns of 69,000 before a batch norm do no harm.

    Source: LeCun et al., Efficient BackProp, 1998, section 4.3.
    """

    headline = "The inputs are far too large or too small"
    uses = (Inputs,)

    def findings(self, run: Run) -> Iterator[Result]:
        inputs = run.measured(Inputs)
        rms, column = _scale(inputs)
        may_learn = rules.has_learned(run, run.first_loss) or rules.need_not_fall(run)
        if math.isnan(rms):
            yield Skipped("no float input was recorded")
        elif 0 < rms < MIN_RMS and len(run.loss) >= rules.MIN_BATCHES and not may_learn:
            yield self.finding(
                f"The inputs have a root mean square of {rms:.2g} (limit {MIN_RMS:g}), and the model has not "
                "learned anything from them.",
                "warning",
                when=inputs.rms,
                value=rms,
                limit=MIN_RMS,
                causes=("inputs that were divided twice, as by 255",),
                next_steps=("Divide the training inputs by their standard deviation",),
            )
        elif rms <= MAX_RMS or not (harm := _harm(run, inputs, bool(column))):
            yield Passed(f"scale of the inputs (root mean square {rms:.2g})", rms, MAX_RMS)
        else:
            subject = f"Column {column} of the inputs has" if column else "The inputs have"
            learns = rules.loss_of_constant(run)[1] < LEARNS and not _is_apart(inputs)
            each = ", column by column" if column else ""
            yield self.finding(
                f"{subject} a root mean square of {rms:.3g} (limit {MAX_RMS:g}), and {harm}.",
                "info" if learns else "error",
                when=inputs.rms,
                value=rms,
                limit=MAX_RMS,
                causes=("inputs that are not normalized",),
                next_steps=(
                    f"Subtract the mean of the training inputs and divide by their standard deviation{each}",
                ),
            )


def _scale(inputs: Inputs) -> tuple[float, str]:
    """Root mean square of the inputs, or of the one column that stands out; number of that column, or ""."""
    rms = rules.median(inputs.rms.values[:N_FIRST])
    columns = [rules.median(values) for values in zip(*inputs.columns, strict=False)]
    known = rules.finite(columns)
    if not known or rules.median(columns) > MAX_RMS:
        return rms, ""
    return max(known), str(columns.index(max(known)))


def _is_apart(inputs: Inputs) -> bool:
    """Whether the inputs of this rank are on another scale than those of the others."""
    return rules.median(inputs.rms.values) > MAX_TIMES_OTHERS * inputs.rms_of_others


def _way(run: Run, is_one_column: bool) -> tuple[list[Layer], list[Param]]:
    """The layers, and their weights, on which the scale of the inputs, or of one of their columns, acts."""
    layers = rules.in_order(run)
    params = [p for p in run.params.values() if p.is_weight]
    norm = next((x.place for x in layers if "Norm" in x.kind and x.kind != "LocalResponseNorm"), math.inf)
    first = min((p.place_of_layer for p in params if p.place_of_layer is not None), default=math.inf)
    if is_one_column and norm > first:
        return layers, params
    before_it = [p for p in params if p.place_of_layer is None or p.place_of_layer < norm]
    return [layer for layer in layers if layer.place < norm], before_it


def _harm(run: Run, inputs: Inputs, is_one_column: bool) -> str:
    """Harm that large inputs have done on their way, "" if none was seen."""
    layers, params = _way(run, is_one_column)
    is_whole = len(layers) == len(run.layers)
    # a normalization after a single layer undoes its scale, so that its steps do not depend on it
    stepping = params if is_whole or len({p.layer for p in params}) > 1 else []
    ratios = [x for p in stepping for x in rules.updates(p).values[:N_FIRST]]
    largest = max(rules.finite(ratios), default=0.0)
    first = run.loss.values[0] if is_whole and len(run.loss) else math.nan
    saturated = [layer.series("saturated").values[:N_FIRST] for layer in layers]
    if largest > rules.MAX_FIRST_UPDATE:
        return f"a step changes weights by {rules.format_factor(largest)} times their size"
    if first > MAX_FIRST_LOSS * (guess := run.measured(Loss).guess):
        return f"the first loss is {first:.3g}, while guessing gives {guess:.3g}"
    if any(p.kind in rules.RECURRENT and p.place == 0 for p in params):
        return "they saturate the gates of a recurrent layer"
    if any(rules.median(values) > rules.MAX_SATURATED for values in saturated):
        return "they saturate units"
    dead = run.measured(DeadUnits).of
    if any(p.name in dead and dead[p.name].lately > MAX_DEAD for p in params):
        return "some units get no gradient"
    if _is_apart(inputs):
        return f"those of other ranks have one of {inputs.rms_of_others:.3g}"
    is_trivial = is_whole and rules.loss_of_constant(run)[1] > rules.MAX_OF_CONSTANT
    return "the model is no better than a constant prediction" if is_trivial else ""
