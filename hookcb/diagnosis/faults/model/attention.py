"""attn.collapse, mask.blind: attention that sees a single position, by its weights or by its mask."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import Fault, Result, Site, Unknown, fault
from hookcb.diagnosis.measurements.operations import MIN_BATCHES, Operations
from hookcb.diagnosis.run import Run
from hookcb.diagnosis.verdict import Finding

LOW_ENTROPY = 0.05  # mean entropy / ln T
MAX_LOW_HEADS = 0.5  # share of the heads


class _OfAttention(Fault):
    """A fault that is told by a number of each call of attention."""

    severity = "warning"
    uses = (Operations,)
    _step = 0

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, list[tuple[int, Tensor]]] = {}
        self.numbers: dict[str, list[tuple[int, float]]] = {}  # with its step, of each call, by layer

    def on_model(self, run: Run) -> None:
        run.measured(Operations).listeners.append(self)

    def on_batch(self, run: Run) -> None:
        self._step = run.step

    def number(self, weights: Tensor) -> Tensor:
        raise NotImplementedError

    def see_attention(self, layer: str, m: Any, weights: Tensor) -> None:
        self._seen.setdefault(layer, []).append((self._step, self.number(weights)))

    def tell(self, run: Run) -> None:
        self.numbers = {layer: [(step, float(x)) for step, x in seen] for layer, seen in self._seen.items()}

    def freeze(self) -> None:
        self._seen = {}

    def why_unseen(self, run: Run) -> Unknown:
        return "" if run.measured(Operations).has_attention else run.why_not("attention")


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

    def number(self, weights: Tensor) -> Tensor:
        return is_blind(weights)

    def see_attention(self, layer: str, m: Any, weights: Tensor) -> None:
        if len(self._seen.get(layer, ())) < MIN_BATCHES:
            super().see_attention(layer, m, weights)

    def findings(self, run: Run) -> Iterator[Result]:
        seen = [
            self.finding(
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
            for layer, numbers in self.numbers.items()
            if len(numbers) >= MIN_BATCHES and all(x for _, x in numbers)
        ]
        yield from self.told(run, seen, self.why_unseen(run))


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

    def number(self, weights: Tensor) -> Tensor:
        return low_heads(weights)

    def findings(self, run: Run) -> Iterator[Result]:
        yield from self.told(run, self._found(), self.why_unseen(run))

    def _found(self) -> Iterator[Finding]:
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
