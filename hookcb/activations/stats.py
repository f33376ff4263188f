"""Statistics of a layer's output: pure functions from a tensor to small tensors, without device syncs."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hookcb.core.precision import WIDE, at_least_float32, scale_of, scaled_norm, widened, widest

LAYER_STATS = ("mean", "std", "min", "max", "abs_max", "near_zero", "zeros", "nonfinite")
WHOLE = 8_192  # number of elements up to which shares and histograms use all
SAMPLED = 4_096  # number they use above: the standard error of a share is at most 0.8 %
ROW = 65_536  # elements that are summed in float32
AT_ONCE = 16 * ROW  # elements that are widened at a time
# Variance by mean square above which sums of squares give a std to 3e-4, though float32 rounds those of few
# distinct values all in one direction: of any number of elements, |mean|/std below 3, and of few, below 7.
EXACT, EXACT_OF_FEW = 0.1, 0.02

USUAL = {torch.float32, torch.bfloat16, torch.float16}  # types of most outputs

Sample = int | None | Literal["auto"]
Known = Tensor | tuple[float, ...]  # `moments` of one output: `(1, 6)`, or six numbers


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
        A tensor `(8,)` on the device of `x`, float64 if `x` is, else float32: mean and unbiased standard
        deviation; minimum, maximum and largest magnitude of the finite elements, all in the unit of `x`;
        shares of |x| ≤ eps and of exact zeros, 0..1; number of NaN and infinite elements. NaN if there
        are too few elements, and if none is finite.

    fastai counts each negative value as near zero; here the magnitude counts.
    """
    elements, _ = take(x.detach(), None)
    return summarize(elements.reshape(1, -1), (), eps)[0]


def take(
    x: Tensor, sample: Sample, wide: bool = False, lend: Callable[[torch.Size], Tensor] | None = None
) -> tuple[Tensor, Known | None]:
    """The part of a layer's output to keep until it is reduced.

    Args:
        x: the output, of n elements, detached.
        sample: `"auto"` keeps all of up to 8,192 elements, of more 4,096 and the moments of all; an int at
            most that many; None all.
        wide: see `moments`.
        lend: called with a shape; returns a tensor to fill, float32 on a CPU.

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
    is_expanded = 0 in x.stride() and not is_compiling()
    x = flat(_once(x) if is_expanded else x)
    places = _strata(n, SAMPLED if sample == "auto" else most, x.device)
    if is_expanded:
        places = places % x.numel()
    if sample != "auto":
        return at_least_float32(x.index_select(0, places)), None
    if lend is not None:
        elements = torch.index_select(x, 0, places, out=lend(places.shape))
    else:
        elements = at_least_float32(x.index_select(0, places))
    quick = not wide and x.is_cpu and not is_compiling()
    known: Known | None = _quick_moments(x) if quick else None
    if known is None:
        known = torch.stack(moments(x[None], wide), 1)
    return elements, _repeated(known, x.numel(), n) if is_expanded else known


def summarize(rows: Tensor, known: Sequence[Known], eps: float, wide: bool = False) -> Tensor:
    """`LAYER_STATS` of rows of elements, `(R, n)`, as `(R, 8)`; `known` are their moments, or nothing."""
    *first, nonfinite = together(known, rows.dtype).unbind(1) if known else moments(rows, wide)
    unknown = first[2].isnan()  # the minimum: no element is finite
    both = (x.to(nonfinite.dtype).masked_fill(unknown, float("nan")) for x in shares(rows, eps, wide))
    return torch.stack([*first, *both, nonfinite], 1)


def moments(rows: Tensor, wide: bool = False) -> tuple[Tensor, ...]:
    """Mean, unbiased std, min, max, largest magnitude, number of non-finite elements of each row.

    Args:
        rows: `(R, n)`, any real dtype.
        wide: for results that are merged with others: in the device's widest dtype, see `widest`.

    Returns:
        Each `(R,)`, float64 if `rows` are, else float32. With NaN or infinities mean and std follow
        arithmetic; min, max and magnitude count finite elements only.
    """
    n, dtype = rows.shape[1], torch.float64 if rows.dtype is torch.float64 else torch.float32
    if wide:
        rows, dtype = widened(rows) if n <= ROW else rows, widest(rows.device)
    if n == 0:
        nothing = torch.full((len(rows),), float("nan"), dtype=dtype, device=rows.device)
        return *[nothing] * 5, torch.zeros_like(nothing)
    if rows.is_cpu and not is_compiling():
        parts = _in_rows(rows) if n <= ROW else _in_parts(rows)
    else:
        parts = _in_one(rows)
    mean, spread, low, high, nonfinite = parts
    none = low > high
    low, high = low.masked_fill_(none, float("nan")), high.masked_fill_(none, float("nan"))
    std = spread / (n - 1) ** 0.5 if n > 1 else torch.full_like(mean, float("nan"))
    return tuple(x.to(dtype) for x in (mean, std, low, high, torch.maximum(high, -low), nonfinite))


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # mean, L2 norm around it, min, max, n non-finite: (R,)


def _in_one(rows: Tensor) -> Parts:
    """Welford's algorithm: exact at any offset, and fused into one pass if compiled."""
    rows = at_least_float32(rows)
    scale = scale_of(rows, 1) if rows.dtype is torch.float64 else None  # squares beyond 1e308 are rare
    scaled = rows if scale is None else rows / scale
    var, mean = torch.var_mean(scaled, dim=1, correction=0)
    # var_mean gives NaN for an infinite mean
    mean = torch.where(mean.isnan(), scaled.mean(1), mean)
    mean, spread = widened(mean), (widened(var) * rows.shape[1]).sqrt()
    if scale is not None:
        mean, spread = mean * scale[:, 0], spread * scale[:, 0]
    return mean, spread, *_finite(rows)


def _finite(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Minimum and maximum of the finite elements, ±inf if there are none, and the number of others."""
    others, inf = rows.isfinite().logical_not_(), float("inf")
    return rows.masked_fill(others, inf).amin(1), rows.masked_fill(others, -inf).amax(1), others.sum(1)


def _in_rows(rows: Tensor) -> Parts:
    """Sums and norms, exact for most rows, in a tenth of the time of `var_mean` on a CPU.

    Σ(x - mean)² = Σx² - n·mean² loses digits if the mean is large against the spread. Such rows, with
    |mean|/std above 3 or 7, and rows that overflow or are not finite are computed again in float64.
    """
    rows, n = at_least_float32(rows), rows.shape[1]
    mean, total = rows.mean(1).double(), torch.linalg.vector_norm(rows, dim=1).double().square_()
    low, high = rows.amin(1), rows.amax(1)
    squares = torch.addcmul(total, mean, mean, value=-n)
    spread = squares.sqrt()
    limit = EXACT_OF_FEW if n <= WHOLE else EXACT
    again = torch.sub(squares, total, alpha=limit).gt_(0).logical_not()  # NaN too
    nonfinite = torch.zeros_like(low)
    hard = rows[again]
    if len(hard):
        low[again], high[again], others = _finite(hard)
        nonfinite[again] = others.to(nonfinite.dtype)
        hard = hard.double()
        size = scale_of(hard, 1)
        scale = size / torch.frexp(size).mantissa  # a power of two, by which a division is exact
        hard = hard.div_(scale)
        center = hard.mean(1, keepdim=True)
        mean[again] = (center * scale)[:, 0]
        spread[again] = torch.linalg.vector_norm(hard - center, dim=1) * scale[:, 0]
    return mean, spread, low, high, nonfinite


def _sum_of_squares(rows: Tensor) -> float:
    norms: list[float] = torch.linalg.vector_norm(rows, dim=1).tolist()
    return sum([norm * norm for norm in norms])


def _quick_moments(x: Tensor) -> tuple[float, ...] | None:
    """Finds `moments` of many elements on a CPU by four reductions; None where these are not exact.

    As in `_in_rows`, but joined in Python's floats. In a training each kind of operation costs 5 to 20 µs
    before it reads an element, as its code has left the CPU's caches; so there are as few as possible.
    """
    n = x.numel()  # `len` of a tensor is a function in Python
    length = n if n <= 2 * ROW else _row_length(n)
    if length is None or (x.dtype not in WIDE and n > AT_ONCE):
        return None
    x = at_least_float32(x)
    mean = x.sum().item() / n
    # a dot product has as many digits as norms of rows half as long
    total = torch.dot(x, x).item() if n == length else _sum_of_squares(x.view(-1, length))
    squares = total - n * mean * mean
    if not squares > EXACT * total:  # NaN too
        return None
    ends = torch.aminmax(x) if n <= ROW else (x.amin(), x.amax())  # two passes are faster over many
    low, high = ends[0].item(), ends[1].item()
    return mean, math.sqrt(squares / (n - 1)), low, high, max(high, -low), 0.0


def together(known: Sequence[Known], dtype: torch.dtype) -> Tensor:
    """`moments` of R outputs, `(R, 6)`."""
    if all(isinstance(x, tuple) for x in known):
        return torch.tensor(known, dtype=dtype, device="cpu")
    rows = [torch.tensor([x], dtype=dtype, device="cpu") if isinstance(x, tuple) else x for x in known]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


@lru_cache(maxsize=256)
def _row_length(n: int) -> int | None:
    """Length of equal rows of `n` elements: the largest that divides it, if that is not small."""
    return next((k for k in range(min(n, ROW), 1023, -1) if n % k == 0), None)


def _in_parts(rows: Tensor) -> Parts:
    """A long row in parts, joined by the formula of Chan, Golub and LeVeque (1979)."""
    (x,) = rows
    whole = x[: len(x) // ROW * ROW].view(-1, ROW)
    pieces = [
        *whole.split(AT_ONCE // ROW),
        x[None, len(whole) * ROW :],
    ]  # few at a time, as widening copies them
    pieces = [piece for piece in pieces if piece.numel()]
    sizes = [float(piece.shape[1]) for piece in pieces for _ in range(piece.shape[0])]
    n = torch.tensor(sizes, dtype=torch.float64, device="cpu")
    mean, spread, low, high, nonfinite = map(torch.cat, zip(*map(_in_rows, pieces), strict=True))
    center = (n / len(x) * mean).sum()
    spread = scaled_norm(torch.cat([spread, n.sqrt() * (mean - center)]), 0)
    joined = center, spread, low.amin(), high.amax(), nonfinite.sum()
    mean, spread, low, high, nonfinite = (x.reshape(1) for x in joined)
    return mean, spread, low, high, nonfinite


def shares(rows: Tensor, eps: float, wide: bool = False) -> tuple[Tensor, Tensor]:
    """Shares, 0..1, of |x| ≤ eps and of exact zeros in each row of `(R, n)`; NaN for empty rows."""
    is_so, dtype = rows.abs(), widest(rows.device) if wide else None
    near_zero = is_so.le_(eps).mean(1, dtype=dtype)  # floats sum ten times as fast as bools
    return near_zero, torch.eq(rows, 0, out=is_so).mean(1, dtype=dtype)


def flat(x: Tensor) -> Tensor:
    """`x` in one dimension in the order of memory; a view if its elements are contiguous."""
    if x.is_contiguous():
        return x.view(-1)
    return x.permute(sorted(range(x.ndim), key=x.stride, reverse=True)).reshape(-1)


def _once(x: Tensor) -> Tensor:
    """The elements of an expanded tensor, which need not be in memory as often as they are repeated."""
    x = x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]
    return x if x.numel() > 1 else torch.cat([x.reshape(1)] * 2)  # one has no standard deviation


def _repeated(known: Known, n: int, n_all: int) -> Known:
    """`moments` of `n_all` elements that are `n` ones again and again, from those of the `n`."""
    factors = 1.0, math.sqrt((n - 1) / n * n_all / (n_all - 1)), 1.0, 1.0, 1.0, n_all / n
    if isinstance(known, tuple):
        return tuple(x * factor for x, factor in zip(known, factors, strict=True))
    return torch.stack([x * factor for x, factor in zip(known.unbind(1), factors, strict=True)], 1)


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
