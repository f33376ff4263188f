"""label.copies_input and label.padding: targets of a language model that are its input, or its padding."""

from collections.abc import Iterator

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.tokens import Tokens
from hookcb.diagnosis.rules import loss_left
from hookcb.diagnosis.run import Run

COPIED = 0.05  # share of the first loss
MAX_PADDING = 0.05  # share of the targets


@fault(
    "label.copies_input",
    Site.INPUT,
    needs="batches graph",
    leads_to="loss.* update.*",
    subject="tokens",
    exact=True,
)
class CopiedInput(Fault):
    """Targets that are the tokens which the model embeds at the same position.

    Exact: all targets of a cross-entropy, in three batches, at least 64. A note, as they are in an
    autoencoder. A warning if no position attends to later ones, as in a model that predicts the next token,
    and the loss has fallen below a twentieth, as it does if only the input must be copied.
    """

    headline = "The targets are the input tokens"
    uses = (Tokens, Loss)
    passed = "targets that are not shifted"

    def findings(self, run: Run) -> Iterator[Result]:
        relations, graph = run.measured(Tokens).relations, run.measured(Loss).graph_of_one
        is_shifted = any(x.is_next for x in relations)
        if not relations or is_shifted or graph.sure_kind != "cross-entropy":
            return self.told(run, (), "" if relations else run.why_not("tokens that are targets"))
        first = relations[0]
        is_causal = bool(first.seeing) and not any(first.seeing.values())
        finding = self.finding(
            f"All {first.n_targets:,} targets of the inspected batches are the tokens that the model "
            "embeds at the same position.",
            "warning" if is_causal and loss_left(run, run.first_loss) < COPIED else "info",
            at=first.layer,
            value=1.0,
            causes=("targets that are not shifted by one, in a model that predicts the next token",),
            next_steps=("Use x[:, :-1] as inputs and x[:, 1:] as targets; for an autoencoder this is fine",),
        )
        return self.told(run, [finding])


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
