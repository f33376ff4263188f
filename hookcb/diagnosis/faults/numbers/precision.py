"""precision.underflow, precision.overflow: numbers at the ends of the range of float16 and float8."""

import math
from collections.abc import Iterator

import torch

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.rules import before, in_order
from hookcb.diagnosis.run import Absent, Run, Skipped

MIN_LOOKS = 3
NEAR = 2.0  # ratio of the largest number of a dtype to an output that is too close to it
# bfloat16 has the range of float32
NARROW = (torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)
BY_EPS = {torch.finfo(x).eps: x for x in NARROW}
BY_MAX = {torch.finfo(x).max: str(x).removeprefix("torch.") for x in NARROW}


@fault(
    "precision.underflow",
    Site.GRADIENTS,
    needs="gradients",
    leads_to="update.* loss.flat loss.trivial param.not_stepped grad.attenuated",
    exact=True,
)
class Underflow(Fault):
    """Gradients in float16 or float8 that are so small that they lose digits, or become 0.

    Formula: RMS of the gradient of a weight. Limit: where it has lost half of its binary digits, as each
    halving below the smallest normal number of its dtype loses one: 1.9e-6 in float16, in each of the last
    three records before convergence.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2, for the scale of the loss.
    """

    headline = "Gradients are too small for their precision"
    severity = "warning"
    passed = "gradients that are too small for float16 or float8"

    def findings(self, run: Run) -> Iterator[Result]:
        narrow = [p for p in run.params.values() if p.resolution in BY_EPS and p.is_weight]
        until = run.converged_at()
        looks = [(p, before(p.series("rms"), until)) for p in narrow]
        known = [(p, rms) for p, rms in looks if len(rms) >= MIN_LOOKS]
        found = []
        for p, rms in known:
            name, limit = (
                str(BY_EPS[p.resolution]).removeprefix("torch."),
                digits_halved(BY_EPS[p.resolution]),
            )
            largest = max(rms.values[-MIN_LOOKS:])
            if 0 < largest < limit:
                found.append(
                    self.finding(
                        f"The gradient (RMS) of {as_layer(p.name)} is {largest:.2g} or less in {name}, where "
                        f"half of the digits are lost below {limit:.2g}.",
                        at=p,
                        when=(rms.steps[-MIN_LOOKS], rms.steps[-1]),
                        value=largest,
                        limit=limit,
                        causes=("a loss without a scale, or one that is divided by a large number",),
                        next_steps=("Scale the loss by torch.amp.GradScaler, or train in bfloat16",),
                    )
                )
        few = Skipped(f"fewer than {MIN_LOOKS} gradients of weights in low precision were recorded")
        unless = few if narrow else Absent("no weight is in float16 or float8")
        yield from self.told(run, found, "" if known else unless)


def digits_halved(dtype: torch.dtype) -> float:
    """Number at which a dtype has half of the binary digits that it has above its smallest normal number."""
    info = torch.finfo(dtype)
    return info.smallest_normal * 2.0 ** -(round(-math.log2(info.eps)) // 2)


@fault(
    "precision.overflow",
    Site.MODULES,
    needs="activations",
    leads_to="nonfinite.* amp.scale_collapse loss.diverging",
    shown_by="layers.abs_max",
    draws_limit=True,
)
class Overflow(Fault):
    """Outputs in float16 or float8 that are close to the largest number of their dtype.

    Formula: the largest magnitude of a layer's output, in each of the last three records. Limit: half of the
    largest number of its dtype: 32,752 in float16, 28,672 in float8_e5m2, 224 in float8_e4m3fn. A float16
    beyond its largest number is infinite, and a float8 that is made with saturation loses its size.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, for the ranges.
    """

    headline = "Activations are too large for their precision"
    severity = "warning"
    passed = "outputs that are close to the largest number of float16 or float8"

    def findings(self, run: Run) -> Iterator[Result]:
        narrow = [layer for layer in in_order(run) if layer.largest in BY_MAX]
        known = [(layer, sizes) for layer in narrow if len(sizes := layer.series("abs_max")) >= MIN_LOOKS]
        found = []
        for layer, sizes in known:
            limit, least = layer.largest / NEAR, min(sizes.values[-MIN_LOOKS:])
            if least > limit:
                found.append(
                    self.finding(
                        f"The output of {as_layer(layer.name) or 'the model'} reaches {least:,.5g} in "
                        f"{BY_MAX[layer.largest]}, whose largest number is {layer.largest:,.5g}.",
                        at=layer,
                        when=(sizes.steps[-MIN_LOOKS], sizes.steps[-1]),
                        value=least,
                        limit=limit,
                        causes=("activations that grow from layer to layer, or inputs on a large scale",),
                        next_steps=("Normalize before that layer, or train in bfloat16",),
                    )
                )
        few = Skipped(f"fewer than {MIN_LOOKS} outputs in low precision were recorded")
        unless = few if narrow else Absent("no output is in float16 or float8")
        yield from self.told(run, found, "" if known else unless)
