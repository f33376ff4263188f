"""Validations: loss and accuracy of each validation, beside the training loss of the batches before it."""

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
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
MAX_PERCENT = 100.0
# names of what a loop reports of a validation
OF_VALIDATION = r"(avg_|mean_)?((val|valid|validation|eval|test|dev)[_/ -])?"
LOSS_NAME = re.compile(OF_VALIDATION + r"loss", re.IGNORECASE)
ACCURACY_NAME = re.compile(OF_VALIDATION + r"acc(uracy)?", re.IGNORECASE)
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
        epoch: number of epochs that had ended before it.
    """

    step: int
    loss: float
    train: float = math.nan
    accuracy: float = math.nan
    is_kept: bool = False
    epoch: int = 0


class _Ended(NamedTuple):
    """Numbers of a validation; tensors stay on their device."""

    step: int
    epoch: int
    sums: dict[Site, "_Sums"]
    metrics: dict[str, float | Tensor]  # that the loop has reported
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
    but none whose loss is that of the training. What a loop or a trainer reports by name, such as `val_loss`
    and `val_acc`, counts where neither is known otherwise.

    Attributes:
        found: the validations whose loss or accuracy is known.
        is_seen: whether there was a validation, with or without a loss.
        is_one_scale: whether its loss can be compared with that of the training.
        scale: factor of the training's loss on that scale, as of a loss that is divided to accumulate.
        why_kept: who keeps the best weights, "" if that is not known.
    """

    cadence = EVERY
    uses = (Curves, Loss)
    hears = (WeightReads,)

    def __init__(self) -> None:
        self.found: list[Validation] = []
        self._is_open = False  # whether a validation is under way
        self._reads_keep = True  # whether whoever reads the weights may keep them for good
        self._is_own = False  # whether the loop is a Learner's, which has one loss function
        self.is_seen = self.is_one_scale = False
        self.scale, self.why_kept = 1.0, ""
        self._ended: list[_Ended] = []
        self._sums: dict[Site, _Sums] = {}
        self._labels: dict[bool, Tally] = {}  # those of a Learner, or else those that are heard
        self.labels: list[int] = []  # by class, of all validations
        self._metrics: dict[str, float | Tensor] = {}
        self._kinds = set[str]()
        self._hooks: list[CallHook] = []
        self._step = self._epoch = self._n_reads = self._n_quick = 0

    def on_model(self, run: Run) -> None:
        self._is_own = not run.loop.is_external
        stops = any(isinstance(cb, EarlyStopping | EMA) for cb in run.loop.cbs)
        self._reads_keep = run.loop.keeps_best is None
        self.why_kept = run.loop.keeps_best or ("EarlyStopping or EMA is attached" if stops else "")
        self._hooks = [
            CallHook(F, name, self._hear(kind), self.failed, gate=self._hears)
            for name, kind in FUNCTIONS.items()
        ]

    def _hears(self) -> bool:
        return self._is_open

    def on_validation(self, run: Run) -> None:
        if self.done:
            return
        self.is_seen, self._step, self._epoch = True, run.step, run.loop.epoch
        self._is_open, self._n_reads = True, heard(WeightReads).n

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

    def on_validated(self, run: Run) -> None:
        """Takes what the loop has reported by name."""
        self._metrics = {
            name: x
            for name, x in run.loop.reported_metrics.items()
            if self._is_open and (LOSS_NAME.fullmatch(name) or ACCURACY_NAME.fullmatch(name))
        }

    def on_batch(self, run: Run) -> None:
        if self._is_open:
            self._end(run)

    def _end(self, run: Run) -> None:
        """Ends a validation, as a training batch begins."""
        self._is_open = False
        is_quick = self._ended and self._step - self._ended[-1].step < MIN_BETWEEN
        self._n_quick += bool(is_quick)
        self._ended += self._open(self._reads_keep and heard(WeightReads).n > self._n_reads)
        self._sums, self._metrics = {}, {}
        # metrics of each step are no validations
        self.done = self._n_quick >= MAX_QUICK or len(self._ended) >= MAX_VALIDATIONS
        if self.done:
            self.close(run)

    def _open(self, is_kept: bool) -> list[_Ended]:
        """The validation that is under way, if anything is known of it."""
        is_known = self._sums or self._metrics
        open_now = _Ended(self._step, self._epoch, self._sums, self._metrics, is_kept)
        return [open_now] if is_known else []

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
        ended = [*self._ended, *self._open(is_kept=False)]
        if not ended:
            return
        tally = self._labels.get(True, self._labels.get(False))
        self.labels = [] if tally is None else tally.read()
        site = self._site_to_judge([x.sums for x in ended], run)
        self._tell_scale(run, site, ended[-1].sums)
        self.found = []
        for x in ended:
            loss, accuracy = _means(x.sums[site], x.sums) if site in x.sums else (math.nan, math.nan)
            loss = _named(LOSS_NAME, x.metrics) if math.isnan(loss) else loss
            accuracy = _named(ACCURACY_NAME, x.metrics) if math.isnan(accuracy) else accuracy
            before = self.found[-1].step if self.found else 0
            is_known = not (math.isnan(loss) and math.isnan(accuracy))
            if is_known and not (self.found and x.step - before < MIN_BETWEEN):
                train = _mean(run.loss, before, x.step) / self.scale
                self.found.append(Validation(x.step, loss, train, accuracy, x.is_kept, x.epoch))
        if any(x.accuracy > 1 for x in self.found):
            self.found = [x._replace(accuracy=x.accuracy / MAX_PERCENT) for x in self.found]

    def _tell_scale(self, run: Run, site: Site, sums: Mapping[Site, _Sums]) -> None:
        known = run.measured(Loss)
        kinds = {ALIKE.get(kind, kind) for kind in (known.kinds or (known.kind,)) if kind}
        graph = known.graph
        is_plain = graph is None or not (graph.smoothing or graph.has_weights)
        is_alike = is_plain and bool(self._kinds) and self._kinds == kinds
        scale = 1.0 if self._is_own or graph is None else graph.scale / _factor(site, sums)
        self.is_one_scale = self._is_own or (is_alike and (scale > 0 or math.isnan(known.constant)))
        self.scale = scale if self.is_one_scale and math.isfinite(scale) else 1.0

    def _site_to_judge(self, ended: Sequence[dict[Site, _Sums]], run: Run) -> Site:
        sites = list(dict.fromkeys(site for sums in ended for site in sums))
        if () in sites or len(sites) < 2:
            return sites[0] if sites and () not in sites else ()
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
        self._ended, self._sums, self._labels, self._metrics = [], {}, {}, {}


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


def _factor(site: Site, sums: Mapping[Site, _Sums]) -> float:
    """Factor of a reported loss to that of torch.nn.functional it is computed from; NaN if unknown."""
    heard_of = [x for other, x in sums.items() if other]
    if site or site not in sums:
        return 1.0
    own, plain = _means(sums[site], {})[0], _means(heard_of[0], {})[0] if len(heard_of) == 1 else 0.0
    return own / plain if plain else math.nan


def _named(name: re.Pattern[str], metrics: Mapping[str, float | Tensor]) -> float:
    """The only number of such a name, NaN if there is none or several."""
    found = [x for key, x in metrics.items() if name.fullmatch(key)]
    return float(found[0]) if len(found) == 1 else math.nan


def _mean(loss: Series, first: int, last: int) -> float:
    values = [x for step, x in loss if first <= step < last]
    return sum(values) / len(values) if values else math.nan
