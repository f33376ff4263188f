"""Checks of what goes in: the scale of the inputs, and the balance of two networks in a game."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.checks.finding import finding
from hookcb.diagnosis.evidence import Evidence
from hookcb.diagnosis.registry import Passed, Result, Site, Skipped, check
from hookcb.diagnosis.trends import format_factor, median

RECURRENT = ("RNN", "LSTM", "GRU")
INPUT_SCALE = 100.0  # standard deviation, or its inverse
AT_FIRST = 3  # records
LARGE_STEP, LARGE_LOSS, HALF = 0.2, 3.0, 0.5  # update ratio; times the loss of guessing; of units


@check(
    "input.scale",
    site=Site.INPUT,
    needs=("batch", "gradients"),
    leads_to=("act.*", "attn.*", "grad.*", "loss.*", "nonfinite.*", "unit.*", "update.*"),
)
def input_scale(evidence: Evidence) -> Iterator[Result]:
    """Inputs on a scale far from 1, and a first step that is far too large for it.

    Formula: median standard deviation of the first three batches looked at above 100, and in the first three
    records an update above a fifth of a weight, a first loss above three times that of guessing, or units
    that are saturated or dead; or a recurrent layer that takes them in, whose gates saturate without being
    seen.

    Source: LeCun et al., Efficient BackProp, 1998, section 4.3.
    """
    std = median(evidence.input_std.values[:AT_FIRST])
    if math.isnan(std):
        yield Skipped("no float input was looked at")
        return
    harm = _harm(evidence)
    if std <= INPUT_SCALE or not harm:
        yield Passed(f"scale of the inputs (std {std:.2g})", std, INPUT_SCALE)
        return
    yield finding(
        "input.scale",
        "error",
        when=evidence.input_std,
        value=std,
        limit=INPUT_SCALE,
        message=f"the inputs have a standard deviation of {std:.3g} (limit {INPUT_SCALE:g}), and {harm}.",
        causes=("inputs that are not normalised",),
        next_steps=("subtract the mean of the training inputs and divide by their standard deviation",),
    )


def _harm(evidence: Evidence) -> str:
    """What large inputs have done, "" where nothing is seen of it."""
    params = [p for p in evidence.params.values() if p.is_weight]
    ratios = [x for p in params for x in p.series("update_ratio").values[:AT_FIRST] if math.isfinite(x)]
    largest = max(ratios, default=0.0)
    first = evidence.loss.values[0] if len(evidence.loss) else math.nan
    saturated = [layer.series("saturated").values[:AT_FIRST] for layer in evidence.layers.values()]
    if largest > LARGE_STEP:
        return f"a step changes weights by {format_factor(largest)} of their size"
    if first > LARGE_LOSS * evidence.guess:
        return f"the first loss is {first:.3g}, where guessing has {evidence.guess:.3g}"
    if any(p.kind in RECURRENT and p.place == 0 for p in params):
        return "they go to a recurrent layer, whose gates they drive to their ends"
    if any(median(values) > HALF for values in saturated):
        return "they drive units to their flat ends"
    return "units get no gradient" if any(p.dead > HALF for p in params) else ""
