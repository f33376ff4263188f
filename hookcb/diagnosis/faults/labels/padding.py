"""label.padding: padding that counts in the loss."""

from collections.abc import Iterator

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.tokens import Tokens
from hookcb.diagnosis.run import Run

MAX_PADDING = 0.05  # share of the targets


@fault("label.padding", Site.INPUT, needs="batches graph", leads_to="loss.*", subject="tokens", exact=True)
class CountedPadding(Fault):
    """Targets that are padding, and count in the loss of a language model.

    Exact: share of the targets that are the embedding's `padding_idx` after another padding, in three
    batches; the loss is a mean cross-entropy without weights, with another `ignore_index`. Limit: 5 %.
    """

    headline = "The loss counts padding"
    uses = (Tokens, Loss)
    severity = "warning"
    passed = "padding among the targets"

    def findings(self, run: Run) -> Iterator[Result]:
        relations, graph = run.measured(Tokens).relations, run.measured(Loss).graph_of_one
        counted = relations if graph.sure_kind == "cross-entropy" else []
        first = next(iter([x for x in counted if x.is_next] or counted), None)
        share = 0.0 if first is None else first.n_padding / first.n_targets
        if first is None or first.padding < 0 or share <= MAX_PADDING:
            is_known = any(x.padding >= 0 for x in relations)
            return self.told(run, (), "" if is_known else run.why_not("padding of the tokens"))
        finding = self.finding(
            f"{share:.0%} of the targets are padding that follows padding (index {first.padding}, the "
            f"padding_idx of {as_layer(first.layer) or 'the embedding'}), and the loss counts them (limit "
            f"{MAX_PADDING:.0%}): it looks better than it is on real tokens.",
            at=first.layer,
            value=share,
            causes=("a loss without ignore_index",),
            next_steps=(f"Pass ignore_index={first.padding} to the loss",),
        )
        return self.told(run, [finding])
