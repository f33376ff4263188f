"""unit.saturated: units at the flat ends of tanh and sigmoid."""

from collections.abc import Iterator

from hookcb.diagnosis import rules
from hookcb.diagnosis.advice import begins_large, is_trained, lower_rate
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.layer_rows import LayerRows
from hookcb.diagnosis.run import Layer, Passed, Run, Skipped, Span
from hookcb.diagnosis.verdict import Finding, Severity

MAX_SATURATED_WARNING = 0.9  # share of units


@fault(
    "unit.saturated",
    Site.MODULES,
    needs="activations",
    leads_to="grad.attenuated loss.flat loss.trivial act.collapse update.too_small",
    subject="flat ends",
    shown_by="layers.saturated",
    draws_limit=True,
)
class SaturatedUnits(Fault):
    """Saturated units of tanh and sigmoid, which pass almost no gradient.

    Formula: median over five records, up to the last one before convergence, of the share of outputs with
    |tanh| above 0.97 or a sigmoid outside (0.03, 0.97). Limit: half of the units; an error above 0.9 after
    50 batches, unless the loss has fallen by a fifth, as a model may do well despite them. A note if they
    were not saturated in the first five records, as they have then learned it. Layers after the last
    weights are left out, as the output of a confident classifier should saturate. No finding if the loss
    reaches a fifth of that of the best constant, an R² of 0.8: the model does well despite them.

    Source: Glorot & Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    2010.
    """

    headline = "Units are stuck at the flat ends"
    uses = (LayerRows,)

    def findings(self, run: Run) -> Iterator[Result]:
        until, head = run.converged_at(), rules.place_of_head(run)
        layers = [x for x in rules.in_order(run) if x.place < head]
        shares = [(layer, rules.before(layer.series("saturated"), until)) for layer in layers]
        if not (shares := [(layer, series) for layer, series in shares if len(series) >= rules.LATEST]):
            yield Skipped(f"no tanh or sigmoid inside the model was inspected {rules.LATEST} times")
            return
        worst = max(rules.median(series.values) for _, series in shares)
        if rules.does_well(run):
            yield Passed(f"saturated units ({worst:.0%}, but the model does well)")
            return
        for layer, series in shares:
            if span := rules.trailing(series, lambda x: x > rules.MAX_SATURATED):
                began = rules.median(series.values[: rules.LATEST]) > rules.MAX_SATURATED
                yield self._saturated(run, layer, rules.median(series.values[-span.n :]), span, began)
                return
        yield Passed(f"saturated units ({worst:.0%})", worst, rules.MAX_SATURATED)

    def _saturated(self, run: Run, layer: Layer, share: float, span: Span, began: bool) -> Finding:
        places = [(p.place_of_layer, p) for p in rules.weights(run)]
        feeds = [p for place, p in places if place is not None and place < layer.place]
        is_large = begins_large(feeds[-1:])
        is_harmful = run.n_batches >= rules.MIN_BATCHES and not rules.has_learned(run, run.first_loss)
        severity: Severity = "error" if share > MAX_SATURATED_WARNING and is_harmful else "warning"
        return self.finding(
            f"Layer {layer.name}: {share:.0%} of its outputs are at the flat ends of {layer.kind}, where "
            f"almost no gradient passes (limit {rules.MAX_SATURATED:.0%}).",
            severity if began else "info",
            at=layer,
            when=span,
            value=share,
            limit=rules.MAX_SATURATED,
            causes=(
                "the layer before it outputs values that are too large",
                *(("a step that was too large",) if is_trained(run, layer) else ()),
            ),
            next_steps=(
                *(("Initialize the layer before it with smaller weights",) if is_large else ()),
                *lower_rate(run, layer),
                "Add a normalization layer before it",
            ),
        )
