"""Rules of three published tools, re-implemented from their documentation, on the records of one callback.

These are not the tools themselves: two of them need another framework, and the rules of the third run as a
service. Every step is recorded; the tools would record fewer. Rules that a recorded training run cannot
answer are left out. Limits are the documented ones; if one could not be found, its rule says so.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookcb import Callback

T = TypeVar("T")
PERIOD = 10  # TheDeepChecker checks every tenth batch, and averages losses over as many
SPREAD_STEPS = 10  # number of steps for which SageMaker's PoorWeightInitialization checks gradients
BOUNDS = {"Tanh": (-1.0, 1.0), "Sigmoid": (0.0, 1.0)}
RELUS = ("ReLU", "ReLU6")
OTHERS = ("LeakyReLU", "PReLU", "ELU", "SELU", "GELU", "SiLU", "Mish", "Softplus")
SATURATES = {
    "Tanh": (-9.4999, 9.4999),
    "Sigmoid": (-23.0, 16.99999),
}  # inputs, from SageMaker's documentation


# ---- records


class Weights(NamedTuple):
    """Mean of |w| and shares of the elements of one parameter before a step."""

    mean: float
    zeros: float
    small: float  # |w| < 1e-5
    negative: float
    finite: float


class Gradient(NamedTuple):
    """Mean of |g|, L2 norm, shares, and range from 5 % to 95 % of one parameter's gradient before a step."""

    mean: float
    norm: float
    zeros: float
    finite: float
    spread: float  # NaN after the first steps


class Step(NamedTuple):
    """One parameter before and after a step; `update` is the mean of |change|."""

    weights: Weights
    gradient: Gradient | None
    update: float
    unchanged: bool


class Start(NamedTuple):
    """One parameter before training."""

    shape: tuple[int, ...]
    var: float
    largest: float
    usual: float  # variance of torch's default initialization


class Activation(NamedTuple):
    """One activation in one batch: share of inactive units, and variance of its input."""

    inactive: float
    var: float


class Buffered(NamedTuple):
    """The last ten batches of one activation: shares of units, and the standard deviation of all values."""

    dead: float
    saturated: float
    std: float


@dataclass
class Recorded:
    """Numbers of one training run, by batch or step; `accuracies` are NaN if there are no classes."""

    losses: list[float] = field(default_factory=list)
    valid_losses: list[tuple[int, float]] = field(
        default_factory=list
    )  # number of training batches before, loss
    accuracies: list[float] = field(default_factory=list)
    labels: Counter[int] = field(default_factory=Counter)
    n_classes: int = 0
    inputs: tuple[float, float, float, float] = (math.nan,) * 4  # mean, std, min, max over all batches
    # for each period, whether some output had only one value so far
    output_stuck: list[bool] = field(default_factory=list)
    starts: dict[str, Start] = field(default_factory=dict)
    steps: dict[str, list[Step]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # classes of the activations
    activations: dict[str, list[Activation]] = field(default_factory=dict)
    buffered: dict[str, list[Buffered]] = field(default_factory=dict)
    outputs_finite: bool = True

    @property
    def is_finite(self) -> bool:
        """Whether no loss, weight, gradient or output was NaN or infinite."""
        return self.outputs_finite and all(map(math.isfinite, self.losses)) and self.params_finite

    @property
    def params_finite(self) -> bool:
        """Whether no weight or gradient was NaN or infinite."""
        return all(
            step.weights.finite == 1 and (step.gradient is None or step.gradient.finite == 1)
            for step in self.all_steps()
        )

    def all_steps(self) -> Iterator[Step]:
        for steps in self.steps.values():
            yield from steps

    def gradients(self) -> Iterator[Gradient]:
        return (step.gradient for step in self.all_steps() if step.gradient is not None)

    def named(self, suffix: str) -> Iterator[list[Step]]:
        """Steps of the parameters whose last name component starts with `suffix`."""
        return (steps for name, steps in self.steps.items() if name.rpartition(".")[2].startswith(suffix))


class RuleRecorder(Callback):
    """Records the numbers that the rules need, in a Learner or a watch, without changing the training."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = Recorded()

    def before_fit(self) -> None:
        self.recorded = to = Recorded()
        self._n_batches = 0
        self._sums = [0.0, 0.0, 0.0, math.inf, -math.inf]  # count, sum, sum of squares, min, max
        self._varied: Tensor | None = None
        self._valid: list[float] = []
        self._buffers: dict[str, deque[Tensor]] = {}
        self._before: dict[str, Tensor] = {}
        self._taken: dict[str, tuple[Weights, Gradient | None]] = {}
        owners = dict(self.model.named_modules())
        for name, p in self.model.named_parameters():
            if p.numel():
                w = p.detach().float()
                usual = usual_variance(owners[name.rpartition(".")[0]], p)
                largest = float(w.abs().amax())
                to.starts[name] = Start(tuple(p.shape), float(w.var(correction=0)), largest, usual)
        self._seen: set[str] = set()  # an activation called twice in a batch, or checkpointed, counts once
        self._hooks: list[RemovableHandle] = []
        for name, m in self.model.named_modules():
            if next(m.children(), None) is None:
                self._hooks.append(m.register_forward_hook(partial(self._look, name)))

    def after_fit(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._buffers, self._before = [], {}, {}  # a copy does not need them
        n, total, squares, low, high = self._sums
        if n:
            mean = total / n
            std = math.sqrt(max(squares / n - mean**2, 0.0)) if math.isfinite(squares) else math.nan
            self.recorded.inputs = mean, std, low, high

    # ---- batches

    def before_batch(self) -> None:
        self._seen.clear()
        x = _first_float(self.xb) if self.training else None
        if x is not None:
            x = x.detach().double()
            n, total, squares, low, high = self._sums
            n, total, squares = n + x.numel(), total + float(x.sum()), squares + float(x.square().sum())
            self._sums = [n, total, squares, min(low, float(x.amin())), max(high, float(x.amax()))]

    @torch.no_grad()
    def after_pred(self) -> None:
        if not self.training:
            return
        self._n_batches += 1
        self._count_labels()
        if isinstance(pred := self.pred, Tensor) and pred.ndim > 1 and len(pred) > 1:
            varied = pred.detach().float().flatten(1).var(0, correction=0) > 0
            same_shape = self._varied is not None and self._varied.shape == varied.shape
            self._varied = varied | self._varied if same_shape and self._varied is not None else varied
            if self._n_batches % PERIOD == 0:
                self.recorded.output_stuck.append(not bool(self._varied.all()))

    def _count_labels(self) -> None:
        to, pred = self.recorded, self.pred
        y = self.yb[0] if len(self.yb) == 1 else None
        if isinstance(y, Tensor) and isinstance(pred, Tensor) and are_classes(pred, y):
            to.n_classes = pred.shape[1]
            to.labels.update(y.tolist())
            to.accuracies.append(float((pred.detach().argmax(1) == y).double().mean()))
        else:
            to.accuracies.append(math.nan)

    def after_loss(self) -> None:
        (self.recorded.losses if self.training else self._valid).append(float(self.loss.detach()))

    def after_validate(self) -> None:
        if self._valid:
            self.recorded.valid_losses.append((len(self.recorded.losses), fmean(self._valid)))
        self._valid = []

    # ---- activations

    @torch.no_grad()
    def _look(self, name: str, m: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.training or name in self._seen or not isinstance(output, Tensor) or not output.numel():
            return
        self._seen.add(name)
        self.recorded.outputs_finite &= bool(output.isfinite().all())
        kind = type(m).__name__
        if kind in (*BOUNDS, *RELUS, *OTHERS) and args and isinstance(args[0], Tensor):
            units, inputs = by_unit(output.detach().float()), by_unit(args[0].detach().float())
            self.recorded.kinds[name] = kind
            activation = Activation(inactive_share(kind, inputs, units), float(inputs.var(correction=0)))
            self.recorded.activations.setdefault(name, []).append(activation)
            buffer = self._buffers.setdefault(name, deque(maxlen=PERIOD))
            buffer.append(units)
            n = len(self.recorded.activations[name])
            if n % PERIOD == 0 and len({len(x[0]) for x in buffer}) == 1:
                self.recorded.buffered.setdefault(name, []).append(buffered(kind, torch.cat([*buffer])))

    # ---- steps

    @torch.no_grad()
    def before_step(self) -> None:
        self._taken.clear()
        for name, p in self.model.named_parameters():
            if p.requires_grad and p.numel():
                spread = len(self.recorded.steps.get(name, ())) < SPREAD_STEPS
                g = None if p.grad is None or p.grad.is_sparse else gradient_numbers(p.grad.float(), spread)
                self._taken[name] = weight_numbers(p.float()), g
                self._before[name] = p.detach().clone()

    @torch.no_grad()
    def after_step(self) -> None:
        for name, p in self.model.named_parameters():
            if name in self._taken:
                before, after = self._before[name].float(), p.float()
                update = float((after - before).abs().mean())
                unchanged = bool(torch.allclose(after, before, rtol=1e-5, atol=1e-8))
                self.recorded.steps.setdefault(name, []).append(Step(*self._taken[name], update, unchanged))
        self._taken.clear()


def _first_float(xb: Any) -> Tensor | None:
    values: Iterable[Any] = xb.values() if isinstance(xb, Mapping) else xb
    floats = (x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.numel())
    return next(floats, None)


def are_classes(pred: Tensor, y: Tensor) -> bool:
    """Whether the prediction has one column per class and the target is a class index."""
    return y.dtype == torch.int64 and y.shape == pred.shape[:1] and pred.ndim == 2 and pred.shape[1] > 1


def by_unit(x: Tensor) -> Tensor:
    """Reshape to `(observations, units)`: units are dimension 1 of `(N, C, H, W)`, otherwise the last."""
    if x.ndim < 2:
        return x.reshape(-1, 1)
    return (x.movedim(1, -1) if x.ndim == 4 else x).flatten(0, -2)


def usual_variance(m: nn.Module, p: Tensor) -> float:
    """Variance of torch's default initialization for a module's weight; NaN for an embedding."""
    if isinstance(m, nn.Embedding | nn.EmbeddingBag):
        return math.nan
    return 1 / (3 * (m.hidden_size if isinstance(m, nn.RNNBase) else max(1, math.prod(p.shape[1:]))))


def inactive_share(kind: str, inputs: Tensor, outputs: Tensor) -> float:
    """Share of units that are active in less than 1 % of the observations; 0 for other kinds."""
    if kind in RELUS:
        active = outputs > 0
    elif kind in SATURATES:
        low, high = SATURATES[kind]
        active = (inputs > low) & (inputs < high)
    else:
        return 0.0
    return float((active.float().mean(0) < 0.01).float().mean())


def buffered(kind: str, x: Tensor) -> Buffered:
    """Summary of `(observations, units)`: dead if 95 % are below 1e-5, saturated if rho_B is above 0.85.

    With fifty bins, none of which contains the middle of the range, rho_B is the mean distance from the
    middle, as a share of half the range (Rakitianskaia & Engelbrecht, 2015).
    """
    saturated = 0.0
    if kind in BOUNDS:
        low, high = BOUNDS[kind]
        saturated = float(((2 * (x - low) / (high - low) - 1).abs().mean(0) > 0.85).float().mean())
    dead = float(((x.abs() < 1e-5).float().mean(0) >= 0.95).float().mean())
    return Buffered(dead, saturated, float(x.std(correction=0)))


def weight_numbers(w: Tensor) -> Weights:
    size = w.abs()
    shares = [x.float().mean() for x in (size == 0, size < 1e-5, w < 0, w.isfinite())]
    return Weights(*torch.stack([size.mean(), *shares]).tolist())


def gradient_numbers(g: Tensor, spread: bool) -> Gradient:
    zeros, finite = ((g == 0).float().mean(), g.isfinite().float().mean())
    low, high = (
        torch.quantile(g.flatten(), g.new_tensor([0.05, 0.95])) if spread else g.new_full((2,), math.nan)
    )
    return Gradient(*torch.stack([g.abs().mean(), g.norm(), zeros, finite, high - low]).tolist())


Rule = Callable[[Recorded], bool]


# ---- Amazon SageMaker Debugger


def vanishing_gradient(r: Recorded) -> bool:
    """Mean of |gradient| below 1e-7 (vanishing-gradient.html)."""
    return any(g.mean < 1e-7 for g in r.gradients())


def exploding_tensor(r: Recorded) -> bool:
    """A value is NaN or infinite (exploding-tensor.html; `only_nan` is False)."""
    return not r.is_finite


def all_zero(r: Recorded) -> bool:
    """100 % of a tensor is zero (all-zero.html); here, a weight or a gradient."""
    zero_weight = any(step.weights.zeros == 1 for steps in r.named("weight") for step in steps)
    return zero_weight or any(g.zeros == 1 for g in r.gradients())


def unchanged_tensor(r: Recorded) -> bool:
    """Three tensors in a row are all-close, rtol 1e-5, atol 1e-8 (unchanged-tensor.html); here, weights."""
    return any(a.unchanged and b.unchanged for steps in r.named("weight") for a, b in _pairs(steps))


def weight_update_ratio(r: Recorded) -> bool:
    """Mean |update| / mean |weight| above 10 or below 1e-8, epsilon 1e-9 (weight-update-ratio.html)."""
    ratios = [step.update / (step.weights.mean + 1e-9) for steps in r.named("weight") for step in steps]
    return any(ratio > 10 or ratio < 1e-8 for ratio in ratios)


def loss_not_decreasing(r: Recorded) -> bool:
    """Loss falls less than 0.1 % over 10 steps, checked every 10 (loss-not-decreasing.html).

    The stored page has no number for `diff_percent`, and only requires any decrease; 0.1 is said to be the
    value on the current page.
    """
    pairs = [(r.losses[i - 10], r.losses[i]) for i in range(10, len(r.losses), 10)]
    return any(100 * (before - now) < 0.1 * abs(before) for before, now in pairs)


def dead_relu(r: Recorded) -> bool:
    """More than 50 % of a ReLU's units are active in less than 1 % of a batch (dead-relu.html)."""
    return _inactive(r, RELUS)


def saturated_activation(r: Recorded) -> bool:
    """Like dead_relu; inputs of tanh in ±9.4999, of sigmoid in -23 … 16.99999 (saturated-activation.html)."""
    return _inactive(r, tuple(SATURATES))


def _inactive(r: Recorded, kinds: Sequence[str]) -> bool:
    matching = [seen for name, seen in r.activations.items() if r.kinds[name] in kinds]
    return any(activation.inactive > 0.5 for seen in matching for activation in seen)


def poor_weight_initialization(r: Recorded) -> bool:
    """Any of three conditions in the first 10 steps (poor-weight-initialization.html).

    Variances of the inputs of ReLU layers differ by a factor above 10, the narrowest gradient spans less than
    0.001 from its 5th to its 95th percentile, or the loss has not improved for 5 steps. The page does not say
    whether one is enough, but says for each that the rule then returns True.
    """
    relus = [seen[:10] for name, seen in r.activations.items() if r.kinds[name] in RELUS]
    for at_step in zip(*relus, strict=False):
        variances = [activation.var for activation in at_step]
        if max(variances) > 10 * min(variances):
            return True
    narrow = any(g.spread < 0.001 for g in r.gradients())
    best = [min(r.losses[: i + 1]) for i in range(min(len(r.losses), 10))]
    return narrow or any(best[i] >= best[i - 5] for i in range(5, len(best)))


def overfit(r: Recorded) -> bool:
    """Validation loss more than 10 % above the training loss, patience 1 (overfit.html)."""
    begins = [0, *(n for n, _ in r.valid_losses)]
    trained = [r.losses[a:b] for a, b in _pairs(begins)]
    pairs = [(fmean(part), loss) for part, (_, loss) in zip(trained, r.valid_losses, strict=True) if part]
    return any(valid - train > 0.1 * train for train, valid in pairs)


# ---- TheDeepChecker


def features_constant(r: Recorded) -> bool:
    """Inputs have no variance."""
    return r.inputs[1] == 0


def features_unnormalized(r: Recorded) -> bool:
    """Inputs are neither in 0..1 or -1..1, nor have mean 0 and std 1, within 0.01 (`almost_equal`)."""
    mean, std, low, high = r.inputs
    if not std > 0:
        return False
    in_range = abs(high - 1) <= 0.01 and min(abs(low), abs(low + 1)) <= 0.01
    return not in_range and not (abs(std - 1) <= 0.01 and abs(mean) <= 0.01)


def labels_unbalanced(r: Recorded) -> bool:
    """(perplexity - 1) / (classes - 1) of the labels is below 0.5."""
    n = r.labels.total()
    entropy = -sum(count / n * math.log(count / n) for count in r.labels.values())
    return n > 0 and (math.exp(entropy) - 1) / (r.n_classes - 1) < 0.5


def poor_initial_weights(r: Recorded) -> bool:
    """Constant, or a variance a factor of 2.71 off the activation's init scheme (F-test, alpha 0.1).

    He for ReLU, Glorot for tanh, LeCun for sigmoid, any of these for others. Here torch's default init is
    accepted, too, because the rule would fire on nearly all of it. Embeddings are not checked.
    """
    kinds = set(r.kinds.values())
    weights = (start for name, start in r.starts.items() if name.rpartition(".")[2].startswith("weight"))
    return any(_is_poor(start, kinds) for start in weights if len(start.shape) >= 2 and start.usual > 0)


def _is_poor(start: Start, kinds: set[str]) -> bool:
    if start.var <= 1e-8:
        return True
    n_out, n_in, *field_size = start.shape
    fan_in, fan_out = n_in * math.prod(field_size), n_out * math.prod(field_size)
    schemes = {"ReLU": 2 / fan_in, "Tanh": 2 / (fan_in + fan_out), "Sigmoid": 1 / fan_in}
    asked = [schemes[kind] for kind in schemes if kinds == {kind}] or [*schemes.values()]
    return all(_f_ratio(start.var, ref) > 2.70554 for ref in (*asked, start.usual))


def _f_ratio(a: float, b: float) -> float:
    return max(a, b) / min(a, b) if min(a, b) > 0 else math.inf


def poor_initial_bias(r: Recorded) -> bool:
    """An initial bias is not zero; here, beyond 1/√fan_in, the range of torch's default init."""
    return any(_is_poor_bias(r, *name.rpartition(".")) for name in r.starts)


def _is_poor_bias(r: Recorded, module: str, dot: str, param: str) -> bool:
    weight = r.starts.get(f"{module}{dot}weight")
    if param != "bias" or weight is None or len(weight.shape) < 2:
        return False
    return r.starts[f"{module}{dot}bias"].largest > 1.001 / math.sqrt(math.prod(weight.shape[1:]))


def poor_initial_loss(r: Recorded) -> bool:
    """The first loss is at least as far from ln(C), for C classes, as ln(C) is from 0 (`dev_ratio` 1.0)."""
    if r.n_classes < 2 or not r.losses:
        return False
    expected = math.log(r.n_classes)
    return abs(r.losses[0] - expected) >= expected


def numerical_instability(r: Recorded) -> bool:
    """NaN or infinite loss, weight, gradient or output."""
    return not r.is_finite


def untrained_parameter(r: Recorded) -> bool:
    """A weight matrix does not change at all over a period of 10 steps."""
    return any(all(step.update == 0 for step in part) for steps in _matrices(r) for part in _periods(steps))


def negative_weights(r: Recorded) -> bool:
    """More than 95 % of a weight matrix is below zero."""
    return any(step.weights.negative > 0.95 for step in _looked_at(_matrices(r)))


def dead_weights(r: Recorded) -> bool:
    """More than 95 % of a weight matrix is smaller than 1e-5."""
    return any(step.weights.small > 0.95 for step in _looked_at(_matrices(r)))


def diverging_parameters(r: Recorded) -> bool:
    """Mean |weight| above 1e8, or doubled at each step in a window of 5."""
    return any(_diverges([step.weights.mean for step in steps]) for steps in r.steps.values())


def diverging_gradients(r: Recorded) -> bool:
    """Like `diverging_parameters`, with its limits: those for gradients could not be found."""
    sizes = ([step.gradient.mean for step in steps if step.gradient] for steps in _matrices(r))
    return any(map(_diverges, sizes))


def vanishing_gradients(r: Recorded) -> bool:
    """Halved at each step in a window of 5, or below 1e-8: the inverse of the limits for weights.

    Those for gradients could not be found: they are in a settings.yaml that is not among the stored files.
    """
    return any(
        window[-1] < 1e-8 or all(now <= before / 2 for before, now in _pairs(window))
        for steps in _matrices(r)
        for window in _windows([step.gradient.mean for step in steps if step.gradient])
    )


def dead_activations(r: Recorded) -> bool:
    """More than half of an activation's units have 95 % of their values below 1e-5 over ten batches."""
    return any(record.dead > 0.5 for kind, record in _buffered(r) if kind not in BOUNDS)


def saturated_activations(r: Recorded) -> bool:
    """More than half of the units of a tanh or sigmoid have rho_B above 0.85 over ten batches."""
    return any(record.saturated > 0.5 for kind, record in _buffered(r) if kind in BOUNDS)


def unstable_activations(r: Recorded) -> bool:
    """Standard deviation outside 0.5 … 2, with a variance a factor of 5.02 off (F-test, alpha 0.025)."""
    stds = [record.std for _, record in _buffered(r)]
    return any(
        (std < 0.5 and _f_ratio(std**2, 0.25) > 5.0239) or (std > 2 and _f_ratio(std**2, 4.0) > 5.0239)
        for std in stds
    )


def constant_output(r: Recorded) -> bool:
    """An output had the same value in all batches of the first six periods."""
    return len(r.output_stuck) > 5 and r.output_stuck[5]


def stagnated_loss(r: Recorded) -> bool:
    """The loss, averaged over ten steps, falls by less than 5 % four times in a row."""
    return any(
        all(before - now < 0.05 * before for before, now in _pairs(window))
        for window in _windows(_averaged(r), 1)
    )


def diverging_loss(r: Recorded) -> bool:
    """The loss, averaged over ten steps, doubles four times in a row."""
    return any(
        all(now >= 2 * before > 0 for before, now in _pairs(window)) for window in _windows(_averaged(r), 1)
    )


def fluctuating_loss(r: Recorded) -> bool:
    """The loss switches between falling and rising at more than half of the last 50 averages of ten steps."""
    losses = _averaged(r)
    for end in range(3, len(losses) + 1):
        window = losses[max(0, end - 50) : end]
        rises = [now > before for before, now in _pairs(window)]
        if sum(a != b for a, b in _pairs(rises)) > len(window) / 2:
            return True
    return False


def _matrices(r: Recorded) -> list[list[Step]]:
    return [steps[: _fitted(r)] for name, steps in r.steps.items() if len(r.starts[name].shape) >= 2]


def _fitted(r: Recorded) -> int:
    """Step after five batches in a row with accuracy 1, where the run ends; otherwise the last step."""
    for i in range(5, len(r.accuracies) + 1):
        if all(accuracy == 1 for accuracy in r.accuracies[i - 5 : i]):
            return i
    return max(len(r.losses), *(len(steps) for steps in r.steps.values()), 0)


def _averaged(r: Recorded) -> list[float]:
    return [fmean(period) for period in _periods(r.losses[: _fitted(r)])]


def _buffered(r: Recorded) -> list[tuple[str, Buffered]]:
    n = _fitted(r) // PERIOD
    return [(r.kinds[name], record) for name, seen in r.buffered.items() for record in seen[:n]]


def _looked_at(matrices: Iterable[list[Step]]) -> Iterator[Step]:
    for steps in matrices:
        yield from steps[PERIOD::PERIOD]


def _diverges(sizes: Sequence[float]) -> bool:
    doubled = (all(now >= 2 * before > 0 for before, now in _pairs(w)) for w in _windows(sizes))
    return any(size > 1e8 for size in sizes[PERIOD::PERIOD]) or any(doubled)


def _windows(values: Sequence[float], period: int = PERIOD) -> Iterator[Sequence[float]]:
    """The last five values at each check."""
    ends = range(PERIOD if period > 1 else 4, len(values), period)
    return (values[end - 4 : end + 1] for end in ends)


def _periods(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[i : i + PERIOD] for i in range(0, len(values) - PERIOD + 1, PERIOD))


def _pairs(values: Sequence[T]) -> list[tuple[T, T]]:
    return list(pairwise(values))


# ---- AutoTrainer

VANISH, FIRST, EXPLODE, DEAD = 1e-3, 1e-4, 70.0, 0.7  # beta_1, beta_2, beta_3, gamma of its default_param
SWING, SWINGS, RISE, GOOD = 0.03, 0.2, 0.01, 0.7  # zeta, eta, delta, Theta
PARTS, EVERY, JUDGED = 10, 3, 0.3  # epochs here, epochs between checks, share of the run before it judges


def autotrainer(r: Recorded) -> list[str]:
    """Problems among "explode", "relu", "vanish", "not_converge", "unstable" that its monitor would name.

    Ten equal parts of the run stand for epochs, and the monitor checks after every third. It uses the
    gradients of the last step of a part. Without an accuracy, the share by which the loss has fallen since
    the first part replaces it. There is no validation, so the two accuracies it needs are the same here.
    """
    bounds = [round(len(r.losses) * part / PARTS) for part in range(PARTS + 1)]
    losses = [fmean(r.losses[a:b]) for a, b in _pairs(bounds) if b > a]
    scores = _scores(r, bounds, losses)
    if not all(map(math.isfinite, losses)) or any(loss >= 1e5 for loss in losses) or not r.params_finite:
        return ["explode"]
    poor = slow = unstable = False
    seen: Counter[str] = Counter()
    for part in range(0, len(losses), EVERY):
        seen.update(_gradient_problems(r, (part + 1) / len(losses)))
        if part + 1 >= JUDGED * PARTS:
            so_far = scores[: part + 1]
            poor |= max(so_far) < GOOD
            slow |= max((now - before for before, now in _pairs(so_far)), default=0.0) < RISE
            unstable |= _swings(so_far) >= SWINGS * len(so_far)
        if poor or slow:
            problems = [problem for problem in ("relu", "explode", "vanish") if seen[problem]]
            if problems or slow:
                return problems[:1] or ["not_converge"]
        elif unstable:
            return ["unstable"]
    return []


def _scores(r: Recorded, bounds: Sequence[int], losses: Sequence[float]) -> list[float]:
    accuracies = [r.accuracies[a:b] for a, b in _pairs(bounds) if b > a]
    if accuracies and all(part and not any(map(math.isnan, part)) for part in accuracies):
        return [fmean(part) for part in accuracies]
    first = abs(losses[0]) if losses and losses[0] else 1.0
    return [(losses[0] - loss) / first for loss in losses]


def _gradient_problems(r: Recorded, share: float) -> list[str]:
    """Problems of the gradients of the step at this share of the run."""
    at = {
        name: steps[max(0, math.ceil(len(steps) * share) - 1)].gradient
        for name, steps in r.steps.items()
        if steps
    }
    gradients = {name: g for name, g in at.items() if g is not None}
    sizes = {name: math.prod(r.starts[name].shape) for name in gradients}
    norms = [g.norm for name, g in gradients.items() if len(r.starts[name].shape) >= 2]
    if not norms:
        return []
    ratio = norms[0] / norms[-1] if norms[-1] else math.nan
    zeros = sum(g.zeros * sizes[name] for name, g in gradients.items()) / sum(sizes.values())
    problems = {
        "vanish": ratio < VANISH and norms[0] < FIRST,
        "explode": ratio > EXPLODE,
        "relu": zeros >= DEAD,
    }
    return [problem for problem, is_there in problems.items() if is_there]


def _swings(scores: Sequence[float]) -> int:
    """Pairs of a local maximum and minimum that are at least `SWING` apart."""
    around = list(zip(scores, scores[1:], scores[2:], strict=False))
    tops = [b for a, b, c in around if b >= a and b >= c]
    bottoms = [b for a, b, c in around if b <= a and b <= c]
    return sum(top - bottom >= SWING for top, bottom in zip(tops, bottoms, strict=False))


# ---- all three tools


@dataclass(frozen=True)
class Baseline:
    """One tool: the names of its rules that fire, and the source that documents them."""

    name: str
    source: str
    fired: Callable[[Recorded], list[str]]


def _of_rules(*rules: Rule) -> Callable[[Recorded], list[str]]:
    return lambda r: [rule.__name__ for rule in rules if rule(r)]


SAGEMAKER = _of_rules(
    vanishing_gradient, exploding_tensor, all_zero, unchanged_tensor, weight_update_ratio,
    loss_not_decreasing, dead_relu, saturated_activation, poor_weight_initialization, overfit,
)  # fmt: skip
THEDEEPCHECKER = _of_rules(
    features_constant, features_unnormalized, labels_unbalanced, poor_initial_weights, poor_initial_bias,
    poor_initial_loss, numerical_instability, untrained_parameter, negative_weights, dead_weights,
    diverging_parameters, diverging_gradients, vanishing_gradients, dead_activations, saturated_activations,
    unstable_activations, constant_output, stagnated_loss, diverging_loss, fluctuating_loss,
)  # fmt: skip

# SageMaker: omits TensorVariance, whose limits are missing from the page ("xxx"), and the rules that need two
# training runs, or labels in collections of the service. The stored pages are from 2020 to 2024.
# TheDeepChecker: its routines are in deep_checker/hooks.py and checkers.py (Braiek & Khomh 2023,
# doi:10.1145/3529318, arXiv 2204.00694). The file with its defaults could not be found; the limits here are
# from a torch port of these routines for reinforcement learning, which has their names and numbers. Omits
# rules with a limit in neither of them (size of updates, correlation of loss and metric, regularization),
# rules that train again (fit of a single batch, finite differences, corrupted labels, augmentation), and the
# range of activations, which torch's modules cannot leave.
# AutoTrainer: Zhang, Zhai, Ma, Shen, ICSE 2021; utils/monitor.py and default_param in utils/utils.py.
BASELINES = (
    Baseline(
        "SageMaker Debugger",
        "https://docs.aws.amazon.com/sagemaker/latest/dg/debugger-built-in-rules.html",
        SAGEMAKER,
    ),
    Baseline("TheDeepChecker", "https://github.com/thedeepchecker/thedeepchecker", THEDEEPCHECKER),
    Baseline("AutoTrainer", "https://github.com/shiningrain/AUTOTRAINER", autotrainer),
)
