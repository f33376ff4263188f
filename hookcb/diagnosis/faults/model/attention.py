"""attn.collapse, mask.blind, mask.future: attention to a single position, or to what is to be predicted."""

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import Fault, Measurement, Result, Site, fault
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.operations import MIN_BATCHES, Operations
from hookcb.diagnosis.measurements.tokens import Tokens
from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Finding

LOW_ENTROPY = 0.05  # mean entropy / ln T
MAX_LOW_HEADS = 0.5  # share of the heads
MAX_SEEING = 0.5  # share of the positions that attend to later ones


def low_heads(weights: Tensor) -> Tensor:
    """Share of the heads with a mean entropy below a twentieth of the entropy of uniform attention.

    Args:
        weights: attention weights, `(…, heads, queries, keys)` or `(batch · heads, queries, keys)`.
    """
    p = weights.float()
    relative = -torch.special.xlogy(p, p).sum(-1) / math.log(p.shape[-1])
    relative = relative.masked_fill(p.sum(-1) == 0, math.nan)  # queries that are fully masked
    by_head = relative.movedim(-2, 0).flatten(1) if p.ndim > 3 else relative
    share: Tensor = (by_head.nanmean(1) < LOW_ENTROPY).float().mean()
    return share


def is_blind(weights: Tensor) -> Tensor:
    """Whether each query can see a single key at most, the same one in all samples and heads."""
    rows = (weights > 0).flatten(0, -3)
    return (rows.sum(-1) <= 1).all() & (rows == rows[:1]).all() & (len(rows) > 1)


class OfCalls(Fault):
    """A fault that is told by a number of each call of attention."""

    severity = "warning"
    uses: ClassVar[tuple[type[Measurement], ...]] = (Operations,)
    at_most = math.inf  # calls of a layer
    _step = 0

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, list[tuple[int, Tensor]]] = {}
        self.numbers: dict[str, list[tuple[int, float]]] = {}  # with its step, of each call, by layer

    def on_model(self, run: Run) -> None:
        run.measured(Operations).listeners.append(self)

    def on_batch(self, run: Run) -> None:
        self._step = run.step

    def is_full(self, layer: str) -> bool:
        """Whether enough calls of a layer are kept."""
        return len(self._seen.get(layer, ())) >= self.at_most

    def keep(self, layer: str, number: Tensor) -> None:
        """Keeps the number of a call."""
        self._seen.setdefault(layer, []).append((self._step, number))

    def tell(self, run: Run) -> None:
        self.numbers = {layer: [(step, float(x)) for step, x in seen] for layer, seen in self._seen.items()}

    def freeze(self) -> None:
        self._seen = {}

    def found(self) -> Iterator[Finding]:
        raise NotImplementedError

    def findings(self, run: Run) -> Iterator[Result]:
        is_known = run.measured(Operations).has_attention
        return self.told(run, self.found(), "" if is_known else run.why_not("attention"))


class _OfAttention(OfCalls):
    """A fault that is told by the attention weights of each call."""

    number: Callable[[Tensor], Tensor]

    def see_attention(self, layer: str, m: Any, weights: Tensor) -> None:
        if not self.is_full(layer):
            self.keep(layer, self.number(weights))


@fault(
    "mask.blind",
    Site.MODULES,
    needs="batches",
    leads_to="attn.* loss.* grad.* update.* act.*",
    subject="attention",
    exact=True,
)
class BlindMask(_OfAttention):
    """Self-attention in which each position sees one position at most.

    Exact: in three batches, all weights but one of each query are zero, and the key that is left is the same
    in all samples and heads. Attention that is sharp because its scores are large differs between samples.
    """

    headline = "A mask hides all other positions"
    passed = "masks that hide all other positions"
    number, at_most = staticmethod(is_blind), MIN_BATCHES

    def found(self) -> Iterator[Finding]:
        for layer, numbers in self.numbers.items():
            if len(numbers) >= MIN_BATCHES and all(x for _, x in numbers):
                yield self.finding(
                    f"Each position of {as_layer(layer) or 'the model'} attends to at most one position, "
                    "the same in all samples and heads, so tokens do not see each other.",
                    at=layer,
                    when=numbers[0][0],
                    causes=("a mask that is inverted, or that excludes all positions but one",),
                    next_steps=(
                        "Print the mask: in scaled_dot_product_attention True means attend, in "
                        "nn.MultiheadAttention it means do not",
                    ),
                )


@fault(
    "attn.collapse",
    Site.MODULES,
    needs="batches",
    leads_to="grad.* loss.* update.too_small",
    subject="attention",
)
class CollapsedAttention(_OfAttention):
    """Attention heads that attend to a single position.

    Formula: mean entropy of the attention weights / ln T below 0.05 in more than half of the heads, in each
    of at least three inspected batches; T ≥ 4 keys.

    Source: Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, 2023.
    """

    headline = "Attention collapses to a single position"
    passed = "attention to a single position"
    number = staticmethod(low_heads)

    def found(self) -> Iterator[Finding]:
        for layer, numbers in self.numbers.items():
            known = [(step, x) for step, x in numbers if not math.isnan(x)]
            least = min((x for _, x in known), default=0.0)
            if len(known) >= MIN_BATCHES and least > MAX_LOW_HEADS:
                yield self.finding(
                    f"At least {least:.0%} of the heads of {as_layer(layer) or 'the model'} attend to "
                    f"one place only: its entropy is below {LOW_ENTROPY:.0%} of the entropy of uniform "
                    "attention.",
                    at=layer,
                    when=known[0][0],
                    value=least,
                    causes=("scores before the softmax are far too large, or are not divided by √d",),
                    next_steps=("Divide the scores by √d, and check the size of the query and key weights",),
                )


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
            return self.told(run, (), "" if is_known else run.why_not("masks of the tokens"))
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
        return self.told(run, [finding])
