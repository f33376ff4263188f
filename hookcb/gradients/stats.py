"""Statistics of gradients and weights: pure functions from tensors to small tensors."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hookcb.core.precision import at_least_float32, wide_norm, widened, widest
from hookcb.core.torch_private import norms_of
from hookcb.gradients.samples import SKETCH, is_native, sketch
from hookcb.processes.shards import local_part

OF_GRADIENT = ("norm", "clipped_norm", "rms", "abs_max", "nonfinite", "zero_rows")
GRAD_STATS = (*OF_GRADIENT, "weight_norm", "weight_mean", "weight_std", "update_ratio", "drift")
STEP_STATS = ("total_norm", "clipped_total_norm", "mean_norm", "lr", "scale", "skipped", "clip_coef")
BUFFER_STATS = ("min", "max")

WHOLE = 65_536  # up to this size, statistics of weights and the mean |gradient| use all elements
# squares of numbers outside leave float32: they underflow below 1e-38 and overflow above 3e38
SAFE_LOW, SAFE_HIGH = 1e-15, 1e15
FEW_DIGITS = 4e-3  # Σx² - n·mean² has too few digits of Σx² left if it is a smaller share of it

Number = float | Tensor  # a float on a CPU, as reading needs no sync there; else a 0-d tensor
Numbers = Sequence[float] | Tensor  # the same for several, made one tensor later, for many steps together


def plain_gradient(x: Tensor) -> Tensor | None:
    """A whole gradient as a dense real tensor; None if its elements cannot be read.

    Of a DTensor, this rank's part; complex elements become their magnitudes; half precision, float8 and
    integers are widened to float32; of a sparse tensor with more than 1,024 elements, the rows it stores.
    """
    x = local_part(x.detach())
    if not is_readable(x):
        return None
    if x.layout is not torch.strided:
        if x.layout is not torch.sparse_coo:
            x = x.to_sparse_coo()  # type: ignore[no-untyped-call]
        x = x.coalesce()
        x = x.to_dense() if x.sparse_dim() != 1 or x.numel() <= SKETCH else x.values()
    return x.abs() if x.is_complex() else at_least_float32(x)


def is_readable(p: Tensor) -> bool:
    """Whether the elements of a parameter can be read; some subclasses of Tensor hide them."""
    part = local_part(p)
    return is_native(part) and not (part.is_nested or part.is_quantized or part.is_meta)


def in_rows(x: Tensor) -> Tensor:
    """Rows of a tensor along its first dimension, `(n_rows, n)`; one row if it has fewer than two dimensions.

    Within a row, the order is that of memory; a view if each row has no gaps.
    """
    if x.ndim < 2:
        return x.reshape(1, -1)
    if not x.is_contiguous():
        x = x.permute(0, *sorted(range(1, x.ndim), key=x.stride, reverse=True))
    return x.flatten(1)


def row_norms(x: Tensor) -> Tensor:
    """L2 norms of rows, `(…, n_rows)` of `(…, n_rows, n)`, in their dtype.

    Of long rows in parts, as torch's norm loses 1e-5 of 10⁶ elements, 3 % of 2·10⁸.
    """
    k = x.shape[-1] // WHOLE
    norms: Tensor
    if k > 1:
        parts, rest = x[..., : k * WHOLE].reshape(*x.shape[:-1], k, WHOLE), x[..., k * WHOLE :]
        of_parts, of_rest = torch.linalg.vector_norm(parts, dim=-1), torch.linalg.vector_norm(rest, dim=-1)
        x = torch.cat([of_parts, of_rest[..., None]], -1)
    norms = torch.linalg.vector_norm(x, dim=-1)
    return norms


def gradient_sums(x: Tensor) -> Tensor:
    """Norm, Σ|x|, largest finite |x|, number of NaN and infinities, and of rows that are not zero.

    On a CPU the norm tells whether a second pass is needed, for NaN, infinities and squares that would leave
    the range of float32. Other devices always make it, as telling needs a sync.

    Args:
        x: rows of gradients, `(…, n_rows, n)`, see `in_rows`. Above 65,536 elements, Σ|x| is that of 1,024 in
            proportion.

    Returns:
        `(…, 5)` in the widest dtype; the largest is -1 if no element is finite.
    """
    both, wide, n = (-2, -1), widest(x.device), x.shape[-2] * x.shape[-1]
    if not n:
        return torch.zeros(*x.shape[:-2], 5, dtype=wide, device=x.device)
    rows = row_norms(x)
    norm, largest = wide_norm(rows, dim=-1), torch.maximum(-x.amin(both), x.amax(both))
    nonfinite, scale = torch.zeros_like(norm), torch.ones_like(norm)
    is_safe = (norm > SAFE_LOW) & (norm < SAFE_HIGH) | (largest == 0)  # False for NaN
    if not (x.is_cpu and bool(is_safe.all())):
        others = x.isfinite().logical_not_()
        largest = x.abs().masked_fill_(others, -1).amax(both)
        unit = largest.where(largest > 0, 1.0)
        x = x / unit[..., None, None]
        rows, nonfinite, scale = row_norms(x), others.sum(both), unit.to(wide)
        norm = wide_norm(rows, dim=-1) * scale
    some = x if n <= WHOLE else sketch(x)[None]
    size = some.abs().sum(both) * (n / (some.shape[-2] * some.shape[-1])) * scale
    return torch.stack([x.to(wide) for x in (norm, size, largest, nonfinite, (rows != 0).sum(-1))], -1)


def quick_sums(xs: Sequence[Tensor]) -> list[Number] | None:
    """The numbers of `gradient_sums` without Σ|x| and the largest, which are NaN; each tensor is read once.

    1 stands for any number of NaN and infinities on other devices than the CPU. On a CPU, None if any
    gradient has some, or squares that leave float32, which takes `gradient_sums` to tell.
    """
    rows = [row_norms(x) for x in xs]
    numbers: list[Number] = []
    if xs and not xs[0].is_cpu:
        sizes = norms_of([x if x.numel() else x.new_zeros(1) for x in xs], math.inf)
        for own, size in zip(rows, sizes, strict=True):
            nonfinite = size.isfinite().logical_not_()
            numbers += wide_norm(own, dim=-1), math.nan, math.nan, nonfinite, (own != 0).sum()
        return numbers
    for x, own in zip(xs, rows, strict=True):
        norm = torch.linalg.vector_norm(own, dtype=torch.float64).item()
        if not SAFE_LOW < norm < SAFE_HIGH and (norm != 0 or x.count_nonzero()):
            return None
        numbers += norm, math.nan, math.nan, 0.0, own.count_nonzero().item()
    return numbers


def norms_as_read(xs: Sequence[Tensor]) -> list[Number]:
    """L2 norm of each tensor in rows, in a few kernels; on a CPU even if squares leave float32."""
    if not xs:
        return []
    norms = norms_of([x if x.numel() <= WHOLE else row_norms(x.reshape(1, -1)) for x in xs])
    if not xs[0].is_cpu:
        return list(norms)
    known = [norm.item() for norm in norms]
    return [
        norm if SAFE_LOW < norm < SAFE_HIGH else wide_norm(x.reshape(-1), dim=0).item()
        for norm, x in zip(known, xs, strict=True)
    ]


def norm_of_any_size(x: Tensor) -> Tensor:
    """L2 norm along the last dimension, though squares of the elements may be tiny or huge."""
    if not x.is_cpu:
        return wide_norm(x, dim=-1)
    norm = widened(torch.linalg.vector_norm(x, dim=-1))
    is_safe = (norm > SAFE_LOW) & (norm < SAFE_HIGH)
    if not bool(is_safe.all()):
        norm[~is_safe] = wide_norm(x[~is_safe], dim=-1)
    return norm


def weight_stats(x: Tensor, is_complex: bool, pivot: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, mean and unbiased std of tracked weights, `(…, n)`; of their magnitudes if they are complex.

    Each is `(…)`, in the widest dtype; see `widest`. With `pivot`, `(…)`, the mean is that of distances to
    it, which has the digits of a small spread.
    """
    if is_complex:
        x = torch.linalg.vector_norm(x.reshape(*x.shape[:-1], -1, 2), dim=-1)
    norm, n = norm_of_any_size(x), x.shape[-1]
    x = x if pivot is None else x - pivot[..., None]
    mean = widened(x.mean(-1))
    if n < 2:
        return norm, mean, torch.full_like(norm, math.nan)
    return norm, mean, norm_of_any_size(x - mean[..., None].to(x.dtype)) / math.sqrt(n - 1)


def ratio(change: Tensor, before: Tensor) -> Tensor:
    """Size of a change of weights relative to the weights, ‖after - before‖ / ‖before‖, from these norms.

    0 if nothing has changed, inf if all weights were zero before. Usual is 1e-3 for a step of a healthy run;
    far above, the learning rate is too high.

    Source: A. Karpathy, CS231n notes, "Ratio of weights:updates".
    """
    return torch.where(change == 0, change, change / before)


def std_of(norm: Tensor, total: Tensor, n: Tensor, of_sketch: Tensor) -> Tensor:
    """Unbiased std of n elements from their norm and sum, or that of the sketch if digits would be lost.

    Σ(x - mean)² = Σx² - n·mean² loses them if the mean is large against the spread, as for the weights of a
    layer norm, which begin as ones.
    """
    square = norm.square() - total.square() / n
    return torch.where(square <= FEW_DIGITS * norm.square(), of_sketch, (square / (n - 1)).sqrt())


def columns_of(moments: Tensor, numels: Tensor, n_rows: Tensor, skipped: Tensor) -> Tensor:
    """`GRAD_STATS` and mean |gradient| of R steps, `(n_params, R, 12)`.

    Args:
        moments: see `DeviceReader.moments`, `(R, n_params, 13)`.
        numels: numbers of elements, `(n_params,)`.
        n_rows: numbers of rows, `(n_params,)`; 0 with fewer than two dimensions.
        skipped: 1 for steps that were not made, `(R,)`.
    """
    norm, size, largest, nonfinite, rows, used, *weights, change, before, drift, start = moments.unbind(2)
    has_none = (largest < 0) | (numels == 0)  # no finite element
    used = used.masked_fill(skipped[:, None] != 0, math.nan)
    zero_rows = (1 - rows / n_rows).masked_fill(has_none | (n_rows == 0), math.nan)
    of_gradient = [norm, used, norm / numels.sqrt(), largest.masked_fill(has_none, math.nan), nonfinite]
    ratios = ratio(change, before), ratio(drift, start)
    values = torch.stack([*of_gradient, zero_rows, *weights, *ratios, size / numels], 2)
    return values.transpose(0, 1).contiguous()
