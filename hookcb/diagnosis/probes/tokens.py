"""Tokens of a language model: those it embeds, those it attends to, and those that are its targets."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.core.batch import parts
from hookcb.core.text import as_layer
from hookcb.diagnosis.measurements.loss_graph import LossGraph
from hookcb.diagnosis.run import Observation
from hookcb.hooks.hook import Hook

MIN_BATCHES = 3  # and no more are compared
MIN_LENGTH = 4  # tokens of a sequence
MIN_TARGETS = 64  # in all batches
MIN_WEIGHT = 1e-6  # of attention; a mask of -1e4 leaves 0
MAX_SEEING = 0.5  # share of the positions that attend to later ones
MAX_PADDING = 0.05  # share of the targets
MIN_ROWS = 8  # of a table of positions

UNKNOWN = -1  # index of a target that does not count
POSITIONS = ("pos", "wpe")  # in the name of a table of positions


class Embedded(NamedTuple):
    """Call of an embedding in this batch: the layer, the index of its padding or -1, and the indices."""

    layer: str
    padding: int
    indices: Tensor


class Counts(NamedTuple):
    """Targets of a batch compared with the indices of an embedding.

    Attributes:
        layer: name of the embedding.
        padding: index of the padding, -1 if there is none.
        numbers: on the device: targets, those that are not the token at their own position, those that are
            not the next token, and those that are padding after padding.
        seeing: share of the positions with a target that attend to later ones, by layer of attention.
    """

    layer: str
    padding: int
    numbers: Tensor
    seeing: dict[str, Tensor]


class View(NamedTuple):
    """Attention of a sequence of so many tokens to itself: which of the `places` attend to later ones."""

    layer: str
    length: int
    places: Tensor
    sees: Tensor


class Relation(NamedTuple):
    """Embedded tokens that are also the targets.

    Attributes:
        is_next: whether the target is the next token; else it is the token at the same position.
        layer: name of the embedding.
        padding: index of the padding, -1 if there is none.
        n_targets, n_padding: number of targets, and of those that are padding after padding.
        seeing: smallest share, over the batches, of positions with a target that attend to later ones, by
            layer of self-attention.
    """

    is_next: bool
    layer: str
    padding: int
    n_targets: int
    n_padding: int
    seeing: dict[str, float]


class Tokens:
    """Compares the indices that a model embeds with the targets of its loss, in the first inspected batches.

    It reads the indices that embeddings get rather than the input of the model, which may shift its input
    itself. They are copied, and dropped when the gradient is known, which
    tells the targets.

    Attributes:
        n_batches: number of batches that were compared.
        has_embeddings: whether an embedding was called.
    """

    def __init__(self) -> None:
        self._embedded: list[Embedded] = []
        self._views: list[View] = []
        self._counts: dict[tuple[int, int], list[Counts]] = {}  # by order of the call in its batch, and `dim`
        self._hook: Hook | None = None  # on the scores of the current batch
        self._ends: dict[str, list[Tensor]] = {}  # smallest and largest index of each call, by layer
        self.n_batches, self.has_embeddings = 0, False

    @property
    def is_under_way(self) -> bool:
        """Whether tokens were seen, and more batches are compared."""
        return 0 < self.n_batches < MIN_BATCHES

    @property
    def is_open(self) -> bool:
        """Whether more batches are compared."""
        return self.n_batches < MIN_BATCHES

    @property
    def has_indices(self) -> bool:
        """Whether the indices of an embedding were recorded in enough batches."""
        return any(len(ends) >= MIN_BATCHES for ends in self._ends.values())

    @property
    def has_compared(self) -> bool:
        """Whether each embedded token may have a target of its own, as in a language model or a tagger."""
        return bool(self._counts)

    def begin_batch(self) -> None:
        """Forgets the last batch."""
        self._embedded, self._views = [], []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def add_indices(self, layer: str, n_rows: int, indices: Tensor, padding: int) -> None:
        """Records a call of an embedding with so many rows."""
        self.has_embeddings = True
        if not self.is_open or not indices.ndim or not indices.numel():
            return
        if MIN_ROWS <= indices.shape[-1] <= n_rows:
            self._ends.setdefault(layer, []).append(torch.stack(indices.aminmax()))
        if indices.ndim == 2:
            self._embedded.append(Embedded(layer, padding, indices.clone()))

    def add_attention(self, layer: str, weights: Tensor, places: Tensor) -> None:
        """Records which positions attend to later ones.

        Args:
            layer: name of the layer.
            weights: attention weights `(…, len(places), T)`, of a sequence of T to itself.
            places: positions whose weights these are.
        """
        if self.is_open and self._embedded:
            length = weights.shape[-1]
            is_later = torch.arange(length, device=weights.device) > places[:, None]
            sees = ((weights > MIN_WEIGHT) & is_later).any(-1)
            self._views.append(View(layer, length, places, sees.flatten(0, -2)))

    def follow(self, pred: Any, guarded: Callable[..., object]) -> None:
        """Compares the targets with the tokens when the gradient of the model's scores is known.

        Args:
            pred: output of the model.
            guarded: calls a function with arguments; an error in it is not raised.
        """
        outputs = (x for _, x in parts(pred) if isinstance(x, Tensor) and x.is_floating_point())
        scores = next((x for x in outputs if x.grad_fn is not None and x.ndim in (2, 3)), None)
        if self._embedded and self._hook is None and scores is not None:
            self._hook = Hook(scores, lambda _, grad: guarded(self.compare, grad), pre=True)

    def compare(self, grad: Tensor) -> None:
        """Compares the targets of the batch with all that was embedded in it.

        Args:
            grad: gradient of the scores; that of a cross-entropy is negative for the target alone, and zero
                if the target does not count.
        """
        embedded, self._embedded = self._embedded, []
        self.n_batches += 1
        for i, seen in enumerate(embedded):
            for dim in (1, 0):
                if (y := _targets_like(seen.indices, grad, dim)) is not None:
                    self._counts.setdefault((i, dim), []).append(self._count(seen, y, dim))

    def _count(self, seen: Embedded, y: Tensor, dim: int) -> Counts:
        x, is_target = seen.indices, y != UNKNOWN
        n, n_next = y.shape[dim], x.shape[dim] - 1
        own, has_next = x.narrow(dim, 0, n), is_target.narrow(dim, 0, n_next)
        is_not_next = y.narrow(dim, 0, n_next) != x.narrow(dim, 1, n_next)
        is_padding = is_target & (y == seen.padding) & (own == seen.padding)
        kinds = (is_target, is_target & (y != own), has_next & is_not_next, is_padding)
        numbers = torch.stack([kind.sum() for kind in kinds])
        seeing: dict[str, Tensor] = {}
        for view in self._views:
            if view.length == x.shape[dim] and len(view.sees) % x.shape[1 - dim] == 0:
                share = _share_seeing(view, has_next.movedim(dim, 1))
                before = seeing.get(view.layer, share)
                seeing[view.layer] = torch.minimum(before, share)
        return Counts(seen.layer, seen.padding, numbers, seeing)

    def relations(self) -> list[Relation]:
        """Embedded tokens that are the targets, in all batches that were compared."""
        found = []
        for counts in self._counts.values():
            numbers = torch.stack([x.numbers for x in counts]).sum(0).tolist()
            n, n_not_own, n_not_next, n_padding = numbers
            if len(counts) < MIN_BATCHES or n < MIN_TARGETS or (n_not_own and n_not_next):
                continue
            first, *others = counts
            layers = [name for name in first.seeing if all(name in x.seeing for x in others)]
            seeing = {name: min(float(x.seeing[name]) for x in counts) for name in layers}
            found.append(Relation(not n_not_next, first.layer, first.padding, n, n_padding, seeing))
        return found

    def observe_indices(self) -> Iterator[Observation]:
        """Embeddings that got a single index."""
        for layer, ends in self._ends.items():
            low, high = torch.stack(ends)[:, 0].min(), torch.stack(ends)[:, 1].max()
            if len(ends) >= MIN_BATCHES and low == high:
                is_position = any(part in layer.lower() for part in POSITIONS)
                yield Observation(
                    "embed.single_index",
                    layer,
                    value=float(low),
                    text=f"Embedding {as_layer(layer) or 'of the model'} gets index {int(low)} at all "
                    f"positions of all {len(ends)} inspected batches"
                    + (", so the model cannot tell positions apart." if is_position else "."),
                    causes=("positions or ids that are all 0, as torch.zeros gives them",),
                    next_steps=("For positions, pass torch.arange(T); it is fine for an id that all share",),
                    severity="warning" if is_position else "info",
                )


def _targets_like(x: Tensor, grad: Tensor, dim: int) -> Tensor | None:
    """Targets in the shape of `x`, which may be one longer along `dim`; None if they do not fit.

    Args:
        x: indices `(N, T)`, or `(T, N)`.
        grad: gradient of the scores, `(N, T, C)`, `(T, N, C)`, `(N · T, C)` or `(N, C, T)`.
        dim: dimension of the positions in `x`.
    """
    shorter = list(x.shape)
    shorter[dim] -= 1
    shapes = [tuple(x.shape), tuple(shorter)]
    for classes in range(grad.ndim - 1, 0, -1):
        rest = grad.shape[:classes] + grad.shape[classes + 1 :]
        for shape in shapes if x.shape[dim] >= MIN_LENGTH else ():
            is_swapped = rest == shape[::-1] and rest != shape
            if rest == shape or is_swapped or rest == (math.prod(shape),):
                low, index = grad.min(classes)
                y = index.masked_fill(low >= 0, UNKNOWN)
                return y.T if is_swapped else y.reshape(shape)
    return None


def _share_seeing(view: View, has_next: Tensor) -> Tensor:
    """Share of the positions with a target, the last one left out, that attend to later positions.

    Args:
        view: attention of one layer.
        has_next: whether a position `(N, T - 1)` has a target.
    """
    is_inside = view.places < has_next.shape[1]
    sees = view.sees.reshape(len(has_next), -1, len(view.places)).any(1)
    counted = has_next[:, view.places.clamp(max=has_next.shape[1] - 1)] & is_inside
    return (sees & counted).sum() / counted.sum().clamp(min=1)


def observe_tokens(relations: list[Relation], graph: LossGraph, has_recurrent: bool) -> Iterator[Observation]:
    """Faults of a language model: targets that are not shifted, a future that is visible, counted padding.

    Args:
        relations: tokens that are also the targets.
        graph: what the loss is.
        has_recurrent: whether the model has recurrent layers; it may encode a whole sequence, on purpose, to
            decode it again.
    """
    if graph.sure_kind != "cross-entropy":
        return
    following = [x for x in relations if x.is_next]
    for relation in following[:1]:
        if _all_seeing(following) and not has_recurrent:
            yield _visible_future(relation)
    if relations and not following:
        yield _copied_input(relations[0])
    for relation in (following or relations)[:1]:
        share = relation.n_padding / relation.n_targets
        if relation.padding >= 0 and share > MAX_PADDING:
            yield _counted_padding(relation, share)


def _all_seeing(following: list[Relation]) -> bool:
    """Whether all self-attention of the tokens sees the next ones."""
    shares = [share for x in following for share in x.seeing.values()]
    return bool(shares) and min(shares) > MAX_SEEING


def _visible_future(relation: Relation) -> Observation:
    first = next(iter(relation.seeing))
    share = min(relation.seeing.values())
    return Observation(
        "mask.future",
        first,
        value=share,
        text=f"Each target is the next token, and {share:.0%} of the positions attend to later tokens (limit "
        f"{MAX_SEEING:.0%}), in all {len(relation.seeing)} layers with self-attention: the model sees the "
        "answer.",
        causes=("no causal mask, or one that is inverted, transposed or never passed on",),
        next_steps=(
            "Mask later positions: is_causal=True in scaled_dot_product_attention, or a mask that is "
            "-inf above the diagonal",
        ),
    )


def _copied_input(relation: Relation) -> Observation:
    is_causal = bool(relation.seeing) and not any(relation.seeing.values())
    return Observation(
        "label.copies_input",
        relation.layer,
        value=1.0,
        text=f"All {relation.n_targets:,} targets of the inspected batches are the tokens that the model "
        "embeds at the same position.",
        causes=("targets that are not shifted by one, in a model that predicts the next token",),
        next_steps=("Use x[:, :-1] as inputs and x[:, 1:] as targets; for an autoencoder this is fine",),
        severity="" if is_causal else "info",
    )


def _counted_padding(relation: Relation, share: float) -> Observation:
    return Observation(
        "label.padding",
        relation.layer,
        value=share,
        text=f"{share:.0%} of the targets are padding that follows padding (index {relation.padding}, the "
        f"padding_idx of {as_layer(relation.layer) or 'the embedding'}), and the loss counts them (limit "
        f"{MAX_PADDING:.0%}): it looks better than it is on real tokens.",
        causes=("a loss without ignore_index",),
        next_steps=(f"Pass ignore_index={relation.padding} to the loss",),
    )
