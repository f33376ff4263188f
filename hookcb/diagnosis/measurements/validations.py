"""Validations: the loss of each validation, beside the training loss of the batches before it."""

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookcb.core.batch import batch_size
from hookcb.core.call_hook import CallHook
from hookcb.core.optim import detached_scalar
from hookcb.core.whose import frames_of, is_of_program
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.heard import Ear, heard
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.tally import Tally
from hookcb.diagnosis.run import Run, Series
from hookcb.training.early_stopping import EarlyStopping
from hookcb.training.ema import EMA

# losses of torch.nn.functional that are heard in a validation, and their kinds in the graph of the training's
FUNCTIONS = {
    "cross_entropy": "cross-entropy",
    "nll_loss": "cross-entropy",
    "binary_cross_entropy": "binary cross-entropy",
    "binary_cross_entropy_with_logits": "binary cross-entropy",
    "mse_loss": "mse",
    "l1_loss": "mae",
    "smooth_l1_loss": "smooth l1",
    "huber_loss": "huber",
    "kl_div": "kl",
}
ALIKE = {"nll": "cross-entropy"}  # it may get log-probabilities that are not made by log_softmax
MIN_BETWEEN = 4  # training batches between two validations; fewer are a metric of each step
MAX_QUICK, MAX_VALIDATIONS = 16, 1_000
MAX_DEPTH = 8  # lines of a site
OF_TRAINING = 1.2  # times the training loss; of several data sets, those below are taken for the training's
Site = tuple[tuple[str, int], ...]  # lines of the program that were being run


class WeightReads(Ear):
    """How often the weights of a model were read as a whole, as to keep the best ones."""

    calls = ((nn.Module, "state_dict", "observe"), (torch, "save", "observe"))
    options = {"nested": False}  # noqa: RUF012  # as in its base

    def __init__(self) -> None:
        self.n = 0

    def observe(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        self.n += 1
        yield


class Validation(NamedTuple):
    """One validation.

    Attributes:
        step: number of training batches before it.
        loss: mean over its samples.
        train: mean loss of the training batches since the one before.
        accuracy: share of correct classes, NaN if unknown.
        is_kept: whether the weights were read as a whole between it and the next training batch.
    """

    step: int
    loss: float
    train: float = math.nan
    accuracy: float = math.nan
    is_kept: bool = False


class _Sums:
    """Sums over one validation of one data set; they stay on the device."""

    def __init__(self) -> None:
        self.loss: float | Tensor = 0.0
        self.correct: int | Tensor = 0
        self.n = self.n_labels = 0  # samples, and those of which it is known whether they are correct

    def add(self, loss: float | Tensor, n: int, correct: tuple[Tensor, int] | None = None) -> None:
        self.loss, self.n = self.loss + loss * n, self.n + n
        if correct is not None:
            self.correct, self.n_labels = self.correct + correct[0], self.n_labels + correct[1]


class Validations(Measurement):
    """The losses of validations: those that the loop reports, else those of torch.nn.functional.

    A validation is what comes between two training batches; its loss is the mean over its samples. While one
    is under way, the losses of torch.nn.functional are heard; a training batch pays for a closed gate. If
    several data sets are evaluated, by different lines of the program, the one with the smallest loss counts,
    but none whose loss is that of the training.
    """

    cadence = EVERY
    uses = (Curves, Loss)
    hears = (WeightReads,)

    def __init__(self) -> None:
        self.found: list[Validation] = []
        self._is_open = False  # whether a validation is under way
        self._is_own = False  # whether the loop is a Learner's, which has one loss function
        self.is_seen = False  # whether there was a validation, with or without a loss
        self.is_one_scale = False  # whether its loss can be compared with that of the training
        self.keeps_best = False  # whether a callback keeps the best weights, or ends the training
        self._ended: list[tuple[int, dict[Site, _Sums], bool]] = []  # with the step, and whether it is kept
        self._sums: dict[Site, _Sums] = {}
        self._labels: dict[bool, Tally] = {}  # those of a Learner, or else those that are heard
        self.labels: list[int] = []  # by class, of all validations
        self._kinds = set[str]()
        self._hooks: list[CallHook] = []
        self._step = self._n_reads = self._n_quick = 0

    def on_model(self, run: Run) -> None:
        self._is_own = not run.loop.is_external
        self.keeps_best = any(isinstance(cb, EarlyStopping | EMA) for cb in run.loop.cbs)
        self._hooks = [
            CallHook(F, name, self._hear(kind), self.failed, gate=self._hears)
            for name, kind in FUNCTIONS.items()
        ]

    def _hears(self) -> bool:
        return self._is_open

    def on_validation(self, run: Run) -> None:
        if self.done:
            return
        self.is_seen, self._step = True, run.step
        self._is_open = True

    def on_eval_loss(self, run: Run) -> None:
        """Takes the loss that the loop has reported, instead of those that are heard."""
        loop = run.loop
        if isinstance(loop.loss, Tensor) and loop.loss.numel() == 1:
            self._n_reads = heard(WeightReads).n
            yb: tuple[Any, ...] = getattr(loop, "yb", ())
            n_correct = _n_correct(loop.pred, yb[0]) if len(yb) == 1 and self._is_own else None
            sums = self._sums.setdefault((), _Sums())
            sums.add(detached_scalar(loop.loss), batch_size((*yb, loop.xb)), n_correct)
            if n_correct is not None:
                self._count(True, loop.pred, yb[0])

    def on_batch(self, run: Run) -> None:
        if self._is_open:
            self._end(run)

    def _end(self, run: Run) -> None:
        """Ends a validation, as a training batch begins."""
        self._is_open = False
        sums, self._sums = self._sums, {}
        is_quick = self._ended and self._step - self._ended[-1][0] < MIN_BETWEEN
        self._n_quick += bool(is_quick)
        if sums:
            self._ended.append((self._step, sums, heard(WeightReads).n > self._n_reads))
        # metrics of each step are no validations
        self.done = self._n_quick >= MAX_QUICK or len(self._ended) >= MAX_VALIDATIONS
        if self.done:
            self.close(run)

    def _hear(self, kind: str) -> Any:
        def observe(pred: Any = None, target: Any = None, *args: Any, **given: Any) -> Iterator[None]:
            loss = yield
            self._take(kind, given.get("input", pred), target, loss, given)

        return observe

    def _take(self, kind: str, pred: Any, y: Any, loss: Any, given: dict[str, Any]) -> None:
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and isinstance(y, Tensor) and y.numel()):
            return
        n_correct = _n_correct(pred, y) if kind == "cross-entropy" else None
        if n_correct is not None:
            self._count(False, pred, y)
        has_one_each = kind == "cross-entropy" and y.is_floating_point()  # a target for each class
        n = len(y) if has_one_each else y.numel()
        is_sum, weight = given.get("reduction") == "sum", given.get("weight")
        if given.get("reduction") == "batchmean" or given.get("label_smoothing") or weight is not None:
            kind = ""  # on a scale of its own
        self._kinds.add(kind)
        self._n_reads = heard(WeightReads).n
        value = detached_scalar(loss)
        self._sums.setdefault(_site(), _Sums()).add(value / n if is_sum else value, n, n_correct)

    def _count(self, is_given: bool, pred: Tensor, y: Tensor) -> None:
        """Counts the labels of a batch, if there is one for each sample."""
        tally = self._labels.setdefault(is_given, Tally(pred.shape[1]))
        if pred.ndim == 2 and pred.shape[1] == tally.n_classes and y.numel():
            tally.add(y)

    # ---- for the verdict

    def tell(self, run: Run) -> None:
        ended = list(self._ended)
        if self._sums:
            ended.append((self._step, self._sums, False))
        if not ended:
            return
        tally = self._labels.get(True, self._labels.get(False))
        self.labels = [] if tally is None else tally.read()
        site = self._site_to_judge([sums for _, sums, _ in ended], run)
        self.found = []
        for step, sums, is_kept in ended:
            if site in sums and not (self.found and step - self.found[-1].step < MIN_BETWEEN):
                before = self.found[-1].step if self.found else 0
                loss, accuracy = _means(sums[site], sums)
                self.found.append(Validation(step, loss, _mean(run.loss, before, step), accuracy, is_kept))
        known = run.measured(Loss)
        kinds = {ALIKE.get(kind, kind) for kind in (known.kinds or (known.kind,)) if kind}
        graph = known.graph
        is_plain = graph is None or not (graph.smoothing or graph.has_weights)
        self.is_one_scale = self._is_own or (is_plain and bool(self._kinds) and self._kinds == kinds)

    def _site_to_judge(self, ended: Sequence[dict[Site, _Sums]], run: Run) -> Site:
        sites = list(dict.fromkeys(site for sums in ended for site in sums))
        if () in sites or len(sites) == 1:
            return () if () in sites else sites[0]
        latest = {site: next(sums[site] for sums in reversed(ended) if site in sums) for site in sites}
        losses = {site: _means(sums, {})[0] for site, sums in latest.items()}
        train = run.loss.values[-20:]
        limit = OF_TRAINING * sum(train) / max(1, len(train))
        others = {site: loss for site, loss in losses.items() if not loss <= limit} or losses
        return min(others, key=lambda site: others[site])

    def close(self, run: Run) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def freeze(self) -> None:
        self._ended, self._sums, self._labels = [], {}, {}


def _n_correct(pred: Any, y: Any) -> tuple[Tensor, int] | None:
    """Number of labels with the highest score, and number of all; None if they are no scores of classes."""
    if not (isinstance(pred, Tensor) and isinstance(y, Tensor)) or y.is_floating_point() or pred.ndim < 2:
        return None
    if pred.shape[:1] + pred.shape[2:] != y.shape or not pred.is_floating_point():
        return None
    return (pred.detach().argmax(1) == y).sum(), y.numel()


def _site() -> Site:
    """Lines of the program that lead to the current call."""
    found = frames_of(sys._getframe(2), is_of_program)
    return tuple((frame.f_code.co_filename, frame.f_lineno) for frame in islice(found, MAX_DEPTH))


def _means(sums: _Sums, every: dict[Site, _Sums]) -> tuple[float, float]:
    counted = next((x for x in (sums, *every.values()) if x.n_labels), None)
    accuracy = math.nan if counted is None else float(counted.correct) / counted.n_labels
    return float(sums.loss) / max(1, sums.n), accuracy


def _mean(loss: Series, first: int, last: int) -> float:
    values = [x for step, x in loss if first <= step < last]
    return sum(values) / len(values) if values else math.nan
