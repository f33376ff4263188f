"""act.collapse: outputs that are the same for every sample of a batch."""

import math
from collections.abc import Iterator

from hookcb.core.text import as_layer
from hookcb.diagnosis import rules
from hookcb.diagnosis.advice import lower_rate
from hookcb.diagnosis.fault import Fault, Result, Site, fault, findings_of
from hookcb.diagnosis.measurements.layer_rows import LayerRows
from hookcb.diagnosis.run import SPARSE_KINDS, Layer, Passed, Run, Series, Skipped, Span
from hookcb.diagnosis.verdict import Severity

MIN_SPREAD_LEFT = 1e-3  # by one layer, share of the spread before it; if more is left the loss is gradual
MIN_SPREAD = 1e-6  # variance across the batch / second moment; float32 resolves 1e-14 of a square


@fault(
    "act.collapse",
    Site.MODULES,
    needs="activations",
    leads_to="loss.flat loss.trivial grad.attenuated unit.dead",
    shown_by="layers.spread",
    draws_limit=True,
)
class CollapsedActivations(Fault):
    """Outputs that are the same for every sample of a batch, so the samples can no longer be told apart.

    Formula: variance across the batch / second moment, the median over five records up to the last before
    convergence. Limit: 1e-6, a difference of a thousandth between samples. The finding names the first layer
    from which all layers to the end of the model have collapsed: layers that get a constant by design
    (positions, a learned query), or are followed by a batch norm that spreads their outputs, do not count. A
    head alone is not reported: a regression on targets of 2,000 ± 2 has such outputs. Only a note if the
    spread is lost gradually, by a factor below 1,000 at the layer named, as gradients then say more: a
    warning if they do not fade, the outputs are so from the first record on, and the model ends no better
    than a constant.

    Source: Schoenholz et al., "Deep Information Propagation", 2017, for how inputs become alike with depth.
    """

    headline = "Outputs are the same for every sample"
    uses = (LayerRows,)

    def findings(self, run: Run) -> Iterator[Result]:
        until = run.converged_at()
        layers = [x for x in rules.in_order(run) if x.kind not in SPARSE_KINDS]
        spreads = {x.name: rules.before(_spread(x), until) for x in layers}
        if not (known := [x for x in layers if len(spreads[x.name]) >= rules.LATEST]):
            yield Skipped(f"no layer had its outputs compared across the batch {rules.LATEST} times")
            return
        usual = {x.name: rules.median(spreads[x.name].values) for x in known}
        first: tuple[Layer, Span] | None = None
        previous, head = math.inf, rules.place_of_head(run)
        for layer in reversed(known):
            if (span := rules.trailing(spreads[layer.name], lambda x: x < MIN_SPREAD)) is None:
                previous = usual[layer.name]
                break
            first = layer, span
        if first and first[0].place < head:
            layer, span = first
            severity: Severity = "error"
            if usual[layer.name] > MIN_SPREAD_LEFT * previous:
                severity = "warning" if _is_harmful(run, span, spreads[layer.name]) else "info"
            spread = rules.median(spreads[layer.name].values[-span.n :])
            yield self.finding(
                f"From layer {layer.name} on, outputs are the same for every sample: their variance across "
                f"the batch is {spread:.1g} of their second moment (limit {MIN_SPREAD:.0e}).",
                severity,
                at=layer,
                when=span,
                value=spread,
                limit=MIN_SPREAD,
                causes=(
                    "units that are saturated or dead",
                    "an input that does not reach this layer, or is constant",
                ),
                next_steps=(
                    f"Look at the input of {as_layer(layer.name)}, and at its bias and initialization",
                    *lower_rate(run, layer),
                ),
            )
        else:
            # all layers from the last one before the head on would have to collapse
            last = max((x.place for x in known if x.place < head), default=math.inf)
            most = max((usual[x.name] for x in known if x.place >= last), default=math.nan)
            text = f"outputs that are the same for all samples (spread {min(usual.values()):.1g} or more)"
            yield Passed(text, most, MIN_SPREAD)


def _is_harmful(run: Run, span: Span, spreads: Series) -> bool:
    """Whether outputs were the same from the beginning, and nothing else says why nothing was learned."""
    begins_so = span.first == spreads.steps[0]
    return begins_so and rules.is_trivial(run) and not findings_of("grad.attenuated", run)


def _spread(layer: Layer) -> Series:
    """The spread; 0 if the whole output is zero, for which it is not defined."""
    spreads = dict(layer.series("spread"))
    zeros = {step: 0.0 for step, x in layer.series("abs_max") if x == 0}
    pairs = sorted((spreads | zeros).items()) if "spread" in layer.stats else []
    return Series([step for step, _ in pairs], [x for _, x in pairs])
