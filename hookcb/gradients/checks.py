"""What recorded gradients say, in words: rules over plain numbers, each with its threshold and source."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.jupyter import JupyterMixin
from rich.text import Text

from hookcb.core.console import printable

# Kinds of modules whose gradients are small by their nature: of rows that few samples ask for.
SPARSE_KINDS = ("Embedding", "EmbeddingBag")
LAST = 5  # records that a finding about size looks at, by their median: one batch says little
# Limits beside what 75 healthy runs came to (those of tests/gradients/test_callback.py, five seeds each).
VANISHING = 1e-5  # a weight's gradient RMS to the largest one's: 3e-4; six sigmoids in a row 5e-7
# A weight's gradient RMS to the median one's and the last one's: 600, in the first steps of branches that
# begin with zeros; of eight layers of sin(20 x) 14,000.
EXPLODING = 1e4
SPIKE, BEFORE = 100.0, 50  # the total norm to the median of so many records before: 10
STILL, STILL_RECORDS = 1e-6, 20  # an update ratio a thousandth of the usual 1e-3, in so many records
VISIBLE = 1e-6  # of a step lr · gradient to the weight: float32 resolves 1e-7


@dataclass(frozen=True, slots=True)
class GradientFinding:
    """Something wrong with gradients.

    Attributes:
        code: `dead`, `nonfinite`, `vanishing`, `exploding`, `spike`, `unmoved`, `not_optimized`,
            `no_gradient`, `zero_lr` or `scale`.
        param: name of the parameter; empty where it is of all.
        step: of the record it was first seen in, None where it is of no single one.
        value: the number that tells; NaN where there is none.
        message: the sentence, which names the parameter.
    """

    code: str
    param: str
    step: int | None
    value: float
    message: str

    def __str__(self) -> str:
        return printable(self.message)


class GradientCheck(JupyterMixin, list[GradientFinding]):
    """What `check` has found, empty where nothing; it prints as sentences.

    Attributes:
        total_norm, mean_norm: L2 norm of all gradients together, and the mean over parameters, in the last
            record; NaN without one.
        n_params: number of parameters.
        step: of the last record.
    """

    def __init__(
        self,
        findings: Sequence[GradientFinding],
        total_norm: float,
        mean_norm: float,
        n_params: int,
        step: int,
    ) -> None:
        super().__init__(findings)
        self.total_norm, self.mean_norm, self.n_params, self.step = total_norm, mean_norm, n_params, step

    @property
    def summary(self) -> str:
        """How large the gradients are, and whether something was found."""
        found = f"{len(self)} finding{'s' * (len(self) != 1)}" if self else "nothing found"
        return (
            f"{found}; gradients of {self.n_params} parameters: total norm {self.total_norm:.3g}, "
            f"mean norm {self.mean_norm:.3g} at step {self.step}"
        )

    def __str__(self) -> str:
        return printable("\n".join([self.summary, *(f"- {finding}" for finding in self.shown())]))

    def shown(self, most: int = 8) -> Iterator[str]:
        """The sentences; of each kind the first few."""
        for code in dict.fromkeys(finding.code for finding in self):
            these = [str(finding) for finding in self if finding.code == code]
            yield from these[:most]
            if len(these) > most:
                yield f"… and {len(these) - most} more of this kind"

    def __rich__(self) -> Group:
        style = "yellow" if self else "green"
        return Group(Text(self.summary, style), *(Text(f"- {text}") for text in self.shown()))


@dataclass(frozen=True, slots=True)
class GradientHistory:
    """What the rules look at: numbers by record, of the steps that are kept.

    Attributes:
        steps: of the records.
        total_norm, mean_norm, lr, scale, skipped: of each record.
        params: by name, in the order of the model.
        without_grad: names of those that require a gradient and have none in the last record.
        not_optimized: names of those that are in no optimizer.
        first_bad: by name the first step with NaN or infinities and their number, also of lost records.
        is_of_fit: or of one backward, of which some things cannot be said.
    """

    steps: Sequence[int]
    total_norm: Sequence[float]
    mean_norm: Sequence[float]
    lr: Sequence[float]
    scale: Sequence[float]
    skipped: Sequence[float]
    params: Mapping[str, "ParamHistory"]
    without_grad: Sequence[str] = ()
    not_optimized: Sequence[str] = ()
    is_of_fit: bool = True
    first_bad: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    def is_scalers(self, i: int) -> bool:
        """Whether the step was skipped by a GradScaler whose scale may have been too large."""
        return self.skipped[i] > 0 and self.scale[i] > 1


@dataclass(frozen=True, slots=True)
class ParamHistory:
    """Of one parameter, each by record, NaN where it had no gradient.

    Attributes:
        kind: type of its module.
        n_dims: of the parameter.
        stats: series by name of the statistic.
    """

    kind: str
    n_dims: int
    stats: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def is_weight(self) -> bool:
        """Whether its size can be compared: matrices and filters, not biases, norms and embeddings."""
        return self.n_dims > 1 and self.kind not in SPARSE_KINDS

    def last(self, stat: str, records: Sequence[int]) -> float:
        """Median over these records, NaN without any."""
        values = [x for i in records if not math.isnan(x := self.stats[stat][i])]
        return statistics.median(values) if values else math.nan


def check_history(history: GradientHistory) -> GradientCheck:
    """Applies all rules; findings come in the order cause before consequence, as far as kinds tell."""
    rules = (
        _no_gradient,
        _not_optimized,
        _dead,
        _nonfinite,
        _scale,
        _zero_lr,
        _exploding,
        _spike,
        _vanishing,
        _unmoved,
    )
    findings = [finding for rule in rules for finding in rule(history)]
    last = len(history.steps) - 1
    if last < 0:
        return GradientCheck(findings, math.nan, math.nan, 0, 0)
    n = sum(not math.isnan(of.stats["nonfinite"][last]) for of in history.params.values())
    return GradientCheck(findings, history.total_norm[last], history.mean_norm[last], n, history.steps[last])


Found = Iterator[GradientFinding]


def _no_gradient(history: GradientHistory) -> Found:
    """Exact: it requires a gradient, and none came in any record."""
    for name in history.without_grad:
        if name not in history.params:
            text = f"{name} requires a gradient, and none has come to it: the loss does not depend on it"
            yield GradientFinding("no_gradient", name, None, math.nan, text)


def _not_optimized(history: GradientHistory) -> Found:
    """Exact: it gets gradients, and no optimizer has it."""
    for name in history.not_optimized:
        if name in history.params:
            text = (
                f"{name} gets gradients, and is in no parameter group of the optimizer: it is never updated"
            )
            yield GradientFinding("not_optimized", name, None, math.nan, text)


def _dead(history: GradientHistory) -> Found:
    """Exact: nothing has come to any weight in the last five records."""
    sizes = _sizes(history)
    if history.is_of_fit and sizes and not any(sizes.values()):
        text = (
            f"the gradients of all {len(sizes)} weights are exactly zero up to step {history.steps[-1]}: "
            "nothing is learned; either no unit is active any more, or the loss is constant"
        )
        yield GradientFinding("dead", "", history.steps[-1], 0.0, text)


def _nonfinite(history: GradientHistory) -> Found:
    """Exact, but for overflows of float16 that a GradScaler handles."""
    seen = []
    for name, of in history.params.items():
        for i, n in enumerate(of.stats["nonfinite"]):
            if name in history.first_bad or (n > 0 and not history.is_scalers(i)):
                step, n = history.first_bad.get(name, (history.steps[i], n))
                seen.append((step, name, n))
                break
    for step, name, n in sorted(seen, key=lambda found: found[0]):
        where = f" at step {step}" if history.is_of_fit else ""
        text = f"{name} has {n:,.0f} NaN or infinite gradient{'s' * (n != 1)}{where}"
        yield GradientFinding("nonfinite", name, step, n, text + (", the first time" if where else ""))


def _scale(history: GradientHistory) -> Found:
    """A GradScaler that has come below 1 has halved for another reason than its scale.

    Source: by default it begins at 65,536 and halves at each overflow, see torch.amp.GradScaler.
    """
    for step, scale in zip(history.steps, history.scale, strict=True):
        if scale < 1:
            text = (
                f"the GradScaler has halved its scale to {scale:.3g} by step {step}: gradients are NaN or "
                "infinite whatever the scale"
            )
            yield GradientFinding("scale", "", step, scale, text)
            return


def _zero_lr(history: GradientHistory) -> Found:
    """Exact: a learning rate of 0 in the last five records."""
    if len(history.lr) >= LAST and all(lr == 0 for lr in history.lr[-LAST:]):
        step = next(step for step, lr in zip(history.steps, history.lr, strict=True) if lr == 0)
        text = f"the learning rate is 0 since step {step}: nothing is learned"
        yield GradientFinding("zero_lr", "", step, 0.0, text)


def _sizes(history: GradientHistory) -> dict[str, float]:
    """By name of the weight its gradient RMS, median of the last five records; finite ones."""
    n = len(history.steps)
    records = [i for i in range(n) if math.isfinite(history.total_norm[i])][-LAST:]
    if not records or (history.is_of_fit and len(records) < LAST):
        return {}
    sizes = {name: of.last("rms", records) for name, of in history.params.items() if of.is_weight}
    return {name: size for name, size in sizes.items() if math.isfinite(size)}


def _vanishing(history: GradientHistory) -> Found:
    """Gradients of a weight far below those of the model's largest.

    Source: Glorot & Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    2010, for the effect; the limit is measured, see above.
    """
    excesses = _excesses(history)  # beside which all others are small
    sizes = {name: size for name, size in _sizes(history).items() if name not in excesses}
    most = max(sizes.values(), default=0.0)
    low = {name: size for name, size in sizes.items() if size < VANISHING * most}
    for name, size in low.items():
        if not history.is_of_fit and size == 0:
            continue  # at the first step it may stand before a layer that begins with zeros
        of = next(other for other, value in sizes.items() if value == most)
        how = f"{size / most:.1g} of that of {of}" if size else f"exactly zero, that of {of} is not"
        text = f"{name} has a vanishing gradient: its RMS is {how}"
        yield GradientFinding("vanishing", name, _last_step(history), size / most, text)


def _exploding(history: GradientHistory) -> Found:
    """Gradients of a weight far above those of most.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, for the effect.
    """
    for name, ratio in _excesses(history).items():
        text = f"{name} has an exploding gradient: its RMS is {_times(ratio)} that of most"
        yield GradientFinding("exploding", name, _last_step(history), ratio, text)


def _excesses(history: GradientHistory) -> dict[str, float]:
    """By name of the weights that explode, how many times larger their gradient is than the median one."""
    sizes = _sizes(history)
    usual = statistics.median([size for size in sizes.values() if size] or [math.inf])
    usual = max([usual, *list(sizes.values())[-1:]])  # where all vanish, the last is what is left
    return {name: size / usual for name, size in sizes.items() if size > EXPLODING * usual}


def _spike(history: GradientHistory) -> Found:
    """A total norm far above what it was before."""
    for i in range(10, len(history.steps)):
        if not math.isfinite(history.total_norm[i]):
            continue
        before = [x for x in history.total_norm[max(0, i - BEFORE) : i] if math.isfinite(x)]
        usual = statistics.median(before) if before else math.nan
        if history.total_norm[i] > SPIKE * usual > 0:
            name = max(history.params, key=lambda name: _or_zero(history.params[name].stats["norm"][i]))
            step, ratio = history.steps[i], history.total_norm[i] / usual
            text = (
                f"the total gradient norm is {history.total_norm[i]:.3g} at step {step}, {_times(ratio)} "
                f"the median of the {len(before)} records before; most of it is of {name}"
            )
            yield GradientFinding("spike", name, step, ratio, text)
            return


def _unmoved(history: GradientHistory) -> Found:
    """Weights that stay although there are gradients, a learning rate and steps.

    Exact where they have not changed by a bit in five steps that they should have changed in. Otherwise
    where they have never moved by more than a millionth of their norm.
    """
    made = [i for i in range(len(history.steps)) if not history.skipped[i] and history.lr[i] > 0]
    for name, of in history.params.items():
        if name in history.not_optimized or of.kind in SPARSE_KINDS:
            continue
        records = [i for i in made if of.stats["norm"][i] > 0 and not of.stats["zero_rows"][i] > 0]
        ratios = [of.stats["update_ratio"][i] for i in records]
        asked = [  # what plain SGD would do
            history.lr[i] * of.stats["clipped_norm"][i] / (of.stats["weight_norm"][i] or math.inf)
            for i in records[-LAST:]
        ]
        if len(asked) == LAST and not any(ratios[-LAST:]) and min(asked) > VISIBLE:
            step = history.steps[records[-LAST]]
            text = f"{name} does not move: it has gradients, and has not changed by a bit since step {step}"
            yield GradientFinding("unmoved", name, step, 0.0, text)
        elif of.is_weight and len(ratios) >= STILL_RECORDS and max(ratios) < STILL:
            text = (
                f"{name} hardly moves: no step has changed it by more than {max(ratios):.1g} of its norm, "
                "and 1e-3 is usual; the learning rate is too low, or its gradient"
            )
            yield GradientFinding("unmoved", name, history.steps[records[0]], max(ratios), text)


def _last_step(history: GradientHistory) -> int | None:
    return history.steps[-1] if history.is_of_fit else None


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio < 1e6 else f"{ratio:.1g} times"


def _or_zero(x: float) -> float:
    return x if math.isfinite(x) else 0.0
