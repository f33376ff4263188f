"""Run: what was recorded of a training, as plain numbers, for checks to read."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from hookcb.diagnosis.reader import ADVICE, Way, way_of
from hookcb.hooks.coverage import BY_CLOSURE
from hookcb.records.series import Series as Series

T = TypeVar("T")

# Types of modules that have small gradients by nature, because few samples use each row.
SPARSE_KINDS = ("Embedding", "EmbeddingBag")
WINDOW = 10  # batches; their mean loss is the loss at the beginning
CONVERGED = 0.2  # share of that loss; below it statistical checks are silent


@dataclass(frozen=True, slots=True)
class Span:
    """A run of records: numbers of its first and last training batch, and how many records it has."""

    first: int
    last: int
    n: int


@dataclass(slots=True)
class Layer:
    """A layer with a recorded output.

    Attributes:
        name: qualified name of the module.
        kind, about: its type, `Linear`, and the same with sizes, `Linear 64→64`.
        place: its index in the order of execution.
        stats: series by name, over the inspected batches: `mean`, `std`, `abs_max`, `zeros` (share) and
            `nonfinite` (number) from `ActivationStats`; from `Diagnose` `spread`, the variance across the
            batch relative to the second moment, and `saturated` (share) for tanh and sigmoid;
            `grad_nonfinite` (number) in the gradient with respect to the output.
        largest: largest finite number of the output's dtype.
    """

    name: str
    kind: str
    about: str
    place: int
    stats: dict[str, Series] = field(default_factory=dict)
    largest: float = math.inf

    def series(self, stat: str) -> Series:
        """One of `stats`; empty if it was not recorded."""
        return self.stats.get(stat, Series())


@dataclass(slots=True)
class Param:
    """A parameter.

    Attributes:
        name, layer: qualified names of the parameter and of its module.
        kind, about: type of the module, and the same with sizes.
        place: index of the parameter in the model.
        shape: shape of the parameter.
        place_of_layer: index of its module in the order of execution, None if that is unknown.
        resolution: machine epsilon of its dtype.
        stats: series by name of the statistic, from `GradientHealth`.
        is_optimized: whether an optimizer has it; `lr` and `weight_decay` are its group's at the end.
        eps: what Adam adds to the root of its second moment, NaN if its optimizer is not of this kind.
        is_adaptive: whether that optimizer scales gradients by their size, as Adam does.
        maximizes: whether it ascends rather than descends.
        has_moved: whether any of 1,024 elements differs between the beginning and the end.
        n_without: number of inspected steps in which it required a gradient and had none.
        first_bad: first step with a NaN or infinite gradient, even if its record was dropped, else None.
        optimizer: index of the optimizer that has it, None if none is known.
    """

    name: str
    layer: str
    kind: str
    about: str
    place: int
    shape: tuple[int, ...]
    place_of_layer: int | None = None
    resolution: float = 2.0**-23
    stats: dict[str, Series] = field(default_factory=dict)
    is_optimized: bool = True
    lr: float = math.nan
    weight_decay: float = 0.0
    eps: float = math.nan
    is_adaptive: bool = False
    maximizes: bool = False
    n_without: int = 0
    first_bad: int | None = None
    has_moved: bool = True
    optimizer: int | None = None

    @property
    def is_weight(self) -> bool:
        """Whether its size can be compared with others: True for matrices and filters.

        False for biases, norms and embeddings, and for parameters that are broadcast over the batch,
        `(1, N, C)` or `(1, C, 1, 1)`, such as tokens, positions and scales.
        """
        is_broadcast = len(self.shape) > 2 and self.shape[0] == 1 and "Conv" not in self.kind
        return len(self.shape) > 1 and self.kind not in SPARSE_KINDS and not is_broadcast

    def series(self, stat: str) -> Series:
        """One of `stats`; empty if it was not recorded."""
        return self.stats.get(stat, Series())


@dataclass(frozen=True, slots=True)
class Passed:
    """Fault that was ruled out.

    Attributes:
        text: the fault, with the number that rules it out: "dead units (0 %)".
        value: number compared with the limit, in the unit of `Finding.value`; NaN if there is none.
        limit: the limit; if there are several, the nearest one.
    """

    text: str
    value: float = math.nan
    limit: float = math.nan

    def __eq__(self, other: object) -> bool:
        """Whether all is the same; a number that neither has is the same, too."""
        return isinstance(other, Passed) and repr(self) == repr(other)

    @property
    def is_near(self) -> bool:
        """Whether the number is within a factor of two of its limit."""
        return self.limit > 0 and self.limit / 2 < self.value < 2 * self.limit


@dataclass(frozen=True, slots=True)
class Skipped:
    """Reason why a fault could not be judged: "fewer than 8 batches were inspected"."""

    reason: str


@dataclass(frozen=True, slots=True)
class Partial:
    """Reason why a fault can be shown, but not ruled out: "part of the model is TorchScript"."""

    reason: str


@dataclass(frozen=True, slots=True)
class Absent:
    """Reason why a training cannot have the fault: "there is no GradScaler"."""

    reason: str


Reason = Skipped | Partial | Absent  # each says more than the one before it
STRENGTH = Skipped, Partial, Absent


@dataclass(slots=True)
class Run:
    """Everything that was recorded about a training.

    Attributes:
        sources: kinds of records: "activations", "gradients", "loss", "batches" (inputs, targets and modules
            as seen by `Diagnose`), "batch" (at least one of these), "model" (before training), "graph" (of
            the loss), "optimizers" (known ones), "steps" (their steps), "time", "memory".
        n_batches, n_looked: number of training batches, and of those that were inspected closely.
        layers: layers by name, in the order of execution.
        params: parameters by name, in the order of the model.
        steps: series over the inspected steps: `total_norm` before clipping, `clipped_total_norm`,
            `clip_coef`, `lr`, and `scale` and `skipped` (0 or 1) of a GradScaler.
        lr: largest learning rate of all groups, for each batch.
        loss: loss of each batch.
        n_steps: number of optimizer steps.
        notes: remarks on what could not be inspected.
        reasons: why nothing, or not all, is known, see `lack`.
        reader: how whoever reads the verdict runs hookcb, for advice that fits.
        loop: the loop, while it is followed.
        looking: whether the current batch is inspected.
        noting: whether slow facts are noted in it: if it is inspected, or as `Schedule.is_noted` says.
        parts: what was measured, and faults, by their classes, see `measured`.
    """

    loop: Any = None
    looking: bool = False
    noting: bool = True
    parts: dict[type, Any] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)
    n_batches: int = 0
    n_looked: int = 0
    layers: dict[str, Layer] = field(default_factory=dict)
    params: dict[str, Param] = field(default_factory=dict)
    steps: dict[str, Series] = field(default_factory=dict)
    lr: Series = field(default_factory=Series)
    loss: Series = field(default_factory=Series)
    n_steps: int = 0
    notes: list[str] = field(default_factory=list)
    reasons: dict[str, Reason] = field(default_factory=dict)
    reader: Way = field(default_factory=lambda: way_of("learner"))
    # what a verdict reads often
    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        counts = f"{self.n_batches:,} batches, {len(self.layers)} layers, {len(self.params)} parameters"
        return f"Run({counts})"

    @property
    def step(self) -> int:
        """Number of the current batch."""
        number: int = self.loop.train_iter
        return number

    def measured(self, kind: type[T]) -> T:
        """A measurement; a new one if nothing was measured."""
        if kind not in self.parts:
            self.parts[kind] = kind()
        found: T = self.parts[kind]
        return found

    def note(self, text: str) -> None:
        """Adds a remark, once."""
        if text not in self.notes:
            self.notes.append(text)

    def add_failures(self, live: "Run") -> bool:
        """Adds what has failed in a live run; True if that is new."""
        new = [note for note in live.notes if note not in self.notes]
        self.notes += new
        for what, reason in live.reasons.items():
            if not isinstance(self.reasons.get(what), Partial):
                self.lack(reason, what)
        return bool(new)

    def lack(self, reason: Reason, *of: str) -> None:
        """Keeps why nothing is known, or not all, unless a reason that says more is known.

        Args:
            reason: `Absent` from this training, `Partial`, or `Skipped` if nothing was seen.
            of: sources, subjects of faults, codes of faults, classes of measurements, or events of a loop.
        """
        for what in of:
            known = self.reasons.get(what, reason)
            if STRENGTH.index(type(reason)) >= STRENGTH.index(type(known)):
                self.reasons[what] = reason

    def why_not(self, what: str) -> Absent | Skipped:
        """Why a fault that needs to see something cannot be judged."""
        if isinstance(known := self.reasons.get(what), Absent):
            return known
        return Skipped(known.reason if known else f"too little was seen of the {what}")

    def _why(self, what: str, otherwise: str = "") -> str:
        return self.reasons[what].reason if what in self.reasons else otherwise

    def about(self, layer: str, param: str) -> str:
        """Type and sizes of a layer, or of the one that has a parameter; "" if unknown."""
        if layer in self.layers:
            return self.layers[layer].about
        params = (p for p in self.params.values() if param == p.name or layer == p.layer != "")
        return next((p.about for p in params), "")

    @property
    def is_by_closure(self) -> bool:
        """Whether each batch is an evaluation in a step of LBFGS; then no gradient belongs to a step."""
        return self._why("before_step") == BY_CLOSURE

    @property
    def is_one_backward(self) -> bool:
        """Whether it has the gradients of a single backward, without a training."""
        return not self.n_steps and len(self.steps.get("total_norm", ())) > 0

    def advise(self, what: str) -> str:
        """One of `ADVICE`, in the words of how the reader runs hookcb."""
        return ADVICE[what][self.reader]

    @property
    def hang(self) -> str:
        """Places of the processes when the training got no further; "" if it did."""
        return self._why("hang")

    def why_nothing_seen(self) -> str:
        """Reason why no verdict can rest on this evidence, "" if one can."""
        if self.hang:
            return self.hang
        if not self.n_batches:
            return self._why("batches", self._why("before_batch", "no training batch was seen"))
        has_forward = len(self.loss) > 0 or any(layer.stats for layer in self.layers.values())
        is_unknown = "gradients" not in self.sources or "gradients" in self.reasons
        if is_unknown or self.is_by_closure:
            why = self._why("activations", "no layer has produced an output in a training batch")
            return "" if has_forward else why
        if not any(p.stats for p in self.params.values()):
            return self._why_no_gradients()
        return "" if has_forward else self._why("after_pred")  # half a training proves nothing

    def _why_no_gradients(self) -> str:
        if not self.params:
            return "no parameter of the model requires a gradient"
        for event in ("after_pred", "before_backward", "before_step"):
            if event in self.reasons:
                return self._why(event)
        if not self.n_steps:
            return f"no optimizer step was seen in {self.n_batches} batches, so no gradient was inspected"
        return "no parameter of the model had a gradient at a step"

    @property
    def first_loss(self) -> float:
        """Mean loss of the first ten batches; NaN if unknown or not finite."""
        first = self.loss.values[:WINDOW]
        return sum(first) / len(first) if first and all(map(math.isfinite, first)) else math.nan

    def smooth_loss(self) -> Series:
        """Exponential moving average of the finite losses over about ten batches."""
        loss, n, smooth = self._kept.get("smooth loss", (None, 0, Series()))
        if loss is self.loss and n == len(loss):
            return cast("Series", smooth)
        smooth, now = Series(), math.nan
        for step, x in self.loss:
            if math.isfinite(x):
                now = x if math.isnan(now) else now + (x - now) / WINDOW
                smooth.add(step, now)
        self._kept["smooth loss"] = self.loss, len(self.loss), smooth
        return smooth

    def converged_at(self) -> float:
        """First step at which the smoothed loss is below a fifth of its initial value; inf if it never is.

        The initial value is the mean of the first ten batches, but at most twice the first loss; otherwise,
        if the loss rises at once, any later loss would look converged. A loss that may be negative has
        converged when it has fallen by half of its initial size. If the loss is unknown, the norm of all
        gradients is used instead, with a limit of a twentieth of its initial value.
        """
        if not len(self.loss):
            norms = self.steps.get("total_norm", Series())
            usual = min(statistics.median(norms.values[:5]), 2 * norms.values[0]) if len(norms) else math.nan
            return next((step for step, x in norms if x < usual / 20), math.inf)
        first, start = self.first_loss, self.loss.values[0]
        if 0 < 2 * start < first:
            first = 2 * start
        if math.isnan(first):
            return math.inf
        low = CONVERGED * first if first > 0 and min(self.loss.values) >= 0 else first - abs(first) / 2
        return next((step for step, x in self.smooth_loss() if x < low), math.inf)
