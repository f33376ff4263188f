"""Limits, spans and trends of recorded numbers, which checks share."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from hookcb.core.text import join_names
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.tokens import Tokens
from hookcb.diagnosis.run import CONVERGED, WINDOW, Layer, Param, Run, Series, Span

LATEST = 5  # records in a median: a single batch says little
MIN_UNITS = 4  # of a layer, and inputs of each, to compare them
MAX_POINTS = 80  # of a robust slope, which uses all pairs
SIGMA = 1.4826  # standard deviation / median absolute deviation of normally distributed numbers
MAX_SATURATED = 0.5  # share of units at the flat ends of tanh or sigmoid
LEARNED = 0.8  # share of the first loss that is left; below it, training does its work
WARMING = 0.95  # share of the last learning rate; if it was lower ten records ago, it is still rising

MAX_OF_CONSTANT = 0.98  # of the loss of the best constant prediction, for a model that learns
MIN_RANGE = 0.01  # between the losses of a constant and of a perfect prediction, as a share of the first
MAX_NOISE = 0.2  # standard error of the difference between two mean losses of a constant, as a share of it
MIN_BATCHES = 50  # to tell a flat or rising loss
MIN_BATCHES_OF_TOKENS = 200  # for a language model, which learns the shares of tokens first, and waits there
FLAT, NEAR_GUESS = 0.95, 0.8  # shares of the first loss and of the loss of guessing
CONFIDENCE = 3.0  # standard deviations
# losses before and after a step, and standard errors by which the later ones are higher
N_BEFORE, MIN_BEFORE, N_AFTER, SIGMAS = 64, 32, 16, 6.0

MAX_FIRST_UPDATE, N_FIRST = 0.2, 10  # in the first records; Adam with lr 1e-2 begins with 0.1 to 0.2
MAX_UPDATE, N_LARGE, N_WINDOW = 0.05, 5, 8  # later, in 5 of 8 records
VISIBLE_UPDATE = 1e-6  # update ratio that shows in a weight
USUAL_UPDATE = 1e-3  # of a good learning rate
USUAL_INIT = 3**-0.5  # times 1/sqrt(fan in): the std with which torch.nn.Linear and Conv begin
MAX_RISE = 0.5  # of the loss, as a share of the loss at the beginning
# RMS of a layer's gradient / the larger of those of the median and of the last layer; healthy trainings came
# up to 600, in the first steps of branches that begin with zeros
MAX_EXCESS = 1e3
RECURRENT = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")


def records_needed(run: Run) -> int:
    """Number of records in a median: five, or one after a single backward."""
    return 1 if run.is_one_backward else LATEST


def finite(values: Iterable[float]) -> list[float]:
    """The values that are neither NaN nor infinite."""
    return [x for x in values if math.isfinite(x)]


def median(values: Iterable[float]) -> float:
    """Median of the finite values; NaN if there is none."""
    numbers = finite(values)
    return statistics.median(numbers) if numbers else math.nan


def ratio(a: float, b: float) -> float:
    """`a / b`, NaN unless `b` is above zero."""
    return a / b if b > 0 else math.nan


def format_factor(x: float) -> str:
    """Factor as text: "14,000", "2e+08"."""
    return f"{x:.2g}" if x < 10 or x >= 1e6 or not math.isfinite(x) else f"{x:,.0f}"


def before(series: Series, step: float) -> Series:
    """The finite values of the steps before `step`, which may be infinite."""
    return series_of((at, x) for at, x in series if at < step and math.isfinite(x))


def series_of(pairs: Iterable[tuple[int, float]]) -> Series:
    """Series of steps and their numbers."""
    kept = list(pairs)
    return Series([step for step, _ in kept], [x for _, x in kept])


def trailing(series: Series, holds: Callable[[float], bool], n: int = LATEST) -> Span | None:
    """Run of records up to the last one in which every median of `n` in a row satisfies `holds`.

    A single unusual record does not break the run.
    """
    start = len(series)
    for i in range(len(series) - n, -1, -1):
        if not holds(statistics.median(series.values[i : i + n])):
            break
        start = i
    if start == len(series):
        return None
    # the first median may begin with records that do not hold yet
    first = next((i for i in range(start, len(series)) if holds(series.values[i])), start)
    return Span(series.steps[first], series.steps[-1], len(series) - start)


def persistent(series: Series, holds: Callable[[float], bool], n: int, window: int) -> Span | None:
    """First run of at most `window` records in which `n` satisfy `holds`; None if there is none."""
    holding = [i for i, x in enumerate(series.values) if holds(x)]
    for first, last in zip(holding, holding[n - 1 :], strict=False):
        if last - first < window:
            return Span(series.steps[first], series.steps[last], n)
    return None


def persistent_max(series: Series, n: int, window: int) -> float:
    """Largest number that `n` of `window` records in a row reach: the one that `persistent` compares."""
    windows = (sorted(series.values[i : i + window]) for i in range(len(series) - n + 1))
    return max((values[-n] for values in windows), default=math.nan)


def slope(series: Series, sigmas: float) -> tuple[float, float]:
    """Confidence interval of a robust slope; NaN for fewer than two points.

    The points are at most 80 means of records in a row, so a long series counts as a whole. The interval has
    half a width of so many standard deviations of Kendall's statistic.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968.
    """
    size = max(1, math.ceil(len(series) / MAX_POINTS))
    points = [
        (statistics.fmean(series.steps[i : i + size]), statistics.fmean(series.values[i : i + size]))
        for i in range(0, len(series), size)
    ]
    n = len(points)
    if n < 2:
        return math.nan, math.nan
    x, y = torch.tensor(points, dtype=torch.float64, device="cpu").T
    i, j = torch.triu_indices(n, n, 1, device="cpu")
    slopes = ((y[j] - y[i]) / (x[j] - x[i])).sort().values
    half = sigmas * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    low, high = math.floor(len(slopes) / 2 - half), math.ceil(len(slopes) / 2 + half)
    return slopes[max(low, 0)].item(), slopes[min(high, len(slopes) - 1)].item()


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Median and robust standard deviation, 1.4826 times the median absolute deviation.

    Source: P. J. Huber, "Robust Statistics", 1981.
    """
    numbers = finite(values)
    middle = median(numbers)
    return middle, SIGMA * median(abs(x - middle) for x in numbers)


class Rise(NamedTuple):
    """Rise of the loss at a step: median before, mean after, and whether half of it is gone in the end."""

    before: float
    after: float
    has_healed: bool


def rise_of_loss(run: Run, step: int, n: int = N_AFTER, min_before: int = MIN_BEFORE) -> Rise | None:
    """Rise of the loss after a step that is more than noise; None if there is none, or too little is known.

    The mean of the next `n` losses is above the median of the 64 up to it, or of `min_before` or more, by
    six standard errors.
    """
    losses = [(at, x) for at, x in run.loss if math.isfinite(x)]
    before = [x for at, x in losses if step - N_BEFORE <= at < step]
    later = [x for at, x in losses if at > step]
    after = later[:n]
    if len(before) < min_before or len(after) < n // 2:
        return None
    middle, sigma = spread(before)
    error = max(sigma, 1e-3 * abs(middle)) * math.sqrt(1 / len(before) + 1 / len(after))
    if (now := statistics.fmean(after)) <= (limit := middle + SIGMAS * error):
        return None
    high = max(limit, (middle + now) / 2)
    has_healed = len(later) >= 2 * n and statistics.fmean(later[-n:]) <= high
    return Rise(middle, now, has_healed)


def place(param: Param) -> tuple[float, int]:
    """Sort key for the order of execution; parameters of modules with an unknown place come first."""
    return (-1 if param.place_of_layer is None else param.place_of_layer), param.place


def weights(run: Run) -> list[Param]:
    """Weights of comparable size, from the input to the head."""
    return sorted((p for p in run.params.values() if p.is_weight), key=place)


def in_order(run: Run) -> list[Layer]:
    """Layers in the order of execution."""
    return sorted(run.layers.values(), key=lambda layer: layer.place)


def place_of_head(run: Run) -> float:
    """Place of the last layer with weights; of the last layer if no place is known."""
    places = [p.place_of_layer for p in weights(run) if p.place_of_layer is not None]
    return max(places or [layer.place for layer in run.layers.values()], default=math.inf)


def loss_left(run: Run, first: float) -> float:
    """Final loss, the median of ten, as a share of `first`; NaN if unknown.

    For a negative loss, which has no share: 1 if it has not changed, 0 if it has fallen by its own size.
    """
    last = median(run.loss.values[-WINDOW:])
    return 1 + (last - first) / abs(first) if math.isfinite(first) and first != 0 else math.nan


def does_well(run: Run) -> bool:
    """Whether the loss ends below a fifth of the loss of the best constant prediction, an R² of 0.8."""
    loss = run.measured(Loss)
    return median(run.loss.values[-WINDOW:]) - loss.perfect < CONVERGED * (loss.constant - loss.perfect)


def rates(run: Run) -> Series:
    """The learning rate at each batch if that is known, else at each record of the optimizer."""
    return run.lr if len(run.lr) else run.steps.get("lr", Series())


def is_warming_up(run: Run) -> bool:
    """Whether the learning rate is still rising at the end of the record."""
    values = finite(rates(run).values)
    return len(values) > WINDOW and values[-1] >= max(values) and values[-1 - WINDOW] < WARMING * values[-1]


def falls_slowly(run: Run) -> bool:
    """Whether the loss falls, but by less than 5 %, and is still above 0.8 of the loss of guessing.

    That is typical of a slow training, and of one that memorizes labels that do not follow from the inputs.
    """
    is_long = len(finite(run.loss.values)) >= MIN_BATCHES and math.isfinite(run.first_loss)
    if not is_long or not guesses(run):
        return False
    lowest, limit = lowest_loss(run)
    return lowest > limit and falls_by(run.loss)[0] > 0


def lowest_loss(run: Run) -> tuple[float, float]:
    """Minimum of the smoothed loss after the first ten batches, and the limit below which it has fallen."""
    return min(run.smooth_loss().values[WINDOW:]), run.first_loss - (1 - FLAT) * abs(run.first_loss)


def falls_by(loss: Series) -> tuple[float, float]:
    """Least and greatest plausible fall over the whole series, within three standard deviations."""
    low, high = slope(before(loss, math.inf), CONFIDENCE)
    n_steps = loss.steps[-1] - loss.steps[0]
    return -high * n_steps, -low * n_steps


def guesses(run: Run) -> bool:
    """Whether the final loss is at least 0.8 of the loss of guessing; False if that is unknown."""
    return median(run.loss.values[-WINDOW:]) >= NEAR_GUESS * run.measured(Loss).guess > 0


def loss_of_constant(run: Run, n_batches: int = 0) -> tuple[float, float]:
    """Mean loss of the last tenth of the batches, and its ratio to the loss of the best constant prediction.

    A penalty on parameters is left out of the loss. For the ratio, the loss of a perfect prediction is
    subtracted from both. NaN for fewer than `n_batches`, by default 50, or 200 of tokens, since the learning
    rate has reached its largest value; the ratio also if the loss of a constant is unknown, or that of a
    perfect prediction is as large.
    """
    values = finite(_without_penalty(run).values)
    full = max(finite(rates(run).values), default=0.0)
    warm = next((step for step, rate in rates(run) if rate >= full), 0)
    n_warm = sum(step >= warm for step in run.loss.steps)
    if min(len(values), n_warm) < (n_batches or batches_to_learn(run)):
        return math.nan, math.nan
    last = statistics.fmean(values[-n_last(len(values)) :])
    return last, ratio_to_constant(run, last)


def ratio_to_constant(run: Run, loss: float) -> float:
    """Ratio of a loss to that of the best constant prediction, less that of a perfect prediction each."""
    known = run.measured(Loss)
    above = known.constant - known.perfect
    return (loss - known.perfect) / above if above > MIN_RANGE * known.constant else math.nan


def batches_to_learn(run: Run) -> int:
    """Number of batches after which a model is compared with a constant."""
    return MIN_BATCHES_OF_TOKENS if run.measured(Tokens).has_compared else MIN_BATCHES


def is_trivial(run: Run, n_batches: int = 0) -> bool:
    """Whether the model is no better than a constant, and its loss does not fall fast enough to become it.

    Known after so many batches, by default `batches_to_learn`.
    """
    last, ratio = loss_of_constant(run, n_batches)
    return ratio > MAX_OF_CONSTANT and not is_noisy(run) and not may_become_better(run, last)


def has_learned(run: Run, first: float, share: float = LEARNED) -> bool:
    """Whether the final loss is below this share of `first`, and the model is better than a constant.

    The loss of a language model falls by a third, from ln C to the entropy of the shares of the tokens,
    before the model has learned anything from its input.
    """
    return loss_left(run, first) < share and not is_trivial(run, MIN_BATCHES)


def need_not_fall(run: Run) -> bool:
    """Whether the loss is of no known kind: an objective, as of a policy, need not fall."""
    loss = run.measured(Loss)
    return not loss.kind and math.isnan(loss.guess)


def why_unknown(run: Run, otherwise: str) -> str:
    """Why a loss cannot be compared with that of guessing."""
    kinds = run.measured(Loss).kinds
    return f"the loss is a sum of {len(kinds)}: {join_names(kinds, 4)}" if len(kinds) > 1 else otherwise


def is_noisy(run: Run) -> bool:
    """Whether the targets vary so much between batches that means over few of them cannot be compared.

    So do a few outliers that make up most of a squared error, or one positive in a hundred samples.
    """
    loss = run.measured(Loss)
    noise = loss.noise * math.sqrt(1 / n_last(len(run.loss)) + 1 / loss.n_targets)
    return noise > MAX_NOISE * (loss.constant - loss.perfect)


def n_last(n: int) -> int:
    """Number of batches whose mean is the final loss."""
    return max(WINDOW, n // 10)


def may_become_better(run: Run, last: float) -> bool:
    """Whether as many batches again would bring a loss of `last` below that of a constant."""
    loss = run.measured(Loss)
    limit = loss.perfect + MAX_OF_CONSTANT * (loss.constant - loss.perfect)
    return last - further_fall(_without_penalty(run)) <= limit


def _without_penalty(run: Run) -> Series:
    """The loss without its penalty on parameters, which is interpolated between the batches that show it."""
    known, loss = run.measured(Loss).penalty, run.loss
    if not len(known):
        return loss
    ends = [(loss.steps[0], known.values[0]), *known, (loss.steps[-1], known.values[-1])]
    rest, i = Series(), 0
    for step, x in loss:
        while i < len(ends) - 2 and ends[i + 1][0] < step:
            i += 1
        (first, low), (last, high) = ends[i], ends[i + 1]
        share = (step - first) / (last - first) if last > first else 0.0
        rest.add(step, x - low - share * (high - low))
    return rest


def further_fall(loss: Series) -> float:
    """By how much a loss will at least fall in as many batches again, by its slope over the last half."""
    _, high = slope(_last_half(loss), CONFIDENCE)
    return max(0.0, -high * (loss.steps[-1] - loss.steps[0])) if math.isfinite(high) else 0.0


def expected_fall(run: Run) -> float:
    """By how much the loss will fall in as many batches again, at the median slope of its last half.

    At most by what is left above a perfect prediction; 0 unless the slope is sure to be negative.
    """
    loss = run.loss
    if not further_fall(loss):
        return 0.0
    fall = -statistics.fmean(slope(_last_half(loss), 0.0)) * (loss.steps[-1] - loss.steps[0])
    above = final_loss(run) - run.measured(Loss).perfect
    return min(fall, above) if above > 0 else fall


def final_loss(run: Run) -> float:
    """Mean of the finite ones of the last ten losses; NaN if there are none."""
    return statistics.fmean(finite(run.loss.values[-WINDOW:]) or [math.nan])


def _last_half(loss: Series) -> Series:
    return before(Series(loss.steps[len(loss) // 2 :], loss.values[len(loss) // 2 :]), math.inf)


def gradient_sizes(param: Param, until: float) -> Series:
    """RMS of its gradient before a step, without records of zeros: an expert is not used in each batch."""
    return series_of((step, x) for step, x in before(param.series("rms"), until) if x > 0)


def updates(param: Param, until: float = math.inf) -> Series:
    """Update ratios before a step, ‖ΔW‖ / ‖W‖, with ‖W‖ at least the usual norm of that shape.

    A weight that begins near zero first grows by many times its own size, which is not a large step.
    """
    norms = dict(param.series("weight_norm"))
    usual = USUAL_INIT * math.sqrt(max(1, param.shape[0]))
    sizes = Series()
    for step, x in before(param.series("update_ratio"), until):
        # the norm before the step, which is mostly at a right angle to the weight
        previous = norms.get(step, math.nan) / math.hypot(1, x)
        sizes.add(step, x * previous / usual if previous < usual else x)
    return sizes


def has_large_updates(param: Param) -> bool:
    """Whether 5 of 8 records in a row have an update above 0.05."""
    return persistent(updates(param), lambda x: x > MAX_UPDATE, N_LARGE, N_WINDOW) is not None


def first_update(run: Run) -> float:
    """Largest update of a weight in the first steps, up to the first one after which the loss is higher."""
    start = run.loss.values[0] if len(run.loss) else math.nan
    high = start + MAX_RISE * abs(start)
    risen = next((step for step, x in run.loss if math.isfinite(start) and not x <= high), math.inf)
    every = ((i, step, x) for p in weights(run) for i, (step, x) in enumerate(updates(p)))
    sizes = [x for i, step, x in every if i == 0 or (i < N_FIRST and step < risen)]
    return max(finite(sizes), default=math.nan)


def recent_updates(run: Run) -> list[Series]:
    """Update ratios of each trained weight before convergence, scaled to the largest learning rate.

    Scaled so, neither warmup nor the end of a decay makes them small. Weights with fewer than five records
    are left out.
    """
    until, lr = run.converged_at(), dict(rates(run))
    top = max(finite(lr.values()), default=math.nan)
    found = []
    for p in weights(run):
        ratios = before(p.series("update_ratio"), until)
        pairs = ((step, x * ratio(top, lr.get(step, top))) for step, x in ratios)
        scaled = series_of((step, x) for step, x in pairs if x < math.inf)
        if p.is_optimized and len(scaled) >= LATEST:
            found.append(scaled)
    return found


def usual_update(recent: Sequence[Series]) -> float:
    """Median over weights of the median of their last ten update ratios; NaN if there is none."""
    return median(median(series.values[-WINDOW:]) for series in recent)
