"""mask.future: attention to the tokens that are to be predicted."""

from collections.abc import Iterator

from torch import nn

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.tokens import Tokens
from hookcb.diagnosis.run import Run

MAX_SEEING = 0.5  # share of the positions that attend to later ones


@fault(
    "mask.future",
    Site.MODULES,
    needs="batches graph",
    leads_to="loss.* update.* attn.* grad.*",
    subject="tokens",
    exact=True,
)
class FutureMask(Fault):
    """A model that predicts the next token, and attends to it.

    Exact: in three batches, each target of a cross-entropy is the token that the model embeds one position
    later, and in all layers with self-attention, attention weights to later positions are above 1e-6 at more
    than half of the positions with a target. Not judged beside recurrent layers, as a model may encode a
    whole sequence on purpose, to decode it again.
    """

    headline = "The model sees the tokens it predicts"
    uses = (Tokens, Loss)
    passed = "masks that show the next token"
    has_recurrent = False

    def on_model(self, run: Run) -> None:
        self.has_recurrent = any(isinstance(m, nn.RNNBase) for m in run.loop.model.modules())

    def findings(self, run: Run) -> Iterator[Result]:
        relations, graph = run.measured(Tokens).relations, run.measured(Loss).graph_of_one
        following = [x for x in relations if x.is_next and graph.sure_kind == "cross-entropy"]
        shares = [share for x in following for share in x.seeing.values()]
        if not shares or min(shares) <= MAX_SEEING or self.has_recurrent:
            is_known = any(x.seeing for x in relations)
            yield from self.told(run, (), "" if is_known else run.why_not("masks of the tokens"))
            return
        seeing = following[0].seeing
        share = min(seeing.values())
        finding = self.finding(
            f"Each target is the next token, and {share:.0%} of the positions attend to later tokens (limit "
            f"{MAX_SEEING:.0%}), in all {len(seeing)} layers with self-attention: the model sees the answer.",
            at=next(iter(seeing)),
            value=share,
            causes=("no causal mask, or one that is inverted, transposed or never passed on",),
            next_steps=(
                "Mask later positions: is_causal=True in scaled_dot_product_attention, or a mask that is "
                "-inf above the diagonal",
            ),
        )
        yield from self.told(run, [finding])
