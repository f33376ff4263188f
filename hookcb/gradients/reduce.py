"""Statistics of captured steps, reduced together for runs of steps with the same parameters."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from hookcb.core.precision import moved, numbers_to, widened, widest
from hookcb.gradients.device import Capture
from hookcb.gradients.samples import SKETCH
from hookcb.gradients.stats import (
    Number,
    Numbers,
    gradient_sums,
    norm_of_any_size,
    ratio,
    std_of,
    weight_stats,
)

# names of parameters on one device; of R steps, `GRAD_STATS` and mean |gradient|: (n_params, R, n_columns)
Reduced = tuple[list[str], Tensor]
MEAN = 7  # the column of `moments` with the mean of the weights


def reduced(captures: list[Capture], skipped: list[Number]) -> Reduced:
    """Statistics of the parameters of one reader in R steps."""
    reader = captures[0].reader
    numels = numbers_to(reader.device, reader.numels, widest(reader.device))
    n_rows = numbers_to(reader.device, reader.n_rows, numels.dtype)
    values = columns_of(moments(captures), numels, n_rows, numbers_on(reader.device, skipped))
    return [param.name for param in reader.params], values.to(reader.dtype)


def moments(captures: list[Capture]) -> Tensor:
    """Norms, sums and extremes of the parameters of one reader in R steps, `(R, n_params, 13)`.

    Columns are `gradient_sums`; the norm of the gradient as the optimizer got it; norm, mean and std of the
    weights; and of tracked weights the norms of their change in the step, of themselves before it, of their
    change since the fit began, and of themselves then.
    """
    reader, whole = captures[0].reader, torch.stack([c.before for c in captures])
    small, before = whole[:, : reader.n_elements], whole[:, reader.n_elements :]
    scale = numbers_on(reader.device, [c.scale for c in captures])[:, None]
    norm, size, largest, nonfinite, rows = _gradient_sums(captures, small).unbind(2)
    norm, largest = norm / scale, torch.where(largest < 0, largest, largest / scale)
    of_gradient = [norm, size / scale, largest, nonfinite, rows, _clipped_norms(captures, norm)]
    return torch.stack([*of_gradient, *_of_weights(captures, before)], 2)


def columns_of(moments: Tensor, numels: Tensor, n_rows: Tensor, skipped: Tensor) -> Tensor:
    """`GRAD_STATS` and mean |gradient| of R steps, `(n_params, R, 12)`.

    Args:
        moments: see `moments`, `(R, n_params, 13)`.
        numels: numbers of elements, `(n_params,)`.
        n_rows: numbers of rows, `(n_params,)`; 0 with fewer than two dimensions.
        skipped: 1 for steps that were not made, `(R,)`.
    """
    norm, size, largest, nonfinite, rows, used, *weights, change, before, drift, start = moments.unbind(2)
    has_none = (largest < 0) | (numels == 0)  # no finite element
    used = used.masked_fill(skipped[:, None] != 0, torch.nan)
    zero_rows = (1 - rows / n_rows).masked_fill(has_none | (n_rows == 0), torch.nan)
    values = [
        norm,
        used,
        norm / numels.sqrt(),
        largest.masked_fill(has_none, torch.nan),
        nonfinite,
        zero_rows,
    ]
    values += [*weights, ratio(change, before), ratio(drift, start), size / numels]
    return torch.stack(values, 2).transpose(0, 1).contiguous()


def _gradient_sums(captures: list[Capture], small: Tensor) -> Tensor:
    """`gradient_sums` of all gradients in R steps, `(R, n_params, 5)`.

    Adjacent gradients of one shape that were copied are reduced together.

    Args:
        captures: captures of R steps.
        small: the gradients that were copied, `(R, n)`.
    """
    reader, n_steps, found, begin = captures[0].reader, len(captures), [], 0
    for shape, same in groupby(reader.shapes[: reader.n_copied]):
        n_rows, n, k = shape[0] if len(shape) > 1 else 1, shape.numel(), len(list(same))
        x = small[:, begin : begin + k * n].reshape(n_steps, k, n_rows, n // max(1, n_rows))
        found.append(gradient_sums(x))
        begin += k * n
    if reader.n_copied < len(reader.params):
        found.append(_table([c.grads for c in captures]).view(n_steps, -1, 5))
    return torch.cat(found, 1)


def _of_weights(captures: list[Capture], before: Tensor) -> list[Tensor]:
    """The columns of weights of `moments`, from those tracked before R steps, `(R, n)`."""
    reader, begin, found = captures[0].reader, 0, []
    numels = numbers_to(reader.device, reader.numels, widest(reader.device))
    after = _stacked(c.after for c in captures)
    start = before[:1] if reader.start is None else reader.start[None]
    for (length, is_complex), same in groupby(zip(reader.lengths, reader.is_complex, strict=True)):
        end = begin + length * (k := len(list(same)))
        then, now, first = (x[:, begin:end].reshape(len(x), k, length) for x in (before, after, start))
        change = norm_of_any_size(now - then)
        sizes = change, norm_of_any_size(then), norm_of_any_size(now - first), norm_of_any_size(first)
        found.append([*weight_stats(now, is_complex), *(x.expand_as(change) for x in sizes)])
        begin = end
    size, mean, std, *tracked = (torch.cat(column, 1) for column in zip(*found, strict=True))
    size *= (numels / SKETCH).clamp(min=1).sqrt()  # a norm grows with the number of elements
    if reader.middle:
        exact, total = _table([c.weights for c in captures]).view(len(captures), 2, -1).unbind(1)
        middle = numbers_to(reader.device, reader.middle, torch.int64)
        std[:, middle] = std_of(exact, total, numels[middle], std[:, middle])
        size[:, middle], mean[:, middle] = exact, total / numels[middle]
    return [size, mean, std, *tracked]


def _clipped_norms(captures: list[Capture], norm: Tensor) -> Tensor:
    """Gradient norms at the step, `(R, n_params)`; `norm` where the gradients were not changed."""
    clipped = {i: c.clipped for i, c in enumerate(captures) if c.clipped is not None}
    if not clipped:
        return norm
    index = numbers_to(norm.device, list(clipped), torch.int64)
    return norm.index_copy(0, index, _table([*clipped.values()]).to(norm.dtype))


def _stacked(xs: Iterable[Tensor | None]) -> Tensor:
    tensors = [x for x in xs if x is not None]
    if len({x.dtype for x in tensors}) > 1:
        tensors = [widened(x) for x in tensors]
    return torch.stack(tensors)


def numbers_on(device: torch.device, numbers: Sequence[Number]) -> Tensor:
    """Numbers of several steps, `(R,)`, on one device, in its widest dtype; see `widest`."""
    if not any(isinstance(x, Tensor) for x in numbers):
        return numbers_to(device, numbers, widest(device))
    tensors = [x if isinstance(x, Tensor) else torch.full((), x, device=device) for x in numbers]
    return torch.stack([moved(x.detach().reshape(()), device) for x in tensors])


def _table(rows: Sequence[Numbers]) -> Tensor:
    """Rows of numbers of several steps, `(R, n)`, in the widest dtype of their device; see `widest`."""
    if isinstance(rows[0], Tensor):
        return widened(torch.stack(rows))  # type: ignore[arg-type]  # all are tensors
    return torch.tensor(rows, dtype=torch.float64, device="cpu")
