"""label.copies_input, .shifted and .padding: targets of a language model that are other tokens than meant."""

from collections.abc import Iterator, Sequence

from torch import nn

from hookcb.core.text import as_layer
from hookcb.core.torch_private import Convolution
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.tokens import Relation, Tokens
from hookcb.diagnosis.rules import loss_left
from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Severity

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

    Exact: all targets of a cross-entropy, in three batches, at least 64; each call of an embedding is
    compared. A note, as they are in an autoencoder. A warning if a layer with self-attention lets no position
    see later ones, as in a model that predicts the next token, and no other call has these tokens, as an
    encoder that is to be copied has. An error if there is an encoder as well, whose layers see all positions
    or whose sequences have another length: the decoder gets its targets, not the tokens before. An error,
    too, if one call has the tokens before the targets and another the targets themselves, all layers with
    attention hide later positions, and the loss has fallen below a twentieth, as it does if the answer is in
    the input; not with recurrent or convolutional layers, by which an autoencoder may read its input. A
    recurrent layer that reads the targets from left to right, and from whose output at each position the
    score there is computed without another layer that combines positions, is as a causal layer of attention,
    whatever the loss.
    """

    headline = "The targets are the input tokens"
    uses = (Tokens, Loss)
    passed = "targets that are not shifted"
    has_encoder = False  # whether there are layers other than attention that combine positions

    def on_model(self, run: Run) -> None:
        self.has_encoder = any(isinstance(m, nn.RNNBase | Convolution) for m in run.loop.model.modules())

    def findings(self, run: Run) -> Iterator[Result]:
        relations, graph = run.measured(Tokens).relations, run.measured(Loss).graph_of_one
        relations = [x for x in relations if x.ahead < 2]
        copied = sorted((x for x in relations if not x.is_next), key=lambda x: not x.is_read)
        following = len(relations) > len(copied)
        if not copied or graph.sure_kind != "cross-entropy" or (following and not self._leaks(run, copied)):
            return self.told(run, (), "" if relations else run.why_not("tokens that are targets"))
        first, severity = copied[0], self._severity(copied)
        what, cause = "at the same position", "targets that are not shifted by one"
        if following:
            severity, what = "error", "beside those before them, so it sees the answer"
            cause = "targets that are embedded, as an argument that is used twice"
            advice = f"Embed the inputs only: look at call {first.call + 1} of an embedding in the forward"
        else:
            cause += ", in a model that predicts the next token"
            advice = "Use x[:, :-1] as inputs and x[:, 1:] as targets; for an autoencoder this is fine"
        finding = self.finding(
            f"All {first.n_targets:,} targets of the inspected batches are the tokens that the model "
            f"embeds {what}.",
            severity,
            at=first.layer,
            value=1.0,
            causes=(cause,),
            next_steps=(advice,),
        )
        return self.told(run, [finding])

    def _leaks(self, run: Run, copied: Sequence[Relation]) -> bool:
        if any(x.is_read for x in copied):
            return True
        seeing = copied[0].seeing
        is_causal = bool(seeing) and not any(seeing.values())
        return is_causal and not self.has_encoder and loss_left(run, run.first_loss) < COPIED

    def _severity(self, copied: Sequence[Relation]) -> Severity:
        first, calls = copied[0], {x.call for x in copied}
        if len(calls) > 1 or not (first.is_read or 0.0 in first.seeing.values()):
            return "info"
        return "error" if first.has_others or any(first.seeing.values()) else "warning"


@fault(
    "label.shifted",
    Site.INPUT,
    needs="batches graph",
    leads_to="loss.* valid.*",
    subject="tokens",
    exact=True,
)
class ShiftedTwice(Fault):
    """Targets that are the tokens two positions ahead of those that the model embeds.

    Exact: all targets of a cross-entropy that have such a token, in three batches, at least 64. No call of an
    embedding has the tokens just before the targets, as one of a model that predicts several ahead has.

    Source: transformers, `ForCausalLMLoss`: the loss of a causal model shifts its labels itself.
    """

    headline = "The labels are shifted twice"
    uses = (Tokens, Loss)
    severity = "warning"
    passed = "labels that are shifted twice"

    def findings(self, run: Run) -> Iterator[Result]:
        relations, graph = run.measured(Tokens).relations, run.measured(Loss).graph_of_one
        far = [x for x in relations if x.ahead == 2]
        if not far or len(far) < len(relations) or graph.sure_kind != "cross-entropy":
            return self.told(run, (), "" if relations else run.why_not("tokens that are targets"))
        finding = self.finding(
            f"All {far[0].n_targets:,} targets of the inspected batches are the tokens two positions ahead "
            "of those that the model embeds, so the next token is never learned.",
            at=far[0].layer,
            value=2.0,
            causes=("labels that were shifted, for a model or a loss that shifts them itself",),
            next_steps=("Give a model of transformers its labels unshifted, equal to input_ids; shift once",),
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
            next_steps=(f"Pass ignore_index={first.padding} to the loss, or make them -100, its default",),
        )
        return self.told(run, [finding])
