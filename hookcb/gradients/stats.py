"""Statistics of gradients and weights: pure functions from tensors to small tensors.

Small tensors, up to 1,024 elements, are copied and reduced for many steps together. Larger gradients are
reduced at their step, in one pass for the norms of their rows and, in some steps, more for their details.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hookcb.core.precision import WIDE, at_least_float32, scaled_norm, wide_norm, widened, widest
from hookcb.core.shards import local_part
from hookcb.core.torch_private import norms_of

OF_GRADIENT = ("norm", "clipped_norm", "rms", "abs_max", "nonfinite", "zero_rows")
GRAD_STATS = (*OF_GRADIENT, "weight_norm", "weight_mean", "weight_std", "update_ratio", "drift")
STEP_STATS = ("total_norm", "clipped_total_norm", "mean_norm", "lr", "scale", "skipped", "clip_coef")
BUFFER_STATS = ("min", "max")

SKETCH = 1_024  # maximum number of elements of a parameter that are tracked from step to step
RUN = 2  # adjacent elements that are tracked together, as each run is a line to fetch into the CPU's cache
WHOLE = 65_536  # up to this size, statistics of weights and the mean |gradient| use all elements
# squares of numbers outside leave float32: they underflow below 1e-38 and overflow above 3e38
SAFE_LOW, SAFE_HIGH = 1e-15, 1e15
FEW_DIGITS = 4e-3  # Σx² - n·mean² has too few digits of Σx² left if it is a smaller share of it

Number = float | Tensor  # a float on a CPU, as reading needs no sync there; else a 0-d tensor


class GradSummary(NamedTuple):
    """Summary of one large gradient, with its details."""

    rows: Tensor  # L2 norm of each row, along the first dimension: (n_rows,)
    low: Number  # smallest and largest of the finite elements
    high: Number
    nonfinite: Number  # number of NaN and infinities


def plain_gradient(x: Tensor) -> Tensor | None:
    """A whole gradient as a dense or sparse real tensor; None if its elements cannot be read.

    Of a DTensor, this rank's part; complex elements become their magnitudes; half precision, float8 and
    integers are widened to float32; a sparse tensor is coalesced, and made dense up to 1,024 elements.
    """
    x = local_part(x.detach())
    if not _is_native(x) or x.is_nested or x.is_quantized or x.is_meta:
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
    return _is_native(part) and not (part.is_nested or part.is_quantized or part.is_meta)


def _is_native(x: Tensor) -> bool:
    # subclasses without their own inherit it
    return type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


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
        return GradSummary(row_norms(x), 0.0, 0.0, 0.0)
    if not x.is_cpu:
        others = elements.isfinite().logical_not_()
        finite = elements.masked_fill(others, 0)
        return GradSummary(row_norms(x), *torch.aminmax(finite), others.sum())
    low, high = _ends(elements)
    size = max(-low, high)
    if SAFE_LOW < size < SAFE_HIGH or size == 0:  # False for NaN
        return GradSummary(row_norms(x), low, high, 0.0)
    finite = elements[elements.isfinite()]
    low, high = _ends(finite) if len(finite) else (math.nan, math.nan)
    scale = size if 0 < size < math.inf else 1.0  # else squares leave the range of float64 too
    return GradSummary(
        row_norms(x.double() / scale) * scale, low, high, float(elements.numel() - len(finite))
    )


def norms_of_rows(xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Number]] | None:
    """Row norms of large gradients on one device, and the numbers of NaN and infinities in each.

    It reads each gradient once, where `summarize_gradient` reads it three times. On a CPU it is None if any
    has NaN, infinities, or squares that would leave the range of float32. On other devices, where telling
    needs a sync, 1 stands for any number of NaN and infinities.
    """
    rows = [row_norms(x) for x in xs]
    if not rows:
        return rows, []
    if not rows[0].is_cpu:
        stored = [elements_of(x) for x in xs]
        sizes = norms_of([x if x.numel() else x.new_zeros(1) for x in stored], math.inf)
        return rows, [size.isfinite().logical_not_() for size in sizes]
    for x, norms in zip(xs, rows, strict=True):
        size = torch.linalg.vector_norm(norms).item()
        if not SAFE_LOW < size < SAFE_HIGH and not (size == 0 and _is_zero(elements_of(x))):
            return None
    return rows, [0.0] * len(rows)


def _is_zero(x: Tensor) -> bool:
    """Whether a tensor on a CPU has no element other than 0."""
    return not x.numel() or _ends(x) == (0, 0)


def mean_size(x: Tensor) -> Number:
    """Mean |gradient| of a large gradient from `plain_gradient`; above 65,536 elements, that of 1,024."""
    tracked = sketch(x) if x.numel() > WHOLE else None
    if tracked is None:
        return number_of(elements_of(x).abs().sum()) / x.numel()  # a fifth of the time of the L1 norm
    return number_of(tracked.abs().mean())


def number_of(x: Tensor) -> Number:
    """A float on a CPU, as reading needs no sync there; else the tensor itself."""
    return x.item() if x.is_cpu else x


def elements_of(x: Tensor) -> Tensor:
    """The stored elements of a tensor from `plain_gradient`."""
    return x if x.layout is torch.strided else x.values()


def _ends(x: Tensor) -> tuple[float, float]:
    """Minimum and maximum, on a CPU in less time than by `aminmax`."""
    return x.amin().item(), x.amax().item()


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


def reduce_large(rows: Tensor, nonfinite: Tensor, details: Tensor, n_dims: int) -> GradColumns:
    """Statistics of k large gradients of one shape in R records.

    Args:
        rows: norms of their rows, `(R, k, n_rows)`.
        nonfinite: numbers of NaN and infinities, `(R, k)`.
        details: smallest and largest finite element, and mean |gradient|, `(R, k, 3)`; NaN if unknown.
        n_dims: number of dimensions of the gradients.
    """
    low, high, mean_abs = details.unbind(2)
    norm = wide_norm(rows, dim=2)
    zero_rows = _zero_rows(rows, norm.dtype) if n_dims > 1 else torch.full_like(norm, math.nan)
    return GradColumns(norm, torch.maximum(high, -low), nonfinite, zero_rows, mean_abs)


def _zero_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Share of zeros among sizes of rows, `(R, k, n_rows)`; NaN if none is finite."""
    return (rows == 0).mean(2, dtype=dtype).masked_fill(rows.isfinite().logical_not_().all(2), math.nan)


def sketch_stride(n: int) -> int:
    """Stride of the tracked runs among n: about n / 512, and coprime to n.

    A stride with a divisor in common with a dimension would track only some channels.
    """
    stride = n * RUN // SKETCH
    while math.gcd(stride, n) != 1:
        stride -= 1
    return stride


def sketch(x: Tensor) -> Tensor | None:
    """A view of up to 1,024 elements of a dense tensor, the same at each call, spread evenly over it.

    `(n,)` if it has that few, else 512 pairs, `(512, 2)`. None if there is no such view: up to 16,384
    elements, as a stride would leave out too many at the ends, and if `x` is not a dense real tensor with
    adjacent elements.
    """
    x = x.detach()
    native = _is_native(x) and x.layout is torch.strided and x.is_floating_point()
    if not native or x.is_nested or x.is_meta or x.dtype.itemsize < 2 or SKETCH < x.numel() <= 16 * SKETCH:
        return None
    if not x.is_contiguous():
        x = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))
        if not x.is_contiguous():
            return None
    return _tracked(x.view(-1))


def _tracked(x: Tensor) -> Tensor:
    n = len(x)
    if n <= SKETCH:
        return x
    if n <= 16 * SKETCH:
        return x[_places(n, x.device)]
    runs = x[: n // RUN * RUN].view(-1, RUN)
    stride, k = sketch_stride(len(runs)), SKETCH // RUN
    return runs[(len(runs) - stride * (k - 1)) // 2 :: stride][:k]


@lru_cache(maxsize=256)
def _places(n: int, device: torch.device) -> Tensor:
    """1,024 of n indices: multiples of the golden ratio, spread evenly over all parts and channels."""
    step = round(n * 0.6180339887)
    while math.gcd(step, n) != 1:
        step += 1
    return (torch.arange(SKETCH, device="cpu") * step % n).sort().values.to(device, non_blocking=True)


def sketch_places(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """A flat view of a float32 tensor and indices of its tracked elements, to copy them in one operation.

    None if it has `sketch`, or is not an ordinary tensor.
    """
    x = x.detach()
    usual = type(x) is Tensor and x.dtype is torch.float32 and x.layout is torch.strided and x.is_contiguous()
    if not usual or x.is_meta or not SKETCH < x.numel() <= 16 * SKETCH:
        return None
    return x.view(-1), _places(x.numel(), x.device)


def sketch_copy(x: Tensor) -> Tensor:
    """Copy of up to 1,024 elements, in one dimension, at least float32; those of `sketch` if it has one.

    Complex elements become real and imaginary parts in turn; of a DTensor, it has some of this rank's part.
    """
    x = local_part(x.detach())
    view = sketch(x)
    if view is None:
        view = _tracked((x if x.layout is torch.strided else x.to_dense()).reshape(-1))
    if view.is_complex():
        view = torch.view_as_real(view)
    return at_least_float32(view.clone(memory_format=torch.contiguous_format)).view(-1)


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
