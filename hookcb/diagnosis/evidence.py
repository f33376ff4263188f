"""Evidence: what was recorded of a training, as plain numbers, for checks to read."""

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hookcb.hooks.coverage import BY_CLOSURE

# Kinds of modules whose gradients are small by their nature: of rows that few samples ask for.
SPARSE_KINDS = ("Embedding", "EmbeddingBag")
WINDOW = 10  # batches whose mean loss is taken for the loss at the beginning
CONVERGED = 0.2  # of that; below it a statistical check is silent


@dataclass(slots=True)
class Series:
    """A number over the training: `values[i]` is of training batch `steps[i]`; NaN values are left out."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, steps: Iterable[int], values: Iterable[float]) -> "Series":
        """Of the values that are numbers."""
        pairs = [(step, x) for step, x in zip(steps, values, strict=True) if not math.isnan(x)]
        return cls([step for step, _ in pairs], [x for _, x in pairs])

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)

    def add(self, step: int, value: float) -> None:
        """Adds a value, at the end."""
        self.steps.append(step)
        self.values.append(value)

    def between(self, first: int, last: int) -> "Series":
        """Of the steps from `first` to `last`, both included."""
        pairs = [(step, x) for step, x in self if first <= step <= last]
        return Series([step for step, _ in pairs], [x for _, x in pairs])

    def median(self, n: int | None = None) -> float:
        """Of the last `n`, by default of all; NaN where there is none."""
        values = self.values if n is None else self.values[-n:]
        return statistics.median(values) if values else math.nan


@dataclass(slots=True)
class Layer:
    """A layer that puts something out.

    Attributes:
        name: qualified name of the module; `place` is its place in the order of execution.
        kind, about: its type, `Linear`, and with sizes, `Linear 64→64`.
        stats: series by name, over the batches looked at: `mean`, `std`, `abs_max`, `zeros` (share),
            `nonfinite` (number) of `ActivationStats`; of `Diagnose` `spread`, the variance across the batch
            relative to the second moment, and `saturated` (share) of tanh and sigmoid; `grad_nonfinite`
            (number) in the gradient of the output.
        largest: of numbers that the output's dtype has.
    """

    name: str
    kind: str
    about: str
    place: int
    stats: dict[str, Series] = field(default_factory=dict)
    largest: float = math.inf

    def series(self, stat: str) -> Series:
        """One of `stats`, empty where it was not recorded."""
        return self.stats.get(stat, Series())


@dataclass(slots=True)
class Param:
    """A parameter.

    Attributes:
        name, layer: qualified names, of it and of its module; `about` has the module's type and sizes.
        kind: type of the module; `place` of the parameter in the model; `place_of_layer` that of its
            module in the order of execution, None where that was not seen.
        shape: of it; `resolution` of its dtype, the relative distance of neighbouring numbers.
        stats: series by name of the statistic, those of `GradientHealth`.
        is_optimized: whether an optimizer has it; `lr` and `weight_decay` are those of its group at the end.
        is_adaptive: whether that scales gradients by their size, as Adam does.
        dead: share of units of the weight that had no gradient lately, in `n_looked` looks at `n_examples`
            examples; `dead_since` the step it was so from; NaN and None where not looked at.
        never_alive: share of those that had none at all.
        has_moved: whether any of 1,024 elements is at the end another than at the beginning.
        n_without: in how many steps looked at it required a gradient and had none.
        first_bad: first step with a NaN or infinite gradient, also if its record was dropped; None if unknown.
        optimizer: index of the one that has it, None where none is known.
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
    is_adaptive: bool = False
    dead: float = math.nan
    n_looked: int = 0
    n_examples: int = 0
    never_alive: float = math.nan
    dead_since: int | None = None
    n_without: int = 0
    first_bad: int | None = None
    has_moved: bool = True
    optimizer: int | None = None

    @property
    def is_weight(self) -> bool:
        """Whether its size can be compared: matrices and filters, not biases, norms and embeddings.

        Nor is what is broadcast over the batch, `(1, N, C)` or `(1, C, 1, 1)`: tokens and positions are
        added, and others scale.
        """
        is_broadcast = len(self.shape) > 2 and self.shape[0] == 1 and "Conv" not in self.kind
        return len(self.shape) > 1 and self.kind not in SPARSE_KINDS and not is_broadcast

    def series(self, stat: str) -> Series:
        """One of `stats`, empty where it was not recorded."""
        return self.stats.get(stat, Series())


@dataclass(frozen=True, slots=True)
class Observation:
    """Something that was seen as it happened, which needs no statistics.

    Attributes:
        code: of the finding that it leads to.
        layer, param: where.
        step: number of the training batch.
        value: the number that tells, NaN where there is none.
        text: what was seen, the finding's message.
        causes, next_steps: see `Finding`.
        severity: of the finding, "" for the usual one of its code.
    """

    code: str
    layer: str = ""
    param: str = ""
    step: int | None = None
    value: float = math.nan
    text: str = ""
    causes: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    severity: str = ""


@dataclass(slots=True)
class Evidence:
    """What was recorded of a training.

    Attributes:
        sources: what recorded it: "activations", "gradients", "loss", "batches" (what `Diagnose` sees of
            inputs, targets and modules), "batch" (one of them at least), "model" (as it is built), "graph"
            (of the loss), "optimizers" (that are known), "steps" (of these), "time", "memory".
        n_batches: number of training batches; `n_looked` how many of them were looked at closely.
        looks: the rule by which later ones were, "" if no budget has thinned them.
        layers: by name, in the order of execution.
        params: by name, in the order of the model.
        steps: series over the steps looked at: `total_norm`, `clipped_total_norm`, `clip_coef`, `lr`,
            `scale` of a GradScaler and `skipped` (0 or 1).
        lr: largest learning rate of all groups, at each batch.
        loss: of each batch; `losses` that before a step of each optimizer, by its index.
        loss_kind: "cross-entropy", "binary cross-entropy", "mse", "nll" …, "" where it is not known.
        guess: the loss of guessing: ln C of cross-entropy over C classes, of MSE the mean square of the
            targets; NaN where it is not known.
        constant: the loss of the best constant for the targets of the first batch: their entropy, or
            variance; NaN if it is not known.
        input_std: standard deviation of the first float input, batch by batch; `input_rms` its RMS.
        waits: seconds in fetches of batches since the batch before, 0 if none was seen; `batches` seconds
            from the end of the batch before to that of this one.
        memory: bytes in use after each step, as far as it is known.
        stepped: by record of a step the index of the optimizer that made it, where that is known.
        observed: what there was to look at: "inputs", "labels", "loss", "attention", "backward", "steps" …
        is_by_hand: whether the loop moves its weights without an optimizer.
        is_one_backward: whether it is from one backward, without a training.
        n_skipped: number of steps that a GradScaler has left out, of `n_steps`.
        sightings: what was seen as it happened.
        silent: layers with a hook that was never called, with the likely reason.
        notes: what could not be looked at, in words.
        missing: why a source is not there, if that is known.
        absent: by subject of checks why it is no part of this training.
        partial: why a source tells of a part of the model only, in which nothing can be ruled out.
        unseen: by event why a loop that hookcb does not run has not shown it.
    """

    sources: set[str] = field(default_factory=set)
    n_batches: int = 0
    n_looked: int = 0
    looks: str = ""
    layers: dict[str, Layer] = field(default_factory=dict)
    params: dict[str, Param] = field(default_factory=dict)
    steps: dict[str, Series] = field(default_factory=dict)
    lr: Series = field(default_factory=Series)
    loss: Series = field(default_factory=Series)
    losses: dict[int, Series] = field(default_factory=dict)
    loss_kind: str = ""
    guess: float = math.nan
    constant: float = math.nan
    input_std: Series = field(default_factory=Series)
    input_rms: Series = field(default_factory=Series)
    waits: Series = field(default_factory=Series)
    batches: Series = field(default_factory=Series)
    memory: Series = field(default_factory=Series)
    stepped: list[int] = field(default_factory=list)
    observed: set[str] = field(default_factory=set)
    n_steps: int = 0
    is_by_hand: bool = False
    is_one_backward: bool = False
    n_skipped: int = 0
    sightings: list[Observation] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    partial: dict[str, str] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)
    _smooth: tuple[int, Series] | None = field(default=None, repr=False, compare=False)

    def why_nothing_seen(self) -> str:
        """Why this says nothing of a training, "" if it does."""
        if not self.n_batches:
            return self.unseen.get("before_batch", "no training batch was seen")
        has_forward = len(self.loss) > 0 or any(layer.stats for layer in self.layers.values())
        is_by_closure = self.unseen.get("before_step") == BY_CLOSURE  # what it is trained by has no gradient
        if "gradients" not in self.sources or is_by_closure:
            return "" if has_forward else "no layer has put anything out in a training batch"
        if not any(p.stats for p in self.params.values()):
            return self._why_no_gradients()
        return "" if has_forward else self.unseen.get("after_pred", "")  # of half a training nothing is known

    def _why_no_gradients(self) -> str:
        if not self.params:
            return "no parameter of the model requires a gradient"
        for event in ("after_pred", "before_backward", "before_step"):
            if event in self.unseen:
                return self.unseen[event]
        if not self.n_steps:
            return f"no step was seen in {self.n_batches} batches, so that no gradient was looked at"
        return "no parameter of the model had a gradient at a step"

    @property
    def first_loss(self) -> float:
        """Mean loss of the first ten batches, NaN where it is not known or not finite."""
        first = self.loss.values[:WINDOW]
        return sum(first) / len(first) if first and all(map(math.isfinite, first)) else math.nan

    def smooth_loss(self) -> Series:
        """Exponential moving average of the loss over about ten batches, of what is finite."""
        if self._smooth is None or self._smooth[0] != len(self.loss):  # a dozen checks ask for it
            self._smooth = len(self.loss), self._smoothed()
        return self._smooth[1]

    def _smoothed(self) -> Series:
        smooth, now = Series(), math.nan
        for step, x in self.loss:
            if math.isfinite(x):
                now = x if math.isnan(now) else now + (x - now) / WINDOW
                smooth.add(step, now)
        return smooth

    def converged_at(self) -> float:
        """The step from which on the loss is below a fifth of its beginning; infinity where it never is.

        The beginning is the mean of the first ten batches, but at most twice the first one, as those of a
        loss that rises at once would make any later one seem converged. Of a loss that may be negative: where
        it has come down by half of its size at the beginning. Where the loss is not known, the norm of all
        gradients stands for it, in the same way, and a twentieth of its beginning.
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
