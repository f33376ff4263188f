"""Statistics of a layer's output: pure functions from a tensor to small tensors, which wait for no device."""

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from hookcb.fused import can_fuse, fused_layer_stats

LAYER_STATS = ("mean", "std", "min", "max", "abs_max", "near_zero", "zeros", "nonfinite")
WHOLE = 65_536  # up to so many elements all are looked at for shares and histograms
SAMPLED = 4_096  # above that so many: the standard error of a share is at most 0.8 %

Sample = int | None | Literal["auto"]


def has_stats(x: object) -> bool:
    """Whether `x` is a tensor that `layer_stats` can describe: dense, real, with values in memory."""
    return (
        isinstance(x, Tensor)
        and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
        and x.layout is torch.strided
        and not (x.is_nested or x.is_quantized or x.is_meta or x.is_complex())
    )


def layer_stats(x: Tensor, eps: float = 0.05) -> Tensor:
    """What `LAYER_STATS` names, of all elements.

    Args:
        x: of any shape and any real dtype; widened to float32, float64 stays.
        eps: magnitude up to which an element counts as near zero, in the unit of `x`.

    Returns:
        A float32 tensor `(8,)` on the device of `x`: mean and unbiased standard deviation; smallest, largest
        and largest absolute of the finite elements, all in the unit of `x`; shares with |x| ≤ eps and of
        exact zeros, 0..1; number of NaN and infinite elements. NaN where there are too few elements.

    fastai counts each negative value as near zero; here it goes by magnitude.
    """
    elements, exact = take(x, None)
    return summarize(elements[None], exact, eps)[0]


def take(x: Tensor, sample: Sample) -> tuple[Tensor, Tensor | None]:
    """What to keep of a layer's output until there is time to reduce it.

    Args:
        x: the output, of n elements.
        sample: `"auto"`: up to 65,536 elements all, above that 4,096 and the moments of all; an int: at most
            so many; None: all.

    Returns:
        Elements as a copy, `(n,)` or `(sample,)`, float32 or float64, in the order of memory; and `moments`
        of all, `(1, 6)`, or None where these elements tell them.
    """
    x = _flat(x.detach())
    n = x.numel()
    most = n if sample is None else WHOLE if sample == "auto" else sample
    if n <= most:
        return (x.clone() if x.is_floating_point() and x.element_size() > 2 else x.float()), None
    elements = x[_strata(n, SAMPLED if sample == "auto" else most, x.device)]
    return _wide(elements), moments(x[None]) if sample == "auto" else None


def summarize(rows: Tensor, exact: Tensor | None, eps: float) -> Tensor:
    """`LAYER_STATS` of rows of elements, `(R, n)`, as `(R, 8)`; `exact` are their moments, where known."""
    mean, std, low, high, largest, nonfinite = (moments(rows) if exact is None else exact).unbind(1)
    near_zero, zeros = shares(rows, eps)
    return torch.stack([mean, std, low, high, largest, near_zero, zeros, nonfinite], 1).float()


def moments(rows: Tensor) -> Tensor:
    """Mean, unbiased std, min, max, largest magnitude, number of non-finite elements of each row.

    Args:
        rows: `(R, n)`, any real dtype.

    Returns:
        float64 `(R, 6)`. With NaN or infinities mean and std are what arithmetic makes of them; min, max and
        magnitude are of finite elements.
    """
    n = rows.shape[1]
    if n == 0:
        nothing = rows.new_full((len(rows), 6), float("nan"), dtype=torch.float64)
        nothing[:, 5] = 0
        return nothing
    if len(rows) == 1 and can_fuse(rows):
        mean, std, low, high, largest, _, _, nonfinite = fused_layer_stats(rows, eps=0.0).unbind()
        return torch.stack([mean, std, low, high, largest, nonfinite])[None].double()
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        parts = _in_rows(rows) if n <= WHOLE else _in_parts(rows)
    else:
        parts = _in_one(rows)
    mean, squares, low, high, nonfinite = parts
    none = low > high
    low, high = low.masked_fill(none, float("nan")), high.masked_fill(none, float("nan"))
    std = (squares / (n - 1)).sqrt() if n > 1 else torch.full_like(mean, float("nan"))
    return torch.stack([mean, std, low, high, torch.maximum(high, -low), nonfinite], 1)


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # mean, squares around it, min, max, n non-finite: (R,)


def _in_one(rows: Tensor) -> Parts:
    """By Welford's way: exact at any offset, and fused into one pass where it is compiled."""
    rows = _wide(rows)
    finite, inf = rows.isfinite(), float("inf")
    var, mean = torch.var_mean(rows, dim=1, correction=0)
    mean = torch.where(mean.isnan(), rows.mean(1), mean)  # var_mean gives NaN where an infinite mean is true
    low, high = rows.masked_fill(~finite, inf).amin(1), rows.masked_fill(~finite, -inf).amax(1)
    nonfinite = rows.shape[1] - finite.sum(1)
    return mean.double(), var.double() * rows.shape[1], low.double(), high.double(), nonfinite.double()


def _in_rows(rows: Tensor) -> Parts:
    """By sums and norms, a tenth of the time of `var_mean` on a CPU, which are exact for most rows.

    Σ(x - mean)² = Σx² - n·mean² loses digits where the mean is large against the spread. Rows where it does,
    from |mean|/std ≈ 16 on, and those that overflow or are not finite are taken again in float64.
    """
    rows, n = _wide(rows), rows.shape[1]
    mean, norm = rows.mean(1).double(), torch.linalg.vector_norm(rows, dim=1).double()
    low, high = rows.amin(1).double(), rows.amax(1).double()
    total = norm.square_()
    squares = torch.addcmul(total, mean, mean, value=-n)
    again = ((squares > total * 4e-3) | (high - low + total == 0)).logical_not_()
    nonfinite = torch.zeros_like(mean)
    hard = rows[again]
    if len(hard):
        hard = hard.double()
        center, finite, inf = hard.mean(1, keepdim=True), hard.isfinite(), float("inf")
        mean[again], squares[again] = center[:, 0], (hard - center).square_().sum(1)
        low[again] = hard.masked_fill(~finite, inf).amin(1)
        high[again] = hard.masked_fill(~finite, -inf).amax(1)
        nonfinite[again] = n - finite.sum(1).double()
    return mean, squares, low, high, nonfinite


def _in_parts(rows: Tensor) -> Parts:
    """Long rows in parts, which are joined by the formula of Chan, Golub and LeVeque (1979)."""
    (x,) = rows
    whole = x[: len(x) // WHOLE * WHOLE].view(-1, WHOLE)
    pieces = [*whole.split(16), x[None, len(whole) * WHOLE :]]  # few at a time, as widening copies them
    pieces = [piece for piece in pieces if piece.numel()]
    n = torch.cat([torch.full((len(piece),), float(piece.shape[1])).double() for piece in pieces])
    mean, squares, low, high, nonfinite = map(torch.cat, zip(*map(_in_rows, pieces), strict=True))
    center = (n * mean).sum() / len(x)
    squares = squares + n * (mean - center).square()
    joined = center, squares.sum(), low.amin(), high.amax(), nonfinite.sum()
    mean, squares, low, high, nonfinite = (x.reshape(1) for x in joined)
    return mean, squares, low, high, nonfinite


def shares(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of each row of `(R, n)` the shares, 0..1, of |x| ≤ eps and of exact zeros; NaN of none."""
    size = rows.abs()
    near_zero = size.clone().le_(eps).mean(1)  # in place it stays float: ten times as fast to sum as bool
    return near_zero, size.eq_(0).mean(1)


def histogram(rows: Tensor, low: Tensor | float, high: Tensor | float, bins: int) -> Tensor:
    """Counts of each row's elements in bins of equal width from `low` to `high`, both included.

    Args:
        rows: `(R, n)`, float32 or float64.
        low: lower edge of the range, in the unit of `rows`; a 0-d tensor on its device, or a float.
        high: upper edge.
        bins: number of bins.

    Returns:
        `(R, bins + 2)`: first what is below `low`, last what is above `high`. NaN is in none of them.
    """
    low, high = torch.as_tensor(low, dtype=torch.float64), torch.as_tensor(high, dtype=torch.float64)
    position = rows.mul(0.5).sub_(low / 2)  # half, as the difference of the largest floats overflows
    position.mul_(2 * bins / (high - low)).clamp_(0, bins - 1).floor_()
    position.add_(rows.clone().gt_(high)).sub_(rows.clone().lt_(low))  # by the edges, as products are rounded
    slot = position.add_(1).nan_to_num_(nan=bins + 2).long()
    slot += torch.arange(len(rows), device=rows.device)[:, None] * (bins + 3)
    exact = torch.float32 if rows.shape[1] < 2**24 else torch.float64
    counts = rows.new_zeros(len(rows) * (bins + 3), dtype=exact)
    counts.scatter_add_(0, slot.view(-1), torch.ones_like(slot.view(-1), dtype=exact))
    return counts.view(len(rows), -1)[:, :-1]


def _flat(x: Tensor) -> Tensor:
    """As one dimension in the order of memory, a view where its elements lie side by side."""
    if not x.is_contiguous():
        x = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))
    return x.reshape(-1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _strata(n: int, k: int, device: torch.device) -> Tensor:
    """An index from each of k equal strata of n elements: always the same ones, and in no regular pattern.

    Every (n/k)-th element would see one channel only, where n/k is a multiple of the number of channels.
    """
    if torch.compiler.is_compiling():
        return _drawn(n, k, device)
    return _remembered(n, k, device)


def _drawn(n: int, k: int, device: torch.device) -> Tensor:
    i = torch.arange(k, dtype=torch.float64, device=device)
    jitter = (i * 12.9898).sin_().mul_(43758.5453).frac_().abs_()  # of no generator, so that it compiles
    return ((i + jitter) * (n / k)).long()


_remembered = lru_cache(maxsize=64)(_drawn)
