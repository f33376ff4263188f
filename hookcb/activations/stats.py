"""Statistics of a layer's output: pure functions from a tensor to small tensors, without device syncs.

Whatever measures an output, plain operations or a kernel, gives sums in the order of `COLUMNS`, which can be
added to those of other parts and ranks; `stats_of` makes the statistics of them.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.linalg import vecdot

from hookcb.core.precision import WIDE, at_least_float32, numbers_to, scale_of, widest

LAYER_STATS = (
    "mean",
    "std",
    "min",
    "max",
    "abs_max",
    "near_zero",
    "zeros",
    "nonfinite",
    "rms",
    "kurtosis",
)
STORED = (*LAYER_STATS, "n", "skewness")  # with these, statistics of several outputs can be merged
# numbers of elements, and sums of powers of z = (x - pivot) · scale: what parts add up to
ADDED = ("n", "sum1", "sum2", "near_zero", "zeros", "nonfinite", "sum3", "sum4")
# extremes are those of finite elements, inf and -inf if none is; the counts of a histogram may follow
COLUMNS = (*ADDED, "pivot", "scale", "min", "max")
LOW, HIGH = COLUMNS.index("min"), COLUMNS.index("max")
CUBES = COLUMNS.index("sum3")  # sums of fourth powers come after those of cubes
WHOLE = 8_192  # number of elements up to which shares and histograms use all
SAMPLED = 4_096  # number they use above: the standard error of a share is at most 0.8 %
ROW = 65_536  # elements whose squares are summed in float32
AT_ONCE = 16 * ROW  # elements that are widened at a time
# Variance by mean square above which float32 gives a std to 3e-4, though it rounds squares of few distinct
# values all in one direction: |mean|/std below 3.
EXACT = 0.1
ROUNDING = 2.0**-23  # of sums of a kernel, relative to their terms
DIGITS = 0.01  # by which the fourth moment may be off; else the kurtosis is NaN

USUAL = {torch.float32, torch.bfloat16, torch.float16}  # types of most outputs

Sample = int | None | Literal["auto"]
Known = Tensor | tuple[float, ...]  # `moments` of one output: `(1, 12)`, or twelve numbers


def has_stats(x: object) -> bool:
    """Whether `x` is a tensor that `layer_stats` can describe: dense, real, with values in memory."""
    if type(x) is Tensor and x.dtype in USUAL and x.layout is torch.strided:
        return not (x.is_nested or x.is_meta)
    return (
        isinstance(x, Tensor)
        and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
        and x.layout is torch.strided
        and not (x.is_nested or x.is_quantized or x.is_meta or x.is_complex())
    )


def kind_of(x: object) -> str:
    """Type of an output without statistics; for a tensor also the property that prevents them.

    >>> kind_of(torch.zeros(2, dtype=torch.complex64)), kind_of(torch.zeros(2, device="meta")), kind_of(None)
    ('Tensor, complex64', 'Tensor, on meta', 'NoneType')
    """
    name = type(x).__name__
    if not isinstance(x, Tensor):
        return name
    reasons = {
        "nested": x.is_nested,
        str(x.layout).removeprefix("torch."): x.layout is not torch.strided and not x.is_nested,
        str(x.dtype).removeprefix("torch."): x.is_complex() or x.is_quantized,
        "on meta": x.is_meta,
    }
    return ", ".join([name, *(reason for reason, holds in reasons.items() if holds)])


def layer_stats(x: Tensor, eps: float = 0.05) -> Tensor:
    """The statistics named in `LAYER_STATS`, of all elements.

    Args:
        x: a tensor of any shape and any real dtype; widened to float32, float64 stays.
        eps: magnitude up to which an element counts as near zero, in the unit of `x`.

    Returns:
        A tensor `(10,)` on the device of `x`, float64 if `x` is, else float32: mean and unbiased standard
        deviation; minimum, maximum and largest magnitude of the finite elements, all in the unit of `x`;
        shares of |x| ≤ eps and of exact zeros, 0..1; number of NaN and infinite elements; root of the mean
        square, in the unit of `x`; kurtosis, see `stats_of`. NaN if there are too few elements, and if none
        is finite.

    fastai counts each negative value as near zero; here the magnitude counts.
    """
    elements, _ = take(x.detach(), None)
    found = stats_of(summarize(elements.reshape(1, -1), (), eps, x.numel()))[0, : len(LAYER_STATS)]
    return found.to(elements.dtype)


def stats_of(sums: Tensor, rounding: float = ROUNDING) -> Tensor:
    """`STORED`, then the counts of a histogram, `(..., columns)`, from sums in the order of `COLUMNS`.

    With NaN or infinities mean, std and rms follow arithmetic. Kurtosis is Pearson's, the fourth central
    moment by the square of the second: 3 for a normal distribution, 1 at least. It is NaN if all elements are
    equal, if any is not finite, and if sums around a pivot far from the mean have lost its digits.

    Args:
        sums: the sums.
        rounding: relative error of the sums.
    """
    n, sum1, sum2, near_zero, zeros, nonfinite, sum3, sum4, _, scale, low, high = sums[
        ..., : len(COLUMNS)
    ].unbind(-1)
    mean, (second, third, fourth) = mean_of(sums), central(n, sum1, sum2, sum3, sum4)
    second = second.clamp(min=0)
    std, rms = (second / (n - 1)).sqrt() / scale, torch.hypot(mean, (second / n).sqrt() / scale)
    least = (sum4.abs() + 6 * (sum1 / n).square() * sum2) * (rounding / DIGITS)
    is_known = (fourth > least) & (low < high) & (nonfinite == 0)
    kurtosis = (n * fourth / second.square()).where(is_known, math.nan)
    skewness = (n.sqrt() * third / second**1.5).where(is_known, math.nan)
    known = [low, high, torch.maximum(high, -low), near_zero / n, zeros / n]
    known = [x.masked_fill(low > high, math.nan) for x in known]  # no element is finite
    found = [mean, std, *known, nonfinite, rms, kurtosis, n, skewness]
    return torch.cat([torch.stack(found, -1), sums[..., len(COLUMNS) :]], -1)


def central(n: Tensor, sum1: Tensor, sum2: Tensor, sum3: Tensor, sum4: Tensor) -> tuple[Tensor, ...]:
    """Sums of the second, third and fourth powers of z around its mean, from sums of its powers."""
    shift = sum1 / n
    square = shift.square()
    third = sum3 - shift * (3 * sum2 - 2 * n * square)
    fourth = sum4 - 4 * shift * sum3 + square * (6 * sum2 - 3 * n * square)
    return sum2 - n * square, third, fourth


def mean_of(sums: Tensor) -> Tensor:
    """Mean of all elements, `(...,)`, from sums in the order of `COLUMNS`."""
    n, sum1, *_, pivot, scale, _, _ = sums[..., : len(COLUMNS)].unbind(-1)
    return pivot + sum1 / n / scale


def added(sums: Tensor, pivots: Tensor) -> Tensor:
    """Sums that can be added, `(R, columns)`: `ADDED`, powers around `pivots`, then counts of a histogram.

    Zeros of a part without elements.

    Source: T. Chan, G. Golub, R. LeVeque, "Algorithms for computing the sample variance", 1983; third and
    fourth powers: P. Pébay, "Formulas for robust, one-pass parallel computation of covariances and
    arbitrary-order statistical moments", SAND2008-6212, 2008.
    """
    n, sum1, sum2, *counts, sum3, sum4 = sums[:, : len(ADDED)].unbind(1)
    scale, shift = sums[:, COLUMNS.index("scale")], mean_of(sums) - pivots
    around = central(n, sum1, sum2, sum3, sum4)
    sum2, sum3, sum4 = [x / scale**k for k, x in enumerate(around, 2)]
    square = shift.square()
    powers = [
        sum3 + shift * (3 * sum2 + n * square),
        sum4 + 4 * shift * sum3 + square * (6 * sum2 + n * square),
    ]
    found = torch.stack([n, n * shift, sum2 + n * square, *counts, *powers], 1)
    return torch.cat([found, sums[:, len(COLUMNS) :]], 1).where(n[:, None] > 0, 0.0)


def joined(total: Tensor, pivots: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Sums in the order of `COLUMNS` of all parts, from the total of `added` and from extremes."""
    one = torch.ones_like(low)
    others = torch.stack([pivots * one, one, low, high], 1)
    return torch.cat([total[:, : len(ADDED)], others, total[:, len(ADDED) :]], 1)


def sums_from(stats: Tensor) -> Tensor:
    """Sums in the order of `COLUMNS`, `(R, 12)`, from `STORED`, `(R, 12)`: inverse of `stats_of`."""
    mean, std, low, high, _, near_zero, zeros, nonfinite, _, kurtosis, n, skewness = stats.double().unbind(1)
    sum2 = std.square() * (n - 1)
    sum2 = sum2.where(n > 1, 0.0)  # a single element has no std
    is_equal, second = ~(low < high), sum2 / n
    higher = [skewness * second**1.5 * n, kurtosis * second.square() * n]
    sum3, sum4 = [x.masked_fill(is_equal, 0.0) for x in higher]
    zero, counts = torch.zeros_like(n), [x.nan_to_num(0.0) * n for x in (near_zero, zeros)]
    ends = low.nan_to_num(math.inf), high.nan_to_num(-math.inf)
    return torch.stack([n, zero, sum2, *counts, nonfinite, sum3, sum4, mean, zero + 1, *ends], 1)


def take(
    x: Tensor,
    sample: Sample,
    lend: Callable[[torch.Size], Tensor] | None = None,
    is_merged: bool = False,
) -> tuple[Tensor, Known | None]:
    """The part of a layer's output to keep until it is reduced.

    Args:
        x: the output, of n elements, detached.
        sample: `"auto"` keeps all of up to 8,192 elements, of more 4,096 and the moments of all; an int at
            most that many; None all.
        lend: called with a shape; returns a tensor to fill, float32 on a CPU.
        is_merged: whether moments join those of other parts, so that float32 has too few digits for them.

    Returns:
        A copy of `x`, or elements `(sample,)`, float32 or float64; and `moments` of all, or None if these
        elements are enough. A large tensor that was expanded is read without its repetitions.
    """
    n = x.numel()
    most = n if sample is None else WHOLE if sample == "auto" else sample
    if lend is not None and not (x.dtype is torch.float32 and x.is_cpu):
        lend = None
    if n <= most:
        if lend is not None and n <= WHOLE:
            return lend(x.shape).copy_(x), None
        return (x.clone() if x.dtype in WIDE else x.float()), None
    if 0 in x.stride() and not is_compiling():  # elements that are repeated need not be in memory as often
        x = x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]
    x = flat(x)
    places = _strata(n, SAMPLED if sample == "auto" else most, x.device)
    if x.numel() < n:
        places = places % x.numel()
    if sample != "auto":
        return at_least_float32(x.index_select(0, places)), None
    if lend is not None:
        elements = torch.index_select(x, 0, places, out=lend(places.shape))
    else:
        elements = at_least_float32(x.index_select(0, places))
    is_quick = x.is_cpu and not (is_merged or is_compiling())
    known: Known | None = _quick_moments(x) if is_quick else None
    if known is None:
        known = moments(x[None])
    if x.numel() < n:
        known = together([known], x.device)
        known[:, : len(ADDED)] *= n / x.numel()
    return elements, known


def summarize(rows: Tensor, known: Sequence[Known], eps: float, n: int) -> Tensor:
    """Sums of outputs of `n` elements, `(R, 12)`, from rows of elements, `(R, k)`.

    `known` are `moments` of all elements, or nothing. Else these elements estimate those of all, but for the
    number of elements that are not finite. Sums of third and fourth powers give all elements the skewness and
    the kurtosis of these elements: exact if these are all, else with a standard error of sqrt(24 / k) for the
    kurtosis of a normal distribution, 0.08 of 4,096 elements; more if there are rare large ones.

    Source: the standard error: M. Kendall, A. Stuart, "The advanced theory of statistics", volume 1.
    """
    k = rows.shape[1]
    sums = together(known, rows.device) if known else moments(rows)
    if not known and k < n:
        sums[:, :3] *= numbers_to(rows.device, [n / k, n / k, (n - 1) / (k - 1)], sums.dtype)
    sums[:, 3:5] = shares(rows, eps) * sums[:, :1]
    sums[:, CUBES : CUBES + 2] = _higher(rows, sums)
    return sums


def _higher(rows: Tensor, sums: Tensor) -> Tensor:
    """Sums of third and fourth powers, `(R, 2)`, of all elements that have `moments` and these elements.

    They are standardized before, so that their powers stay in the range of float32.
    """
    n, k, second = sums[:, 0], rows.shape[1], sums[:, 2] / sums[:, 0]
    factor = sums[:, COLUMNS.index("scale")] / second.sqrt()
    center, factor = mean_of(sums).to(rows.dtype)[:, None], factor.to(rows.dtype)[:, None]
    total = sums.new_zeros(4, len(rows))
    for some in torch.split(rows, AT_ONCE, 1):
        z = (some - center).mul_(factor)
        squares = z.square()
        powers = [z.sum(1), squares.sum(1), vecdot(squares, z), vecdot(squares, squares)]
        total += torch.stack(powers).to(total.dtype)
    square, third, fourth = (x / k for x in central(torch.full_like(n, k), *total))
    found = torch.stack([third * (second / square) ** 1.5, fourth * (second / square) ** 2], 1)
    # equal elements add nothing to those of other parts
    return (n[:, None] * found).masked_fill((sums[:, LOW] >= sums[:, HIGH])[:, None], 0.0)


def shares(rows: Tensor, eps: float) -> Tensor:
    """Shares, 0..1, of |x| ≤ eps and of zeros in each row of `(R, n)`, as `(R, 2)`; NaN without elements."""
    is_so, dtype = rows.abs(), rows.dtype if rows.shape[1] < 2**24 else widest(rows.device)
    near_zero = is_so.le_(eps).sum(1, dtype=dtype)  # floats sum ten times as fast as bools
    counts = torch.stack([near_zero, torch.eq(rows, 0, out=is_so).sum(1, dtype=dtype)], 1)
    return counts.to(widest(rows.device)) / rows.shape[1]


def moments(rows: Tensor) -> Tensor:
    """Sums of each row of `(R, n)`, any real dtype, as `(R, 12)` in the widest dtype; no shares.

    In two passes, so that an offset costs no digits. What is not finite is looked for on a CPU only if a sum
    is not, as elsewhere that would wait for the device.
    """
    n, is_cpu = rows.shape[1], rows.is_cpu and not is_compiling()
    if is_cpu and len(rows) > 1 and rows.numel() > ROW:  # more would make the heap grow each time
        return torch.cat([moments(some) for some in torch.split(rows, max(1, ROW // n))])
    if is_cpu and n > AT_ONCE:
        return _of_parts([moments(x) for x in torch.split(rows, AT_ONCE, 1)])
    z, rows = rows.to(widest(rows.device), copy=True), at_least_float32(rows)
    zero = z.new_zeros(len(z))
    one = zero + 1
    if not n:
        return torch.stack([*[zero] * 9, one, one * math.inf, one * -math.inf], 1)
    scale = one
    if rows.dtype is z.dtype:  # squares of other dtypes have room
        scale = 1 / scale_of(z, 1)[:, 0]
        z.mul_(scale[:, None])
    center = z.mean(1)
    sum2 = torch.linalg.vector_norm(z.sub_(center[:, None]), dim=1).square_()
    if is_cpu and math.isfinite(sum2.sum().item()):
        low, high, nonfinite = rows.amin(1), rows.amax(1), zero
    else:
        others = rows.isfinite().logical_not_()
        low, high = rows.masked_fill(others, math.inf).amin(1), rows.masked_fill(others, -math.inf).amax(1)
        nonfinite = others.sum(1)
    found = [one * n, zero, sum2, zero, zero, nonfinite, zero, zero, center / scale, scale, low, high]
    return torch.stack([x.to(z.dtype) for x in found], 1)


def _of_parts(parts: Sequence[Tensor]) -> Tensor:
    """Sums of one row, `(1, 12)`, from `moments` of its parts; the mean of the first is the pivot."""
    sums = torch.cat(list(parts))
    pivot = mean_of(sums)[0].nan_to_num(0.0, 0.0, 0.0)
    return joined(
        added(sums, pivot).sum(0, True), pivot, sums[:, LOW].amin(0, True), sums[:, HIGH].amax(0, True)
    )


def _quick_moments(x: Tensor) -> tuple[float, ...] | None:
    """Finds `moments` of many elements on a CPU by four reductions; None where these are not exact.

    Σ(x - mean)² = Σx² - n·mean² loses digits if the mean is large against the spread. In a training each kind
    of operation costs 5 to 20 µs before it reads an element, as its code has left the CPU's caches; so there
    are as few as possible, and the rest is done in Python's floats.
    """
    n = x.numel()  # `len` of a tensor is a function in Python
    length = n if n <= 2 * ROW else _row_length(n)
    if length is None or (x.dtype not in WIDE and n > AT_ONCE):
        return None
    x = at_least_float32(x)
    mean = x.sum().item() / n
    if n == length:
        total = torch.dot(x, x).item()  # has as many digits as norms of rows half as long
    else:
        total = sum([norm * norm for norm in torch.linalg.vector_norm(x.view(-1, length), dim=1).tolist()])
    squares = total - n * mean * mean
    if not squares > EXACT * total:  # NaN too
        return None
    ends = torch.aminmax(x) if n <= ROW else (x.amin(), x.amax())  # two passes are faster over many
    return n, 0.0, squares, 0.0, 0.0, 0.0, 0.0, 0.0, mean, 1.0, ends[0].item(), ends[1].item()


def together(known: Sequence[Known], device: torch.device) -> Tensor:
    """`moments` of R outputs, `(R, 12)`."""
    if all(isinstance(x, tuple) for x in known):
        return numbers_to(device, known, widest(device))
    return torch.cat([x if isinstance(x, Tensor) else numbers_to(device, [x], widest(device)) for x in known])


@lru_cache(maxsize=256)
def _row_length(n: int) -> int | None:
    """Length of equal rows of `n` elements: the largest that divides it, if that is not small."""
    return next((k for k in range(min(n, ROW), 1023, -1) if n % k == 0), None)


def flat(x: Tensor) -> Tensor:
    """`x` in one dimension in the order of memory; a view if its elements are contiguous."""
    if x.is_contiguous():
        return x.view(-1)
    return x.permute(sorted(range(x.ndim), key=x.stride, reverse=True)).reshape(-1)


def _strata(n: int, k: int, device: torch.device) -> Tensor:
    """An index from each of k equal strata of n elements: always the same, and without a regular pattern.

    Every (n/k)-th element would all be of one channel if n/k is a multiple of the number of channels.
    """
    if is_compiling():
        return _drawn(n, k, device)
    return _remembered(n, k, device)


def _drawn(n: int, k: int, device: torch.device) -> Tensor:
    on = device if widest(device) is torch.float64 else "cpu"
    i = torch.arange(k, dtype=torch.float64, device=on)
    jitter = (i * 12.9898).sin_().mul_(43758.5453).frac_().abs_()  # without a generator, so that it compiles
    return ((i + jitter) * (n / k)).long().to(device)


_remembered = lru_cache(maxsize=64)(_drawn)
