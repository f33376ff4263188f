"""Tokens of a language model: those it embeds, those it attends to, and those that are its targets."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookcb.core import graph
from hookcb.core.batch import parts
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.measurements.loss_terms import main_term, read_terms
from hookcb.diagnosis.measurements.operations import Operations
from hookcb.diagnosis.run import Absent, Run, Skipped
from hookcb.hooks.hook import Hook

MIN_BATCHES = 3  # and no more are compared
MIN_LENGTH = 4  # tokens of a sequence
MIN_TARGETS = 64  # in all batches
MIN_WEIGHT = 1e-6  # of attention; a mask of -1e4 leaves 0
MIN_ROWS = 8  # of a table of positions

# operations that compute each position by itself; some others do along certain dimensions
BY_POSITION = frozenset([*graph.SAME_ORDER, *graph.OF_LAYERS[:2], *graph.SCALING, *graph.SHIFTING])
BY_POSITION |= {"T", "Mm", "Relu", "Gelu", "Tanh", "Sigmoid", "Silu", "NativeDropout", "NativeLayerNorm"}
Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # of indices: their address, shape and strides

AHEAD = (0, 1, 2)  # positions
UNKNOWN = -1  # index of a target that does not count


class Counts(NamedTuple):
    """Targets of a batch compared with the indices of an embedding."""

    layer: str  # the embedding
    padding: int
    # on the device: targets, those that are padding after padding, and those that are not the token at their
    # own position, or so many ahead, for each of `AHEAD`
    numbers: Tensor
    seeing: dict[str, Tensor]  # share of the positions with a target that attend to later ones, by layer
    has_others: bool = False  # whether the model embeds sequences of another length too, as of an encoder
    is_read: bool = False  # see `Relation`


class Relation(NamedTuple):
    """Embedded tokens that are also the targets."""

    ahead: int  # how many positions the target's token is ahead, one of `AHEAD`
    layer: str  # the embedding
    padding: int  # index of the padding, -1 if there is none
    n_targets: int
    n_padding: int  # targets that are padding after padding
    seeing: dict[str, float]  # as in `Counts`, the smallest share over the batches
    has_others: bool = False  # as in `Counts`
    call: int = 0  # number of the embedding's call in its batch
    # whether a recurrent layer reads it from left to right, and each score is computed from that layer's
    # output at the same position
    is_read: bool = False

    @property
    def is_next(self) -> bool:
        """Whether the target is the next token."""
        return self.ahead == 1


class Tokens(Measurement):
    """Compares the indices that a model embeds with the targets of its loss, in the first inspected batches.

    It reads the indices that embeddings get rather than the input of the model, which may shift its input
    itself. They are copied, and dropped when the gradient is known, which tells the targets.
    """

    uses = (Operations,)

    def __init__(self) -> None:
        # of the calls in this batch: the layer, the index of the padding or -1, and the indices
        self._embedded: list[tuple[str, int, Tensor]] = []
        self._places: list[Place] = []  # of the indices of these
        # nodes of the outputs and inputs of recurrent layers that read from left to right, in this batch
        self._read: list[tuple[Any, Any]] = []
        self._recurrent: list[Hook] = []
        # the layer, the number of tokens that attend to each other, and which places attend to later ones
        self._views: list[tuple[str, int, Tensor, Tensor]] = []
        self._counts: dict[tuple[int, int], list[Counts]] = {}  # by order of the call in its batch, and `dim`
        # on the scores of the current batch, or on the node that computed them
        self._hook: Hook | RemovableHandle | None = None
        self._ends: dict[str, list[Tensor]] = {}  # smallest and largest index of each call, by layer
        self.n_batches, self.has_embeddings = 0, False
        self.has_compared = False  # whether each token may have a target, as in a language model or a tagger
        self.relations: list[Relation] = []  # in all batches that were compared
        # number of calls, and smallest and largest index in them, of embeddings that were called often enough
        self.indices: dict[str, tuple[int, int, int]] = {}

    @property
    def is_open(self) -> bool:
        """Whether more batches are compared."""
        return self.n_batches < MIN_BATCHES

    @property
    def is_under_way(self) -> bool:
        """Likewise, and tokens were seen."""
        return 0 < self.n_batches < MIN_BATCHES

    def on_model(self, run: Run) -> None:
        run.measured(Operations).listeners.append(self)
        layers = (m for m in run.loop.model.modules() if isinstance(m, nn.RNNBase) and not m.bidirectional)
        self._recurrent = [Hook(m, self._take_recurrent, detach=False, gate=self._is_taken) for m in layers]

    def _is_taken(self) -> bool:
        return self.is_open and bool(self._embedded)

    def _take_recurrent(self, m: nn.Module, args: Any, output: Any) -> None:
        given, made = args[0], output[0]
        if isinstance(given, Tensor) and isinstance(made, Tensor) and made.grad_fn is not None:
            self._read.append((made.grad_fn, given.grad_fn))

    def on_batch(self, run: Run) -> None:
        self._embedded, self._views, self._places, self._read = [], [], [], []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    on_batch_end = on_batch

    def close(self, run: Run) -> None:
        self.on_batch(run)
        for hook in self._recurrent:
            hook.remove()

    def on_cancel(self, run: Run, level: str) -> None:
        if level == "batch":
            self.on_batch(run)

    def add_indices(self, layer: str, n_rows: int, indices: Tensor, padding: int) -> None:
        """Records a call of an embedding with so many rows."""
        self.has_embeddings = True
        if not self.is_open or not indices.ndim or not indices.numel():
            return
        if MIN_ROWS <= indices.shape[-1] <= n_rows:
            self._ends.setdefault(layer, []).append(torch.stack(indices.aminmax()))
        if indices.ndim == 2:
            self._embedded.append((layer, padding, indices.clone()))
            self._places.append(_place(indices))

    def add_attention(self, layer: str, weights: Tensor, places: Tensor) -> None:
        """Records which of these positions attend to later ones, by their weights `(…, len(places), T)`."""
        if self.is_open and self._embedded:
            length = weights.shape[-1]
            is_later = torch.arange(length, device=weights.device) > places[:, None]
            sees = ((weights > MIN_WEIGHT) & is_later).any(-1)
            self._views.append((layer, length, places, sees.flatten(0, -2)))

    def on_prediction(self, run: Run) -> None:
        """Has the targets compared with the tokens when the gradient of the model's scores is known."""
        outputs = (x for _, x in parts(run.loop.pred) if isinstance(x, Tensor) and x.is_floating_point())
        scores = next((x for x in outputs if x.grad_fn is not None and x.ndim in (2, 3)), None)
        if self._embedded and self._hook is None and scores is not None:
            node = scores.grad_fn
            self._hook = Hook(scores, lambda _, grad: self._take(grad, node), pre=True)

    def on_loss(self, run: Run) -> None:
        """Likewise for a model that returns its loss and no scores; the graph of the loss shows them."""
        if self._embedded and self._hook is None:
            main = main_term(read_terms(run.loop.loss_node))
            if main is not None and main.given is not None:
                node = main.given
                self._hook = node.register_prehook(lambda grads: self._take_first(grads, node))

    def _take_first(self, grads: tuple[Any, ...], node: Any) -> None:
        if isinstance(grads[0], Tensor):
            self._take(grads[0].detach(), node)

    def _take(self, grad: Tensor, node: Any) -> None:
        if self.failure is None:
            try:
                self._compare(grad, node)
            except Exception as error:  # the user's backward must go on, whatever it is
                self.failure = error

    def _compare(self, grad: Tensor, node: Any) -> None:
        # the gradient of a cross-entropy is negative for the target alone, and zero if that does not count
        embedded, self._embedded = self._embedded, []
        places, read = self._places, _read_places(node, self._read) if self._read else set()
        self._places, self._read = [], []
        self.n_batches += 1
        for i, (layer, padding, x) in enumerate(embedded):
            for dim in (1, 0):
                if (y := _targets_like(x, grad, dim)) is not None:
                    counts = self._count(layer, padding, x, y, dim)
                    lengths = {
                        at.shape[dim] for _, _, at in embedded if at.shape[1 - dim] == x.shape[1 - dim]
                    }
                    counts = counts._replace(has_others=len(lengths) > 1, is_read=places[i] in read)
                    self._counts.setdefault((i, dim), []).append(counts)
                    self.has_compared = True

    def _count(self, layer: str, padding: int, x: Tensor, y: Tensor, dim: int) -> Counts:
        is_target = y != UNKNOWN
        n, n_next = y.shape[dim], x.shape[dim] - 1
        own, has_next = x.narrow(dim, 0, n), is_target.narrow(dim, 0, n_next)
        kinds = [is_target, is_target & (y == padding) & (own == padding)]
        for ahead in AHEAD:
            k = min(n, x.shape[dim] - ahead)
            is_other = y.narrow(dim, 0, k) != x.narrow(dim, ahead, k)
            kinds.append(is_target.narrow(dim, 0, k) & is_other)
        numbers = torch.stack([kind.sum() for kind in kinds])
        seeing: dict[str, Tensor] = {}
        for name, length, places, sees in self._views:
            if length == x.shape[dim] and len(sees) % x.shape[1 - dim] == 0:
                share = _share_seeing(places, sees, has_next.movedim(dim, 1))
                seeing[name] = torch.minimum(seeing.get(name, share), share)
        return Counts(layer, padding, numbers, seeing)

    def tell(self, run: Run) -> None:
        self.relations = [
            found._replace(call=call)
            for (call, _), counts in self._counts.items()
            if (found := _relation(counts))
        ]
        ends = {layer: torch.stack(x) for layer, x in self._ends.items() if len(x) >= MIN_BATCHES}
        self.indices = {layer: (len(x), int(x[:, 0].min()), int(x[:, 1].max())) for layer, x in ends.items()}
        operations = run.measured(Operations)
        if operations.has_looked and operations.failure is None and not self.has_embeddings:
            run.lack(Absent("the model has no embedding"), "embeddings", "tokens")
        elif not self.is_open and not self.relations:
            run.lack(Absent("the targets of the loss are not the tokens that the model embeds"), "tokens")
        elif not self.is_open:
            unknown = "the embedding of the tokens has no padding_idx, so it is not known what is padding"
            run.lack(Skipped(unknown), "padding of the tokens")

    def freeze(self) -> None:
        self._counts, self._ends, self._recurrent = {}, {}, []


def _relation(counts: list[Counts]) -> Relation | None:
    n, n_padding, *n_others = torch.stack([x.numbers for x in counts]).sum(0).tolist()
    ahead = next((k for k in (1, 0, 2) if not n_others[k]), None)
    if len(counts) < MIN_BATCHES or n < MIN_TARGETS or ahead is None:
        return None
    first, *others = counts
    layers = [name for name in first.seeing if all(name in x.seeing for x in others)]
    seeing = {name: min(float(x.seeing[name]) for x in counts) for name in layers}
    has_others = any(x.has_others for x in counts)
    is_read = all(x.is_read for x in counts)
    return Relation(ahead, first.layer, first.padding, n, n_padding, seeing, has_others, is_read=is_read)


def _place(indices: Tensor) -> Place:
    return indices.data_ptr(), tuple(indices.shape), indices.stride()


def _read_places(node: Any, recurrent: list[tuple[Any, Any]]) -> set[Place]:
    """Indices whose embedding a recurrent layer reads, from which scores are computed position by position.

    Args:
        node: of the scores.
        recurrent: nodes of the outputs of recurrent layers, and of their inputs.
    """
    found, seen, waiting = set[Place](), set[Any](), [(node, False)]
    while waiting and len(seen) < graph.MAX_NODES:
        at, is_behind = waiting.pop()
        if at is None or (at, is_behind) in seen:
            continue
        seen.add((at, is_behind))
        kind = graph.name(at)
        inner = [given for made, given in recurrent if made is at]
        if inner:
            waiting += [(given, True) for given in inner]
        elif kind == "Embedding":
            indices = graph.read_saved(at, "indices")
            if is_behind and isinstance(indices, Tensor):
                found.add(_place(indices))
        elif kind in BY_POSITION or _keeps_positions(at, kind):
            waiting += [(x, is_behind) for x in graph.inputs(at)]
    return found


def _keeps_positions(node: Any, kind: str) -> bool:
    """Whether it joins features, or exchanges samples and positions, of tensors with three dimensions."""
    if kind == "Cat":
        return graph.read_saved(node, "dim") in (2, -1, 2**64 - 1)
    dims = {graph.read_saved(node, "dim0"), graph.read_saved(node, "dim1")} if kind == "Transpose" else set()
    return dims == {0, 1}


def _targets_like(x: Tensor, grad: Tensor, dim: int) -> Tensor | None:
    """Targets in the shape of `x`, which may be one longer along `dim`; None if they do not fit.

    `x` has shape `(N, T)` or `(T, N)`, and `grad` `(N, T, C)`, `(T, N, C)`, `(N · T, C)` or `(N, C, T)`.
    """
    shapes = [tuple(x.shape), (*x.shape[:dim], x.shape[dim] - 1, *x.shape[dim + 1 :])]
    for classes in range(grad.ndim - 1, 0, -1):
        rest = grad.shape[:classes] + grad.shape[classes + 1 :]
        for shape in shapes if x.shape[dim] >= MIN_LENGTH else ():
            is_swapped = rest == shape[::-1] and rest != shape
            if rest == shape or is_swapped or rest == (math.prod(shape),):
                low, index = grad.min(classes)
                y = index.masked_fill(low >= 0, UNKNOWN)
                return y.T if is_swapped else y.reshape(shape)
    return None


def _share_seeing(places: Tensor, sees: Tensor, has_next: Tensor) -> Tensor:
    """Share of the positions with a target, `(N, T - 1)` without the last ones, that attend to later ones."""
    sees = sees.reshape(len(has_next), -1, len(places)).any(1)
    counted = has_next[:, places.clamp(max=has_next.shape[1] - 1)] & (places < has_next.shape[1])
    return (sees & counted).sum() / counted.sum().clamp(min=1)
