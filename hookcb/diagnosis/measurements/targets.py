"""Targets of batches: the loss of the best constant prediction, and whether they are one class."""

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from hookcb.core import graph
from hookcb.core.batch import batch_size, parts
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.loss_graph import LossGraph
from hookcb.diagnosis.measurements.loss_terms import Term, main_term, read_terms
from hookcb.diagnosis.measurements.tally import Tally, at_path, path_to, saved_labels
from hookcb.diagnosis.run import Run

MAX_ELEMENTS = 16_384  # of a batch that are kept, spread over it
MAX_BATCHES = 64
MAX_CLASSES = 1 << 17  # whose labels are counted
INDICES = {torch.int64, torch.int32, torch.uint8}  # dtypes of these
MAX_ERROR = 1e-3  # of the loss that the recovered targets give; rounding to float32 stays below 1e-4
MAX_DRIFT = 0.1  # of the variance; two halves of 160 shuffled values each differ by 0.0125
# labels that tell of a single class; of a data set with 1 % of ones, 6 in 1,000 such samples have none
MIN_SAMPLES, MIN_BATCHES = 512, 8


class Losses(NamedTuple):
    """Losses of predictions that do not come from a model."""

    constant: float = math.nan  # of the best prediction that is the same for all samples
    perfect: float = 0.0  # of the targets themselves as the prediction, above 0 if they are soft or smoothed
    noise: float = 0.0  # standard deviation of `constant` from batch to batch


class Ignored(NamedTuple):
    """Labels that a loss of torch compares with, and the one that it ignores."""

    are_all: Tensor  # whether each is that one, on their device
    label: int
    n: int  # of all, 0 if unknown


def ignored_targets(node: Any, loss: Any, pred: Any) -> Ignored | None:
    """Whether the loss with this node ignores all of its class indices; None if that is unknown.

    Once the backward has freed them, it is known of a mean over those of the model's output: of a finite
    output that is NaN only if none counts.
    """
    main = main_term(read_terms(node))
    if main is None or main.kind not in ("cross-entropy", "nll") or main.node is None:
        return None
    if _are_labels(y := main.target):
        return Ignored((y == main.ignored).all(), main.ignored, y.numel())
    is_mean = main.node is node and main.scale == 1 and not main.has_weights and _is_of_output(main, pred)
    if not (is_mean and isinstance(loss, Tensor)):
        return None
    are_finite = [x.detach().isfinite().all() for _, x in parts(pred) if isinstance(x, Tensor)]
    n = math.prod(main.given_shape) // main.given_shape[1] if len(main.given_shape) > 1 else 0
    return Ignored(torch.stack([loss.detach().isnan(), *are_finite]).all(), main.ignored, n)


class Targets(Measurement):
    """Copies of targets of batches, on their device until they are read.

    All of the first 64 batches, later a random choice of 64 from all batches, so that data in any order is
    seen with the shares that it has. Class indices of a cross-entropy of torch are counted in all batches, or
    once they look as drawn at random, on a CPU, in one of each 8; if neither the loop nor a loss of torch
    tells them, in the first 64, those of that choice, and inspected ones.

    Attributes:
        counts: number of labels of each class, [] if none were counted.
        n_counted: number of batches whose labels were counted.
        are_fair: whether these are all batches, or drawn from all of them.
        are_of_samples: whether each sample has one label.
    """

    cadence = EVERY

    def __init__(self) -> None:
        self._batches: list[Tensor] = []  # in the order of the training
        self._n_losses, self._choice = 0, random.Random(0)  # not the generator of the user's program
        self._next = self._place = 0  # number of the batch that is kept next, place of the one that goes
        self.n_batches, self.is_known = 0, False
        self._is_only = True  # whether no batch had a second tensor among its targets
        self.is_of_output = False  # whether the loss compares the model's output itself with them
        self.are_given = False  # whether a loop tells them
        # whether those of a loss with an unknown factor, as `loss / n`, were recovered with a factor of 1
        self.has_shown_scale = False
        self._of_step = -1
        self._yb: tuple[Any, ...] = ()
        self._tally: Tally | None = None
        self._path: tuple[int, ...] | None = None  # from the loss to the node that has saved the labels
        self.counts: list[int] = []
        self.n_counted, self.are_fair, self.are_of_samples = 0, False, False

    def of_batch(self, run: Run) -> Any:
        """Targets of the batch: those of the loop, those that the loss has saved, or else () if unknown."""
        if self._of_step != run.step:
            self._of_step, loop = run.step, run.loop
            self._yb = loop.yb
            if not len(loop.yb):
                main = main_term(read_terms(loop.loss_node))
                y = None if main is None else main.target  # saved by a loss of torch for its backward
                if y is None:
                    y = recovered_target(main, loop.pred, loop.pred_grad, loop.loss)
                    self.has_shown_scale |= not (y is None or main is None or math.isfinite(main.scale))
                self._yb = () if y is None else (y,)
        return self._yb

    def on_first_graph(self, run: Run) -> None:
        self.are_given |= bool(len(run.loop.yb))
        self.is_of_output = compares_output(run.loop.loss_node, run.loop.pred)
        self._begin_tally(run)

    def _begin_tally(self, run: Run) -> None:
        main = main_term(read_terms(run.loop.loss_node))
        tensors = [y for _, y in parts(self.of_batch(run)) if isinstance(y, Tensor)]
        y = tensors[0] if len(tensors) == 1 else None  # else the loss may compare either
        if main is None or main.kind not in ("cross-entropy", "nll") or not _are_labels(y):
            return
        n_classes = main.given_shape[1] if len(main.given_shape) > 1 else 0
        if 0 < n_classes <= MAX_CLASSES and y.numel() * n_classes == math.prod(main.given_shape):
            self._tally = Tally(n_classes, main.ignored)
            self._path = None if main.target is None else path_to(run.loop.loss_node, main.node)
            self.are_of_samples = y.ndim == 1 and y.numel() == batch_size(run.loop.xb)

    def _count(self, run: Run, tally: Tally, is_read: bool) -> None:
        """Counts the labels of a batch, if they are known or `is_read`, as recovering them takes long."""
        loop = run.loop
        y: Tensor | None = None
        if len(loop.yb) and isinstance(loop.yb[0], Tensor):
            y = loop.yb[0]
        elif self._path is not None:
            y = saved_labels(at_path(loop.loss_node, self._path))
        elif is_read:
            y = next((y for _, y in parts(self.of_batch(run)) if isinstance(y, Tensor)), None)
        if _are_labels(y):
            tally.add(y)

    def on_loss(self, run: Run) -> None:
        self.are_given |= bool(len(run.loop.yb))
        self._n_losses += 1
        if self._n_losses == self._next and len(self._batches) == MAX_BATCHES:
            del self._batches[self._place]
        is_chosen = len(self._batches) < MAX_BATCHES
        if is_chosen:
            self.add_batch(self.of_batch(run))
            if len(self._batches) == MAX_BATCHES:
                self._choose()
        if self._tally is not None and (is_chosen or run.noting or not self._tally.is_mixed):
            self._count(run, self._tally, is_chosen or run.looking)

    def _choose(self) -> None:
        """Draws which batch is kept next: each with a chance of MAX_BATCHES / n, its number (Algorithm R)."""
        self._next, self._place = self._n_losses, MAX_BATCHES
        while self._place >= MAX_BATCHES:
            self._next += 1
            self._place = self._choice.randrange(self._next)

    def on_batch_end(self, run: Run) -> None:
        self._of_step, self._yb = -1, ()

    on_end = on_batch_end

    def add_batch(self, yb: Any) -> None:
        """Copies the first tensor of a batch's targets; every n-th sample of a large one."""
        tensors = [y for _, y in parts(yb) if isinstance(y, Tensor) and y.ndim and y.numel()]
        self._is_only &= len(tensors) < 2
        if not tensors or (y := tensors[0]).is_complex() or len(self._batches) == MAX_BATCHES:
            return
        kept = y.detach()[:: math.ceil(y.numel() / MAX_ELEMENTS)]
        first = self._batches[0] if self._batches else kept
        if (kept.shape[1:], kept.dtype, kept.device) == (first.shape[1:], first.dtype, first.device):
            self._batches.append(kept.clone())
            self.n_batches, self.is_known = len(self._batches), True

    def tell(self, run: Run) -> None:
        tally = self._tally
        self.counts = [] if tally is None else tally.read()
        self.n_counted = 0 if tally is None else tally.n_batches
        self.are_fair = self.n_counted == self._n_losses or (tally is not None and tally.is_mixed)

    def freeze(self) -> None:
        self._batches, self._tally = [], None

    def classes(self, graph: LossGraph) -> Tensor | None:
        """Class indices or bits that a classifier is trained with; None if too few, or not known to be that.

        The loss must compare the raw scores, or their sigmoid or softmax, with them. In a contrastive loss,
        whose scores are similarities, the label may be 0 on purpose; so it may be in a game, where the scores
        are those of another model.
        """
        is_enough = len(self._batches) >= MIN_BATCHES and sum(map(len, self._batches)) >= MIN_SAMPLES
        labels = self.labels(graph) if is_enough else None
        return torch.cat(labels) if labels else None

    def labels(self, graph: LossGraph) -> list[Tensor] | None:
        """Likewise, batch by batch, however few; labels that the loss ignores are left out."""
        is_of_scores = self.is_of_output and (graph.is_raw or graph.head in ("Softmax", "Sigmoid"))
        if not (self._batches and self._is_only and is_of_scores and graph.is_pure):
            return None
        y = torch.cat(self._batches)
        if graph.kind == "binary cross-entropy":
            return self._batches if bool(((y == 0) | (y == 1)).all()) else None
        if graph.kind not in ("cross-entropy", "nll") or y.is_floating_point():
            return None
        labels = [y[(y >= 0) & (y != graph.ignored)] for y in self._batches]
        return labels if any(map(Tensor.numel, labels)) else None

    def losses(self, graph: LossGraph) -> Losses:
        """Losses of the best constant, and of a perfect prediction; NaN if unknown.

        The constant is the mean of each column for squares, its median for absolute values and Huber losses,
        and the class shares for cross-entropy. It is unknown for values that drift, such as those that a
        model makes itself in reinforcement learning.
        """
        is_weighted = graph.has_weights and graph.class_weights is None
        if not self._batches or not graph.sure_kind or is_weighted or math.isnan(graph.scale):
            return Losses()
        if graph.kind == "cross-entropy":
            found = losses_of_classes(self._batches, graph)
            if sum(self.counts) and self.are_fair and not graph.has_weights:
                found = found._replace(constant=entropy_of(self.counts, graph.smoothing))
        elif graph.kind == "binary cross-entropy":
            found = losses_of_bits(self._batches, graph)
        else:
            found = self._losses_of_values(graph.kind)
        return Losses(*(graph.scale * x for x in found))

    def _losses_of_values(self, kind: str) -> Losses:
        y, half = torch.cat(self._batches).float(), len(self._batches) // 2
        halves = self._batches[: half or 1], self._batches[half:]
        first, second = (torch.cat(x).float().mean(0) for x in halves)
        drift = (first - second).square().mean()
        is_drifting = float(drift) > MAX_DRIFT * float(y.var(0, correction=0).mean())
        if kind not in ("mse", "mae", "huber") or is_drifting:
            return Losses()
        errors = y - (y.mean(0) if kind == "mse" else y.median(0).values)
        if kind == "huber":
            errors = F.smooth_l1_loss(errors, torch.zeros_like(errors), reduction="none")
        else:
            errors = errors.square() if kind == "mse" else errors.abs()
        return Losses(float(errors.mean()), noise=noise_of(errors, self._batches))


def entropy_of(counts: Sequence[int], smoothing: float = 0.0) -> float:
    """Cross-entropy of always predicting the shares of the classes, which are smoothed as the labels are."""
    n, total = len(counts), sum(counts)
    shares = [(1 - smoothing) * k / total + smoothing / n for k in counts]
    return -sum(p * math.log(p) for p in shares if p)


def _are_labels(y: Any) -> TypeGuard[Tensor]:
    """Whether these may be class indices."""
    return isinstance(y, Tensor) and y.dtype in INDICES and y.numel() > 0


def compares_output(node: Any, pred: Any) -> bool:
    """Whether the loss with this node compares an output of the model, or the scores of its log-softmax."""
    main = main_term(read_terms(node))
    return main is not None and _is_of_output(main, pred)


def _is_of_output(main: Term, pred: Any) -> bool:
    nodes = [graph.peel(at) for at in graph.roots(pred)]
    return any(main.given in (at, graph.behind(at)) for at in nodes)


def recovered_target(main: Term | None, pred: Any, grad: Tensor | None, loss: Any) -> Tensor | None:
    """Targets of the batch whose backward has begun, None if they cannot be told for certain.

    The gradient of a mean loss shows them: 2 (x - y) / n of squares, (p - y) / n of a cross-entropy, p the
    softmax or sigmoid of the scores x. They count only if the loss that they give is that of the training.
    On a GPU nothing is recovered, as comparing the two would wait for it. `grad` is the gradient with respect
    to `pred`; the graph of the loss, of which `main` is the main term, has freed its saved tensors.
    """
    outputs = [x for _, x in parts(pred) if isinstance(x, Tensor) and x.grad_fn is not None]
    if main is None or grad is None or not isinstance(loss, Tensor) or not grad.is_cpu:
        return None
    end = graph.peel(outputs[0].grad_fn) if len(outputs) == 1 else None
    is_log = main.kind == "cross-entropy" and graph.name(end) == "LogSoftmax"
    if end is None or (graph.behind(end) if is_log else end) is not main.given:
        return None
    x, g = outputs[0].detach().float(), grad.float()
    if x.shape != g.shape or not x.numel():
        return None
    scale = main.scale if math.isfinite(main.scale) and main.scale else 1.0
    value = float(loss) / scale
    for y, own in _candidates(main.kind, "log-probabilities" if is_log else main.takes, x, g / scale):
        if abs(float(own) - value) <= MAX_ERROR * abs(value):
            return y
    return None


def _candidates(kind: str, takes: str, x: Tensor, g: Tensor) -> list[tuple[Tensor, Tensor]]:
    n = x.numel()
    if kind == "mse":
        y = x - g * n / 2
        return [(y, F.mse_loss(x, y))]
    if kind == "binary cross-entropy" and takes == "scores":
        y = _bits(x.sigmoid() - g * n)
        return [(y, F.binary_cross_entropy_with_logits(x, y))]
    if kind == "binary cross-entropy" and takes == "probabilities" and bool(((x >= 0) & (x <= 1)).all()):
        y = _bits(x - g * n * x * (1 - x))
        return [(y, F.binary_cross_entropy(x, y.clamp(0, 1)))] if bool(((y >= 0) & (y <= 1)).all()) else []
    if kind in ("cross-entropy", "nll") and x.ndim > 1:
        dims = (x.ndim - 1, 1) if x.ndim > 2 else (1,)
        return [_classes(x, g, dim, is_log=takes == "log-probabilities") for dim in dims]
    return []


def _bits(y: Tensor) -> Tensor:
    """Targets without the rounding of those that are 0 or 1."""
    whole = y.round()
    return torch.where((y - whole).abs() < MAX_ERROR, whole, y)


def _classes(x: Tensor, g: Tensor, dim: int, is_log: bool) -> tuple[Tensor, Tensor]:
    """Class indices, and the loss that they give; of the gradients in a row only the target's is negative."""
    x, g = x.movedim(dim, -1), g.movedim(dim, -1)
    y = g.argmin(-1)
    logs = x if is_log else x.log_softmax(-1)
    counts = (g != 0).any(-1)
    own = -logs.gather(-1, y[..., None])[..., 0]
    return y.where(counts, -100), own[counts].mean()


def losses_of_bits(batches: Sequence[Tensor], graph: LossGraph) -> Losses:
    """Losses for targets between 0 and 1, of which ones may have weights; each column has its constant."""
    y = torch.cat(list(batches)).float()
    weight = y.new_ones(()) if graph.class_weights is None else graph.class_weights.float()
    if weight.ndim >= y.ndim:  # a weight for each sample
        return Losses()
    weight = weight.to(y.device)

    def best(p: Tensor) -> Tensor:
        ones, zeros = weight * p, 1 - p
        return _x_log_x(ones + zeros) - _x_log_x(ones) - _x_log_x(zeros)

    p = weight * y.mean(0) / (weight * y.mean(0) + 1 - y.mean(0))
    errors = -torch.xlogy(weight * y, p) - torch.xlogy(1 - y, 1 - p)
    return Losses(float(best(y.mean(0)).mean()), float(best(y).mean()), noise_of(errors, batches))


def noise_of(errors: Tensor, batches: Sequence[Tensor]) -> float:
    """Standard deviation of the mean error from batch to batch."""
    means = torch.stack([x.mean() for x in torch.split(errors, [len(y) for y in batches])])
    return float(means.std(correction=0))


def losses_of_classes(batches: Sequence[Tensor], graph: LossGraph) -> Losses:
    """Losses for class indices, or soft targets `(N, C, …)`; NaN for soft targets with weights of classes."""
    if not batches[0].is_floating_point():
        return _losses_of_indices(batches, graph)
    if graph.has_weights or graph.smoothing:
        return Losses()
    rows = [y.float().transpose(0, 1).flatten(1).T if y.ndim > 1 else y[None].float() for y in batches]
    perfect = -_x_log_x(torch.cat(rows)).sum(1).mean()
    return _losses(torch.stack([x.mean(0) for x in rows]), float(perfect))


def _losses_of_indices(batches: Sequence[Tensor], graph: LossGraph) -> Losses:
    """Means over batches, because each divides by the weights of its own samples."""
    indices = [y[(y >= 0) & (y != graph.ignored)].long().flatten() for y in batches]
    indices = [y for y in indices if y.numel()]
    n = max([graph.n_classes, *(int(y.max()) + 1 for y in indices)])
    given = graph.class_weights
    weights = batches[0].new_ones(n, dtype=torch.float32) if given is None else given.float()
    if not indices or len(weights) != n:
        return Losses()
    counts = torch.stack([torch.bincount(y, minlength=n) for y in indices])  # by batch and class
    weights = weights.to(counts.device)
    # the loss of a sample of class c is -(own of c) log p of c - sum of rest * log p
    own, rest = (1 - graph.smoothing) * weights, graph.smoothing / n * weights
    divisors = (counts * weights).sum(1)
    shares = (counts * own + counts.sum(1, keepdim=True) * rest) / divisors[:, None]
    both = own + rest
    perfect = _x_log_x(own + rest.sum()) - (_x_log_x(rest).sum() - _x_log_x(rest) + _x_log_x(both))
    return _losses(shares, float(((counts * perfect).sum(1) / divisors).mean()))


def _losses(shares: Tensor, perfect: float) -> Losses:
    mean = shares.mean(0)
    errors = -torch.xlogy(shares, mean / mean.sum()).sum(1)
    return Losses(float(errors.mean()), perfect, float(errors.std(correction=0)))


def _x_log_x(x: Tensor) -> Tensor:
    return torch.xlogy(x, x)
