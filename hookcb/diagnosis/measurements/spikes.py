"""Spikes: batches whose loss is far above those before them, with what was there before and after."""

import math
import os
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from hookcb.core import graph
from hookcb.core.batch import batch_size, parts
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.group_rates import GroupRates
from hookcb.diagnosis.measurements.loss import first_float, n_classes_of
from hookcb.diagnosis.measurements.loss_terms import Term, main_term, read_terms
from hookcb.diagnosis.measurements.samples import flat, spread
from hookcb.diagnosis.measurements.shifts import Shifts
from hookcb.diagnosis.measurements.step_scales import OfSteps, StepScales
from hookcb.diagnosis.measurements.targets import Targets
from hookcb.diagnosis.measurements.update_sizes import UpdateSizes
from hookcb.diagnosis.rules import SIGMA, median
from hookcb.diagnosis.run import Run
from hookcb.records.store import Arriving, read_numbers
from hookcb.training.checkpoint.callback import Checkpoint

SPIKE = 6.0  # standard deviations above the usual loss
WINDOW, NEAR, MIN_BEFORE = 128, 4, 32  # batches whose noise counts, the last of them, and how few suffice
NOISE = SIGMA / math.sqrt(2)  # a difference of two losses has the noise of both
CALM, N_AFTER = 3, 128  # batches in a row that end a spike, and after which it has not healed
N_RATES, N_KEPT, N_SHARED = 64, 32, 8  # steps whose rates are kept; spikes that are, and of each rank
MAX_WAITING = 4_096  # losses on a device that is no GPU
N_WORST, N_ODD = 3, 16  # samples that are named; batches after a spike that may be odd as well
MIN_SQUARE, ROUNDING = 1e-30, 0.01  # second moment that is no rounded zero; error of the ratio by rounding
MIN_INPUTS, TINY = 8, 1e-12  # inspected batches with which inputs are compared, and their smallest size
ADAMS = {torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam}
INTEGERS = {torch.int32, torch.int64}
WIDE_ENOUGH = {torch.float32, torch.float64}
MAIN = 0.5  # share of the loss that those of the samples make up at least, as it may have other terms


@dataclass(slots=True)
class Spike:
    """A spike of the loss.

    Attributes:
        step: number of its first batch.
        epoch, batch: that batch as the loop counts it, both from 0.
        value, middle, sigma: its loss, and the usual loss and the deviation of its noise before it.
        after: losses of the batches after it, as long as it lasts, at most 128.
        lasted: number of batches until three in a row are usual again; None if that was not seen.
        rates: steps before it and their learning rates, the newest last.
        jump: see `GroupRates.before`, of the 64 steps before it; () if there was none.
        worst: indices and losses of the samples of its first batch with the largest losses; () if unknown.
        n_samples, typical: number of these samples, and the median of their losses.
        ratio: largest ratio of Adam's |m| to what its v allows, over sampled elements of all parameters,
            before the step of its first batch; NaN if unknown.
        inputs: largest magnitude of the inputs of its first batch, relative to those of all batches that were
            inspected before it; NaN if unknown.
        n_values: number of different values in the integer inputs of its first batch, and the least in those
            of inspected batches before it that are no larger; () if unknown.
        relabeled: numbers of its samples that come again, and of those with another target, see `Relabels`.
        odd: see `Shifts.odd`.
        updates: see `UpdateSizes.before`.
        limit_change: see `StepScales.limit_change`, of the 64 steps before it; () if there was none.
        rescaled: see `StepScales.rescaled`, likewise.
        norms: norms of the gradients before clipping, with their steps, of up to 32 before it.
        scales: scales of a GradScaler in the backwards before it, likewise.
        ranks: those that have seen it, if there are several.
    """

    step: int
    epoch: int
    batch: int
    value: float
    middle: float
    sigma: float
    after: list[float] = field(default_factory=list)
    lasted: int | None = None
    rates: tuple[tuple[int, float], ...] = ()
    jump: tuple[Any, ...] = ()
    worst: tuple[tuple[int, float], ...] = ()
    n_samples: int = 0
    typical: float = math.nan
    ratio: float = math.nan
    inputs: float = math.nan
    n_values: tuple[int, ...] = ()
    relabeled: tuple[int, int] = (0, 0)
    odd: str = ""
    updates: float = math.nan
    limit_change: tuple[Any, ...] = ()
    rescaled: tuple[Any, ...] = ()
    norms: OfSteps = ()
    scales: OfSteps = ()
    ranks: tuple[int, ...] = ()

    @property
    def limit(self) -> float:
        """Loss up to which it would have been noise."""
        return self.middle + SPIKE * self.sigma

    @property
    def excess(self) -> float:
        """Standard deviations of the noise by which its first loss is above the usual one."""
        return (self.value - self.middle) / self.sigma


class Values(NamedTuple):
    """Numbers of elements in a sample of up to 1,024, and of different values among them."""

    n: int
    n_different: int


class SpikeFinder:
    """Finds spikes in losses that are added one by one, in about a microsecond each.

    The usual loss is the median of the last 32 losses, or of the last 4 if that is higher, so that a slow
    rise is no spike. The noise is that of the differences between losses in a row, up to 128, so that a slow
    fall does not count: 1.4826 times their median size, divided by √2. A spike is a loss above the usual one
    by six times the noise. It lasts until three losses in a row are below that limit; only then do losses
    count as usual again. After 128 batches the new level is taken for the usual one.

    Source: P. J. Huber, "Robust Statistics", 1981, for the median absolute deviation; J. von Neumann et al.,
    "The mean square successive difference", 1941, for noise around a trend.
    """

    def __init__(self) -> None:
        self.n = 0  # of all spikes
        self.found: list[Spike] = []  # in order; of more than 32 those that stand out most
        self._open: Spike | None = None
        self._forget()

    @property
    def under_way(self) -> Spike | None:
        """The spike that lasts; None if there is none."""
        return self._open

    def _forget(self) -> None:
        """Forgets the losses so far."""
        self._levels, self._noise = _Median(MIN_BEFORE), _Median(WINDOW)
        self._last = deque[float](maxlen=NEAR)

    def add(self, value: float, step: int, epoch: int = 0, batch: int = 0) -> Spike | None:
        """Adds the loss of the next batch; returns the spike that begins with it."""
        if self._open is not None:
            self._continue(self._open, value)
            return None
        if not math.isfinite(value):
            return None
        if len(self._levels) >= MIN_BEFORE:
            middle = self._levels.middle()
            sigma = max(NOISE * self._noise.middle(), 1e-3 * abs(middle), 1e-12)
            if value > middle + SPIKE * sigma:
                middle = max(middle, median(self._last))
                spike = Spike(step, epoch, batch, value, middle, sigma)
                if value > spike.limit:
                    self._keep(spike)
                    return spike
        if self._last:
            self._noise.add(abs(value - self._last[-1]))
        self._levels.add(value)
        self._last.append(value)
        return None

    def _keep(self, spike: Spike) -> None:
        self.n += 1
        self._open = spike
        self.found.append(spike)
        if len(self.found) > N_KEPT:
            self.found.remove(min(self.found[:-1], key=lambda kept: kept.excess))

    def _continue(self, spike: Spike, value: float) -> None:
        spike.after.append(value)
        if all(x <= spike.limit for x in spike.after[-CALM:]) and len(spike.after) >= CALM:
            spike.lasted, self._open = len(spike.after) - CALM + 1, None
        elif len(spike.after) == N_AFTER:
            self._open = None
            self._forget()


class _Median:
    """The median of the last `most` numbers that were added."""

    def __init__(self, most: int) -> None:
        self._most, self._numbers, self._in_order = most, deque[float](), list[float]()

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, x: float) -> None:
        self._numbers.append(x)
        insort(self._in_order, x)
        if len(self._numbers) > self._most:
            del self._in_order[bisect_left(self._in_order, self._numbers.popleft())]

    def middle(self) -> float:
        n = len(self._in_order)
        return (self._in_order[(n - 1) // 2] + self._in_order[n // 2]) / 2


class Spikes(Measurement):
    """Follows the loss of each batch, so that a spike is known at any length of the training.

    On a CPU a spike is noticed in its batch, and the losses of its samples are computed. On a GPU losses
    arrive sixteen at a time, and nothing waits for them; the samples are not known there. No batch is
    inspected because of a spike: other faults read inspected batches as if chosen by their number.
    """

    cadence = EVERY
    uses = (Curves, GroupRates, Shifts, StepScales, Targets, UpdateSizes)

    def __init__(self) -> None:
        self._finder = SpikeFinder()
        self._rates = deque[tuple[int, float]](maxlen=2 * N_RATES)
        self._arriving = Arriving[tuple[int, int, int]](MAX_WAITING)  # losses by step, epoch and batch
        self.n, self.found = 0, list[Spike]()
        self._inputs: list[float] = []  # the largest of each inspected batch
        self._values: list[Values] = []  # of each inspected batch, if they are integers
        self._betas: dict[int, Any] = {}  # of the beginning, by id of the optimizer
        self._new: Spike | None = None  # in this batch
        self.folder = ""  # of the loop's Checkpoint, from which a batch can be run again

    @property
    def under_way(self) -> Spike | None:
        """See `SpikeFinder`, as far as losses have arrived."""
        return self._finder.under_way

    def on_model(self, run: Run) -> None:
        folders = [cb.folder for cb in run.loop.cbs if isinstance(cb, Checkpoint)]
        self.folder = os.path.relpath(folders[0]) if folders else ""

    def on_batch(self, run: Run) -> None:
        if not run.looking:
            return
        if (size := largest_input(run.loop.xb)) is not None:
            self._inputs.append(size)
        if (values := values_in(run.loop.xb)) is not None:
            self._values.append(values)

    def on_loss(self, run: Run) -> None:
        loop, value = run.loop, run.measured(Curves).last_loss
        place = run.step, loop.epoch, loop.iter
        if not isinstance(value, Tensor):
            if value is not None:
                self._see(run, value, place, is_here=True)
            return
        self._arriving.add(place, value)
        for at, number in self._arriving.there():
            self._see(run, number, at)

    def on_step(self, run: Run) -> None:
        spike, self._new, opt = self._new, None, run.loop.opt
        if spike is None or opt is None:
            return
        if self._betas.get(id(opt)) == betas_of(opt):
            spike.ratio = excess_of_moments(opt)

    def on_between(self, run: Run) -> None:
        if (opt := run.loop.opt) is not None:
            if id(opt) not in self._betas:
                self._betas[id(opt)] = betas_of(opt)
            self._rates.append((run.step, run.measured(Curves).last_rate))

    def _see(self, run: Run, value: float, place: tuple[int, int, int], is_here: bool = False) -> None:
        if (spike := self._finder.add(value, *place)) is None:
            return
        spike.rates = tuple(x for x in self._rates if x[0] < spike.step)[-N_RATES:]
        spike.jump = tuple(run.measured(GroupRates).before(spike.step, N_RATES) or ())
        _add_scales(spike, run.measured(StepScales))
        if is_here:
            self._new = spike
            if len(self._inputs) >= MIN_INPUTS and (size := largest_input(run.loop.xb)) is not None:
                spike.inputs = size / max(*self._inputs, TINY)
            if (now := values_in(run.loop.xb)) is not None:
                others = [x.n_different for x in self._values if x.n <= now.n]
                spike.n_values = (now.n_different, min(others)) if len(others) >= MIN_INPUTS else ()
            spike.updates = run.measured(UpdateSizes).before(spike.step)
            spike.relabeled = run.measured(Shifts).relabeled(run)
            _add_samples(spike, run)

    def tell(self, run: Run) -> None:
        for at, number in self._arriving.rest():
            self._see(run, number, at)
        self.n = self._finder.n
        self.found = [_as_read(spike) for spike in self._finder.found]
        for spike in self.found:
            n_after = len(spike.after) if spike.lasted is None else spike.lasted - 1
            spike.odd = run.measured(Shifts).odd(spike.step, min(n_after, N_ODD))

    def freeze(self) -> None:
        self._finder, self._arriving = SpikeFinder(), Arriving(MAX_WAITING)

    def state(self, run: Run) -> list[dict[str, Any]]:
        largest = sorted(self.found, key=lambda spike: -spike.excess)[:N_SHARED]
        return [asdict(spike) for spike in sorted(largest, key=lambda spike: spike.step)]

    def merge(self, run: Run, of_ranks: Sequence[list[dict[str, Any]]], rank: int) -> None:
        """Takes the spikes of all ranks; of one that several have seen, the largest."""
        by_step: dict[int, Spike] = {}
        for rank_of, spikes in enumerate(of_ranks):
            for spike in (Spike(**known) for known in spikes):
                best = max(spike, by_step.get(spike.step, spike), key=lambda x: x.excess)
                ranks = by_step[spike.step].ranks if spike.step in by_step else ()
                by_step[spike.step] = replace(best, ranks=(*ranks, rank_of))
        self.found = [by_step[step] for step in sorted(by_step)]
        self.n = max(self.n, len(self.found))


def _add_scales(spike: Spike, scales: StepScales) -> None:
    """Adds what the gradients of the steps before a spike were multiplied by."""
    spike.limit_change = tuple(scales.limit_change(spike.step, N_RATES) or ())
    spike.rescaled = tuple(scales.rescaled(spike.step, N_RATES) or ())
    spike.norms, spike.scales = scales.norms(spike.step), scales.scales(spike.step)


def _as_read(spike: Spike) -> Spike:
    """A copy of a spike with plain numbers."""
    of_steps = spike.norms, spike.scales
    norms, scales = (
        tuple(zip([step for step, _ in x], read_numbers([value for _, value in x]), strict=True))
        for x in of_steps
    )
    rescaled = (spike.rescaled[0], *read_numbers([*spike.rescaled[1:]])) if spike.rescaled else ()
    return replace(spike, after=spike.after[:], norms=norms, scales=scales, rescaled=rescaled)


def _add_samples(spike: Spike, run: Run) -> None:
    """Adds the losses of the samples of the current batch, if they make up most of its loss."""
    of_sample = sample_losses(run.loop, run.measured(Targets).of_batch(run))
    if of_sample is None or not MAIN * spike.value < float(of_sample.nanmean()) < spike.value / MAIN:
        return
    spike.worst = worst_of(of_sample)
    spike.n_samples, spike.typical = int(of_sample.isfinite().sum()), float(of_sample.nanmedian())


def worst_of(of_sample: Tensor) -> tuple[tuple[int, float], ...]:
    """Indices and losses of up to three samples with the largest losses."""
    largest, places = of_sample.nan_to_num(-math.inf).topk(min(N_WORST, len(of_sample)))
    return tuple(zip(places.tolist(), largest.tolist(), strict=True))


def sample_losses(loop: Any, targets: Any) -> Tensor | None:
    """Mean loss of each sample of the current batch, `(N,)`, once its loss is there; None if unknown.

    Known are cross-entropy, mean squares and binary cross-entropy of torch, without weights; other terms of
    the loss do not count. A sample without targets that count is NaN.

    Args:
        loop: the loop, during `after_loss`.
        targets: those of the batch, for a watched loop, which shows its loss when the backward has passed it.
    """
    term = main_term(read_terms(loop.loss_node))
    if term is None or term.has_weights:
        return None
    x, y = (graph.read_saved(term.node, name) for name in ("self", "target"))
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        of_each = element_losses(term, x.detach(), y, True)
    else:
        of_each = _losses_of_output(term, loop, targets)
    if of_each is None or not of_each.ndim:
        return None
    n = batch_size(loop.xb)
    n = n if n and len(of_each) % n == 0 else len(of_each)
    scale = term.scale if math.isfinite(term.scale) else 1.0  # as of a sum over a number that is not known
    return of_each.reshape(n, -1).nanmean(1) * scale if n > 1 else None


def _losses_of_output(term: Term, loop: Any, targets: Any) -> Tensor | None:
    """Losses of the elements by the output of the model, which the loop may have reshaped."""
    x, y = first_float(loop.pred), next((y for _, y in parts(targets) if isinstance(y, Tensor)), None)
    if x is None or y is None:
        return None
    n_classes = term.given_shape[1] if len(term.given_shape) > 1 else 0
    if x.shape[-1:] == (n_classes,) and x.numel() == n_classes * y.numel():
        x, y = x.reshape(-1, n_classes), y.reshape(-1)
    return element_losses(term, x.detach(), y, False)


@torch.no_grad()
def element_losses(term: Term, x: Tensor, y: Tensor, are_logarithms: bool) -> Tensor | None:
    """Losses of the elements that a loss compares, `(N, …)`, NaN for ignored ones; None if unknown.

    Args:
        term: the loss.
        x: what the model gives, `(N, …)`: for cross-entropy scores, `(N, C, …)` or `(N, …, C)`, or their
            logarithms of probabilities, `(N, C, …)`, as `are_logarithms` says.
        y: targets, `(N, …)`: classes, or numbers of the shape of `x`.
        are_logarithms: see `x`.
    """
    if term.kind == "cross-entropy" and not y.is_floating_point() and n_classes_of(x, y):
        is_last = not are_logarithms and x.shape[:-1] == y.shape
        x = x.float().movedim(-1, 1) if is_last else x.float()
        log_p = x if are_logarithms else x.log_softmax(1)
        is_ignored = y == term.ignored
        picked = -log_p.gather(1, y.long().masked_fill(is_ignored, 0).unsqueeze(1)).squeeze(1)
        return picked.masked_fill(is_ignored, math.nan)
    if x.shape != y.shape:
        return None
    if term.kind == "mse":
        return (x.float() - y).square()
    if term.kind == "binary cross-entropy" and term.takes == "scores":
        return F.binary_cross_entropy_with_logits(x.float(), y.float(), reduction="none")
    return None


def largest_input(xb: Any) -> float | None:
    """Largest magnitude of the first float input, on the CPU; None if there is none."""
    x = first_float(xb)
    if x is None or not x.is_cpu or x.layout is not torch.strided or not x.numel():
        return None
    return max(abs(float(bound)) for bound in torch.aminmax(x.detach()))


def values_in(xb: Any) -> Values | None:
    """Numbers of elements and values in a sample of the first integer input; None if unknown."""
    for _, x in parts(xb):
        if isinstance(x, Tensor) and x.dtype in INTEGERS:
            if not x.is_cpu or x.layout is not torch.strided or not x.numel():
                return None
            sample = spread(flat(x))
            return Values(len(sample), len(torch.unique(sample)))
    return None


def betas_of(opt: Optimizer) -> list[Any]:
    """Coefficients of the moments of each group, None for those that have none."""
    return [group.get("betas") for group in opt.param_groups]


@torch.no_grad()
def excess_of_moments(opt: Optimizer) -> float:
    """Largest ratio of |exp_avg| to what its exp_avg_sq allows, for torch's Adam; NaN if nothing is known.

    m = (1 - β₁) Σ β₁ⁱ gᵢ and v = (1 - β₂) Σ β₂ⁱ gᵢ², from zero, give |m| ≤ C √v by the inequality of Cauchy
    and Schwarz, C = (1 - β₁) / √((1 - β₂)(1 - β₁²/β₂)) if β₁² < β₂. Sampled are up to 1,024 elements of each
    parameter, on the CPU and in float32 or float64; a v that may have been rounded to zero does not count.
    """
    found = math.nan
    for group in opt.param_groups if type(opt) in ADAMS else ():
        first, second = group.get("betas") or (0.0, 0.0)
        if not (isinstance(first, float) and isinstance(second, float) and first**2 < second < 1):
            continue
        most = (1 - first) / math.sqrt((1 - second) * (1 - first**2 / second))
        for p in group["params"]:
            m, v = (opt.state.get(p, {}).get(key) for key in ("exp_avg", "exp_avg_sq"))
            if _can_be_read(m) and _can_be_read(v) and m.shape == v.shape:
                m, v = spread(flat(m)), spread(flat(v))
                ratios = (m.abs() / (most * v.sqrt()))[v > MIN_SQUARE]
                found = max(ratios.max().item(), found) if len(ratios) else found
    return found / (1 + ROUNDING)


def _can_be_read(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cpu and x.layout is torch.strided and x.dtype in WIDE_ENOUGH
