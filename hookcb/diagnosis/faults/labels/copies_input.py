"""label.copies_input: targets that are the inputs."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.tokens import Tokens
from hookcb.diagnosis.rules import loss_left
from hookcb.diagnosis.run import Run

COPIED = 0.05  # share of the first loss


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
