"""Statistics of gradients and weights: pure functions from tensors to small tensors.

Small tensors, up to 1,024 elements, are copied and reduced for many steps together. Larger gradients are
reduced at their step, in one pass for the norms of their rows and, in some steps, more for their details.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hookcb.core.precision import WIDE, at_least_float32, scaled_norm, wide_norm, widened, widest
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


class GradSummary(NamedTuple):
    """Summary of one large gradient."""

    rows: Tensor  # L2 norm of each row, along the first dimension: (n_rows,)
    largest: Number  # of the finite |x|; -1 if there is none
    nonfinite: Number  # number of NaN and infinities


def plain_gradient(x: Tensor) -> Tensor | None:
    """A whole gradient as a dense or sparse real tensor; None if its elements cannot be read.

    Of a DTensor, this rank's part; complex elements become their magnitudes; half precision, float8 and
    integers are widened to float32; a sparse tensor is coalesced, and made dense up to 1,024 elements.
    """
    x = local_part(x.detach())
    if not is_native(x) or x.is_nested or x.is_quantized or x.is_meta:
        return None
    if x.layout is not torch.strided:
        if x.layout is not torch.sparse_coo:
            x = x.to_sparse_coo()  # type: ignore[no-untyped-call]
        x = x.coalesce()
        if x.sparse_dim() != 1 or x.numel() <= SKETCH:
            x = x.to_dense()
        elif x.is_complex() or x.dtype not in WIDE:
            values = plain_gradient(x.values())
            return None if values is None else _sparse(x, values)
        else:
            return x
    if x.is_complex():
        return x.abs()
    return at_least_float32(x)


def _sparse(x: Tensor, values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True, check_invariants=False)


def is_readable(p: Tensor) -> bool:
    """Whether the elements of a parameter can be read; some subclasses of Tensor hide them."""
    part = local_part(p)
    return is_native(part) and not (part.is_nested or part.is_quantized or part.is_meta)


def row_norms(x: Tensor) -> Tensor:
    """L2 norm of each row of `x` along its first dimension, `(n_rows,)`; `(1,)` with fewer than two.

    In the dtype of `x`. A row that a sparse tensor does not store has norm 0.
    """
    norms: Tensor
    if x.layout is not torch.strided:
        norms = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
        return norms.index_copy_(0, x.indices()[0], row_norms(x.values().flatten(1)))
    if x.ndim < 2:
        return _norms(x.reshape(1, -1))
    if x.is_contiguous():
        return _norms(x.view(x.shape[0], -1))
    norms = torch.linalg.vector_norm(x, dim=list(range(1, x.ndim)))
    return norms


def _norms(rows: Tensor) -> Tensor:
    """L2 norms of rows; of long ones in parts, as torch's loses 1e-5 of 10⁶ elements, 3 % of 2·10⁸."""
    k = rows.shape[1] // WHOLE
    norms: Tensor
    if k > 1:
        parts, rest = rows[:, : k * WHOLE].view(-1, k, WHOLE), rows[:, k * WHOLE :]
        of_parts, of_rest = torch.linalg.vector_norm(parts, dim=2), torch.linalg.vector_norm(rest, dim=1)
        rows = torch.cat([of_parts, of_rest[:, None]], 1)
    norms = torch.linalg.vector_norm(rows, dim=1)
    return norms


def summarize_gradient(x: Tensor) -> GradSummary:
    """Summary of a large gradient from `plain_gradient`.

    On a CPU, extremes tell whether a second pass is needed, for NaN, infinities and squares that would leave
    the range of float32. Other devices always count NaN and infinities, as reading the extremes needs a sync.
    """
    elements = elements_of(x)
    if elements.numel() == 0:
        return GradSummary(row_norms(x), 0.0, 0.0)
    if not x.is_cpu:
        others = elements.isfinite().logical_not_()
        return GradSummary(row_norms(x), elements.abs().masked_fill_(others, -1).amax(), others.sum())
    size = _largest(elements)
    if SAFE_LOW < size < SAFE_HIGH or size == 0:  # False for NaN
        return GradSummary(row_norms(x), size, 0.0)
    finite = elements[elements.isfinite()]
    scale = size if 0 < size < math.inf else 1.0  # else squares leave the range of float64 too
    rows, largest = row_norms(x.double() / scale) * scale, _largest(finite) if len(finite) else -1.0
    return GradSummary(rows, largest, float(elements.numel() - len(finite)))


def large_sums(xs: Sequence[Tensor], is_detailed: bool) -> list[Number]:
    """Norm, Σ|x|, largest finite |x|, number of NaN and infinities, and of rows that are not zero.

    Without details the second and the third are NaN, and each is read once, not three times; 1 stands for any
    number of NaN and infinities on other devices than the CPU, where telling needs a sync. On a CPU there are
    details all the same if any gradient has NaN, infinities, or squares that would leave float32.

    Args:
        xs: large gradients on one device, from `plain_gradient`.
        is_detailed: whether to read the details.

    Returns:
        Five numbers for each gradient, one after another.
    """
    quick = None if is_detailed else _quick_sums(xs)
    if quick is not None:
        return quick
    numbers: list[Number] = []
    for x in xs:
        rows, largest, nonfinite = summarize_gradient(x)
        filled = torch.where(rows.isfinite().any(), (rows != 0).sum(), math.nan)
        numbers += number_of(wide_norm(rows, dim=0)), _size(x), largest, nonfinite, number_of(filled)
    return numbers


def _quick_sums(xs: Sequence[Tensor]) -> list[Number] | None:
    """The numbers of `large_sums` without details; None if they must be read."""
    numbers: list[Number] = []
    if xs and not xs[0].is_cpu:
        stored = [elements_of(x) for x in xs]
        sizes = norms_of([x if x.numel() else x.new_zeros(1) for x in stored], math.inf)
        for rows, size in zip(map(row_norms, xs), sizes, strict=True):
            nonfinite = size.isfinite().logical_not_()
            numbers += wide_norm(rows, dim=0), math.nan, math.nan, nonfinite, (rows != 0).sum()
        return numbers
    for x in xs:
        rows = row_norms(x)
        norm = torch.linalg.vector_norm(rows, dtype=torch.float64).item()
        elements = elements_of(x)
        if not SAFE_LOW < norm < SAFE_HIGH and (norm != 0 or (elements.numel() and _largest(elements) != 0)):
            return None
        numbers += norm, math.nan, math.nan, 0.0, rows.count_nonzero().item()
    return numbers


def _largest(x: Tensor) -> float:
    """The largest |x| on a CPU, from minimum and maximum, which take less time than `aminmax`."""
    low, high = x.amin().item(), x.amax().item()
    return max(-low, high)


def _size(x: Tensor) -> Number:
    """Σ|x| of a gradient from `plain_gradient`; above 65,536 elements, that of 1,024 in proportion."""
    tracked = sketch(x) if x.numel() > WHOLE else None
    if tracked is None:
        return number_of(elements_of(x).abs().sum())  # a fifth of the time of the L1 norm
    return number_of(tracked.abs().mean()) * x.numel()


def number_of(x: Tensor) -> Number:
    """A float on a CPU, as reading needs no sync there; else the tensor itself."""
    return x.item() if x.is_cpu else x


def elements_of(x: Tensor) -> Tensor:
    """The stored elements of a tensor from `plain_gradient`."""
    return x if x.layout is torch.strided else x.values()


class GradColumns(NamedTuple):
    """Statistics of gradients by record and parameter, each `(R, k)`, in the widest dtype; see `widest`."""

    norm: Tensor  # L2
    abs_max: Tensor  # of finite elements
    nonfinite: Tensor  # number
    zero_rows: Tensor  # share, 0..1; NaN with fewer than two dimensions, or if no row is finite
    mean_abs: Tensor


def reduce_small(x: Tensor, shape: torch.Size) -> GradColumns:
    """Statistics of k small gradients of one shape in R records, `(R, k, n)`."""
    n, wide = x.shape[-1], widest(x.device)
    nothing = torch.full(x.shape[:-1], math.nan, dtype=wide, device=x.device)
    if not n:
        zero = torch.zeros_like(nothing)
        return GradColumns(zero, nothing, zero, nothing, nothing)
    size = x.abs()
    of_rows = size.reshape(*x.shape[:2], shape[0], -1).amax(3) if len(shape) > 1 else size
    abs_max, nonfinite, norm_of = of_rows.amax(2), torch.zeros_like(nothing), torch.linalg.vector_norm
    if not (x.is_cpu and bool(((abs_max > SAFE_LOW) & (abs_max < SAFE_HIGH)).all())):
        others = size.isfinite().logical_not_()
        x, size, nonfinite, norm_of = x.to(wide), size.to(wide), others.sum(2).to(wide), scaled_norm
        abs_max = size.masked_fill(others, 0).amax(2).masked_fill(others.all(2), math.nan)
    zero_rows = _zero_rows(of_rows, wide) if len(shape) > 1 else nothing
    norm, total = norm_of(x, dim=2).to(wide), torch.linalg.vector_norm(x, 1, dim=2).to(wide)
    return GradColumns(norm, abs_max.to(wide), nonfinite, zero_rows, total / n)


def of_sums(sums: Tensor, numels: Tensor, n_rows: Tensor, scale: Tensor) -> GradColumns:
    """Statistics of k gradients in R records from `large_sums` or `Sums`.

    Args:
        sums: the sums, `(R, k, 5)`.
        numels: number of elements of each, `(k,)`.
        n_rows: number of rows of each, `(k,)`; NaN for one dimension.
        scale: factor by which the gradients were too large, `(R, 1)`.
    """
    norm, size, largest, nonfinite, rows = sums.unbind(2)
    has_none = largest < 0  # no finite element
    zero_rows = (1 - rows / n_rows).masked_fill(has_none, math.nan)
    abs_max = largest.masked_fill(has_none, math.nan) / scale
    return GradColumns(norm / scale, abs_max, nonfinite, zero_rows, size / scale / numels)


def _zero_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Share of zeros among sizes of rows, along the last dimension; NaN if none is finite."""
    return (rows == 0).mean(-1, dtype=dtype).masked_fill(rows.isfinite().logical_not_().all(-1), math.nan)


def update_ratio(change: Tensor, before: Tensor) -> Tensor:
    """Size of a change of weights relative to the weights, ‖after - before‖ / ‖before‖.

    Usual is 1e-3 for a step of a healthy run; far above, the learning rate is too high.

    Args:
        change: differences of weights, `(…, n)`.
        before: the weights they are relative to.

    Returns:
        `(…)`; 0 if nothing has changed, inf if all weights were zero before.

    Source: A. Karpathy, CS231n notes, "Ratio of weights:updates".
    """
    size = _norm_of_any_size(change)
    return torch.where(size == 0, size, size / _norm_of_any_size(before))


def _norm_of_any_size(x: Tensor) -> Tensor:
    """L2 norm along the last dimension, though squares of the elements may be tiny or huge."""
    if not x.is_cpu:
        return wide_norm(x, dim=-1)
    norm = widened(torch.linalg.vector_norm(x, dim=-1))
    is_safe = (norm > SAFE_LOW) & (norm < SAFE_HIGH)
    if not bool(is_safe.all()):
        norm[~is_safe] = wide_norm(x[~is_safe], dim=-1)
    return norm


def weight_stats(x: Tensor, is_complex: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, mean and unbiased std of tracked weights, `(…, n)`; of their magnitudes if they are complex.

    Each is `(…)`, in the widest dtype; see `widest`.
    """
    if is_complex:
        x = torch.linalg.vector_norm(x.reshape(*x.shape[:-1], -1, 2), dim=-1)
    norm, n = _norm_of_any_size(x), x.shape[-1]
    mean = widened(x.mean(-1))
    if n < 2:
        return norm, mean, torch.full_like(norm, math.nan)
    total = norm.square()
    squares = torch.addcmul(total, mean, mean, value=-n)
    if not (x.is_cpu and bool((squares > FEW_DIGITS * total).all())):  # False for NaN
        squares = _norm_of_any_size(x - mean[..., None].to(x.dtype)).square_()
    return norm, mean, (squares / (n - 1)).sqrt_()


def std_of(norm: Tensor, total: Tensor, n: Tensor, of_sketch: Tensor) -> Tensor:
    """Unbiased std of n elements from their norm and sum, or that of the sketch if digits would be lost.

    Σ(x - mean)² = Σx² - n·mean² loses them if the mean is large against the spread, as for the weights of a
    layer norm, which begin as ones.
    """
    square = norm.square() - total.square() / n
    return torch.where(square <= FEW_DIGITS * norm.square(), of_sketch, (square / (n - 1)).sqrt())
