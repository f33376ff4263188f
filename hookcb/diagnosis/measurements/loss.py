"""Loss: what the loss is, as its graph tells, and what guessing and the best constant would have."""

import math
from array import array
from collections.abc import Sequence
from copy import copy
from typing import Any

from torch import Tensor

from hookcb.core.batch import parts
from hookcb.core.graph import COMPILED
from hookcb.core.optim import detached_scalar
from hookcb.diagnosis.fault import EVERY, LOOKS, Measurement
from hookcb.diagnosis.measurements import loss_graph
from hookcb.diagnosis.measurements.curves import Curve, Curves
from hookcb.diagnosis.measurements.loss_graph import LossGraph
from hookcb.diagnosis.measurements.plain_run import ExternalBatch, graph_of_original
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.run import Run, Series, Skipped
from hookcb.nans.replay import Autocast, autocasts

PENALTY_EVERY = 8  # batches, as a penalty may change fast
MAX_APART = 0.05  # relative difference between ranks of the loss of a guess, beyond which it is unknown
MAX_SHOWN, N_SHOWN = 64, 100  # ranks, and losses of each, that are kept one by one
ENTROPIES = ("cross-entropy", "binary cross-entropy", "nll")
NEVER_NEGATIVE = (*ENTROPIES, "mse", "mae", "huber", "smooth l1")
PREDICTIONS = {
    "cross-entropy": "always predicting the shares of the classes",
    "binary cross-entropy": "always predicting the share of ones",
    "mse": "always predicting the mean of the targets",
}


class Loss(Measurement):
    """Kind of the loss and what it is computed from, read from the graph of the first one."""

    uses = (Steps, Targets)

    def __init__(self) -> None:
        self.graph: LossGraph | None = None
        self.graph_of_one = LossGraph()  # an unknown one if several optimizers may have losses of their own
        self.autocasts: list[Autocast] | None = None  # in the forward of the last inspected batch, if known
        self.kind = ""  # "cross-entropy", "binary cross-entropy", "mse", "nll" …
        self.kinds = tuple[str, ...]()  # of the losses that it adds up, () if one of them is unknown
        self.is_of_others = False  # whether the last layer before it is another model's: a discriminator's
        self.n_operations = 0  # from the model's output to the loss, if known
        self.is_seen = self.is_open = self.has_penalty = False  # open: nothing hides what it is computed from
        self.scale = 1.0  # factor of the mean over samples, NaN if unknown
        self.guess = math.nan  # ln C for cross-entropy over C classes, the mean square of the targets for MSE
        self.constant = math.nan  # of the best constant prediction for the targets: their entropy or variance
        self.perfect = 0.0  # of a perfect prediction, above 0 for soft or smoothed targets
        self.noise, self.n_targets = 0.0, 1  # deviation of `constant` over so many batches of targets
        self.penalty, self._penalty = Series(), Curve()  # on parameters, in inspected and every eighth batch
        self._penalty_due = 0
        self.of_ranks: list[Series] = []  # some of the losses of each rank, if there are no more than 64
        self.n_ranks = 1  # whose losses are averaged in those of the run

    def on_prediction(self, run: Run) -> None:
        if run.looking:
            self.autocasts = autocasts(run.loop.model)

    def on_first_graph(self, run: Run) -> None:
        loop, self.is_seen = run.loop, True
        node, yb = loop.loss_node, run.measured(Targets).of_batch(run)
        self.graph = loss_graph.read_loss(node)
        own = {id(p) for p in loop.model.parameters()}
        self.n_operations = loss_graph.n_between(node, loop.pred)
        self.is_of_others = any(id(p) not in own for p in loss_graph.last_parameters(node))
        if math.isnan(self.graph.scale) and run.measured(Targets).has_shown_scale:
            self.graph = self.graph._replace(scale=1.0)
        self.guess = guess_of(self.graph, loop.pred, yb)
        if self.graph.hidden_by == COMPILED:
            batch = ExternalBatch(loop) if loop.is_external else loop
            try:
                self.graph, pred = graph_of_original(batch, self.graph, self.autocasts)
                guess = guess_of(self.graph, pred, batch.yb)
                self.guess = self.guess if math.isnan(guess) else guess
            except Exception as error:  # raised by the model; the input of the loss stays hidden
                run.note(f"the model could not be run without torch.compile: {error!r:.80}")
        self.is_open, self.has_penalty = not self.graph.hidden_by, self.graph.has_penalty
        self.cadence = EVERY if self.has_penalty else LOOKS

    def on_loss(self, run: Run) -> None:
        if self.has_penalty and (run.looking or run.step >= self._penalty_due):
            self._penalty_due, loss = run.step + PENALTY_EVERY, run.loop.loss
            if isinstance(loss, Tensor) and (penalty := loss_graph.penalty_of(loss)) is not None:
                self._penalty.add((run.step, detached_scalar(penalty)))

    def tell(self, run: Run) -> None:
        if (graph := self.graph) is None:
            return
        self.kind, self.kinds, self.scale = graph.sure_kind, graph.kinds, graph.scale
        self.graph_of_one = graph if run.measured(Steps).n_optimizers <= 1 else LossGraph()
        self.penalty, targets = self._penalty.series(), run.measured(Targets)
        if len(self.penalty) or not self.has_penalty:
            self.constant, self.perfect, self.noise = targets.losses(graph)
            self.n_targets = targets.n_batches
        run.lack(Skipped(graph.why_hidden), "graph")
        run.sources |= set() if graph.why_hidden else {"graph"}

    def state(self, run: Run) -> tuple[Any, ...]:
        every = max(1, math.ceil(len(run.loss) / N_SHOWN))
        series = run.loss, self.penalty, *run.measured(Curves).losses.values()
        values = [array("d", own.values) for own in series]
        return values, self.guess, self.constant, (run.loss.steps[::every], run.loss.values[::every])

    def merge(self, run: Run, of_ranks: Sequence[tuple[Any, ...]], rank: int) -> None:
        """Takes the means of all losses over ranks, which is what they minimize together.

        The loss of the best constant is averaged too; it is unknown if ranks have very different targets.
        """
        values, guesses, constants, shown = zip(*of_ranks, strict=True)
        self.of_ranks = [Series(*own) for own in shown] if len(shown) <= MAX_SHOWN else []
        if any([*map(len, own)] != [*map(len, values[0])] for own in values):
            run.notes.append("ranks have recorded different batches, so each rank judges its own losses")
            return
        curves = run.parts[Curves] = copy(run.measured(Curves))
        curves.freeze()
        series = run.loss, self.penalty, *curves.losses.values()
        run.loss, self.penalty, *losses = (
            Series(own.steps, [sum(xs) / len(xs) for xs in zip(*of_each, strict=True)])
            for own, of_each in zip(series, zip(*values, strict=True), strict=True)
        )
        curves.losses = dict(zip(curves.losses, losses, strict=True))
        self.guess, self.constant, self.n_ranks = _agreed(guesses), _agreed(constants), len(of_ranks)

    def constant_in_words(self, scale: float = 1.0) -> str:
        """The best constant prediction and its loss, before a factor of the loss."""
        predicting = PREDICTIONS.get(self.kind, "always predicting the median of the targets")
        return f"{predicting} would give {self.constant / scale:.3g}"

    def freeze(self) -> None:
        self.graph = self.autocasts = None
        self.graph_of_one = self.graph_of_one._replace(class_weights=None)


def first_float(item: Any) -> Tensor | None:
    """First float tensor in an input or output of the model."""
    return next((x for _, x in parts(item) if isinstance(x, Tensor) and x.is_floating_point()), None)


def n_classes_of(scores: Tensor, labels: Tensor) -> int | None:
    """Number of classes of scores, if these labels are indices of classes."""
    if scores.ndim == labels.ndim + 1 and scores.shape[:1] + scores.shape[2:] == labels.shape:
        return scores.shape[1]
    return scores.shape[-1] if scores.ndim and scores.shape[:-1] == labels.shape else None


def guess_of(graph: LossGraph, pred: Any, yb: Any) -> float:
    """Loss of guessing: ln C for cross-entropy, the mean square of the targets for MSE; else NaN."""
    scores = first_float(pred)
    targets = next((y for _, y in parts(yb) if isinstance(y, Tensor)), None)
    if scores is None or not graph.is_pure:
        return math.nan
    if graph.kind == "cross-entropy":
        n = None if targets is None else n_classes_of(scores, targets)
        n = n or (scores.shape[-1] if scores.ndim == 2 else None)
        n = n or (graph.n_classes if scores.ndim == 0 else None)  # the model returns its loss alone
        return graph.scale * math.log(n) if n else math.nan
    if graph.kind == "binary cross-entropy":
        if not graph.has_weights:
            return graph.scale * math.log(2)
        if targets is None or graph.class_weights is None:
            return math.nan
        weights = 1 + (graph.class_weights - 1) * targets  # of ones, and 1 for zeros
        return graph.scale * math.log(2) * float(weights.mean())
    if targets is None or graph.kind != "mse" or targets.shape != scores.shape:
        return math.nan
    return graph.scale * float(targets.float().square().mean()) if targets.is_floating_point() else math.nan


def _agreed(numbers: Sequence[float]) -> float:
    """Mean of the numbers of ranks, NaN if it is unknown on one or they are far apart."""
    high, low = max(numbers), min(numbers)
    is_known = all(map(math.isfinite, numbers)) and high - low <= MAX_APART * abs(high)
    return (high + low) / 2 if is_known else math.nan
