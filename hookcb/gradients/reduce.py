"""Statistics of captured steps, reduced together for runs of steps with the same parameters."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from hookcb.core.precision import moved, numbers_to, scaled_norm, widened, widest
from hookcb.gradients.capture import StepCapture
from hookcb.gradients.device import Capture, Numbers
from hookcb.gradients.samples import SKETCH
from hookcb.gradients.stats import (
    GradColumns,
    Number,
    of_sums,
    reduce_small,
    std_of,
    update_ratio,
    weight_stats,
)


class Reduced(NamedTuple):
    """Statistics of parameters on one device in a run of R steps.

    Attributes:
        names: names of the parameters.
        values: `GRAD_STATS` and mean |gradient|, `(n_params, R, n_columns)`.
    """

    names: list[str]
    values: Tensor


def reduce_steps(steps: Sequence[StepCapture]) -> Iterable[tuple[list[StepCapture], list[Reduced]]]:
    """Runs of steps with the same parameters, and their statistics, device by device."""
    for _, group in groupby(steps, _kind):
        run = list(group)
        n_devices = len(run[0].captures)
        skipped = [step.skipped for step in run]
        by_device = [_reduce([step.captures[i] for step in run], skipped) for i in range(n_devices)]
        if names := run[0].merged:
            of_params = [torch.cat([step.merged[name] for step in run]) for name in names]
            by_device.append(Reduced(list(names), torch.stack(of_params)))
        yield run, by_device


def _kind(step: StepCapture) -> tuple[object, ...]:
    """Key that is equal for steps that can be reduced together."""
    return (*step.merged, *(id(c.reader) for c in step.captures))


def _reduce(captures: list[Capture], skipped: list[Number]) -> Reduced:
    reader, whole = captures[0].reader, torch.stack([c.before for c in captures])
    small, before = whole[:, : reader.n_elements], whole[:, reader.n_elements :]
    numels = numbers_to(reader.device, reader.numels, widest(reader.device))
    norm, abs_max, nonfinite, zero_rows, mean_abs = _gradient_columns(captures, small, numels)
    made = numbers_on(reader.device, skipped)[:, None] == 0
    used = _clipped_norms(captures, norm).where(made, torch.nan)
    rms, of_weights = norm / numels.sqrt(), _weight_columns(captures, before, numels)
    values = [norm, used, rms, abs_max, nonfinite, zero_rows, *of_weights, mean_abs]
    by_param = torch.stack(values, 2).to(reader.dtype).transpose(0, 1).contiguous()
    return Reduced([param.name for param in reader.params], by_param)


def _gradient_columns(captures: list[Capture], small: Tensor, numels: Tensor) -> GradColumns:
    """Statistics of all gradients; adjacent gradients of one shape that were copied are reduced together.

    Args:
        captures: captures of R steps.
        small: the gradients that were copied, `(R, n)`.
        numels: numbers of elements, `(n_params,)`.
    """
    reader, n_steps, n = captures[0].reader, len(captures), captures[0].reader.n_copied
    shapes = [(shape, len(list(same))) for shape, same in groupby(reader.shapes[:n])]
    parts = _split(small, [k * shape.numel() for shape, k in shapes])
    found = [
        reduce_small(x.reshape(n_steps, k, -1) if x.shape[1] else x.new_empty(n_steps, k, 0), shape)
        for x, (shape, k) in zip(parts, shapes, strict=True)
    ]
    if n < len(reader.params):
        rows = [shape[0] if len(shape) > 1 else torch.nan for shape in reader.shapes[n:]]
        scale = numbers_on(reader.device, [c.scale for c in captures])[:, None]
        sums = _table([c.grads for c in captures]).view(n_steps, len(rows), -1)
        found.append(of_sums(sums, numels[n:], numbers_to(reader.device, rows, sums.dtype), scale))
    return GradColumns(*(torch.cat(column, 1) for column in zip(*found, strict=True)))


def _weight_columns(captures: list[Capture], before: Tensor, numels: Tensor) -> list[Tensor]:
    """Norm, mean, std, update ratio and drift of all parameters, `(R, n_params)` each.

    Args:
        captures: captures of R steps.
        before: tracked weights before these steps, `(R, n)`.
        numels: numbers of elements, `(n_params,)`.
    """
    reader, n = captures[0].reader, captures[0].reader.n_small
    after = _stacked(c.after for c in captures)
    start = before[:1] if reader.start is None else reader.start[None]
    kinds = zip(reader.lengths, reader.is_complex, strict=True)
    alike = [(kind, len(list(same))) for kind, same in groupby(kinds)]
    split = [_split(x, [k * length for (length, _), k in alike]) for x in (before, after, start)]
    found = []
    for ((length, is_complex), k), *parts in zip(alike, *split, strict=True):
        then, now, begun = (x.reshape(len(x), k, length) for x in parts)
        change = now - then
        of_step = update_ratio(change, then)
        torch.sub(now, begun, out=change)  # new memory for this would take as long as the subtraction
        found.append([*weight_stats(now, is_complex), of_step, update_ratio(change, begun)])
    size, mean, std, ratio, drift = (torch.cat(column, 1) for column in zip(*found, strict=True))
    size[:, n:] *= (numels[n:] / SKETCH).sqrt()  # a norm grows with the number of elements
    if reader.middle:
        table = _table([c.weights for c in captures]).view(len(captures), -1, 2)
        exact, total = table.unbind(2)
        middle = numbers_to(reader.device, reader.middle, torch.int64)
        std[:, middle] = std_of(exact, total, numels[middle], std[:, middle])
        size[:, middle], mean[:, middle] = exact, total / numels[middle]
    return [size, mean, std, ratio, drift]


def _clipped_norms(captures: list[Capture], norm: Tensor) -> Tensor:
    """Gradient norms at the step, `(R, n_params)`; `norm` where the gradients were not changed."""
    clipped = {i: c.clipped for i, c in enumerate(captures) if c.clipped is not None}
    if not clipped:
        return norm
    index = numbers_to(norm.device, list(clipped), torch.int64)
    return norm.index_copy(0, index, _table([*clipped.values()]).to(norm.dtype))


def _split(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return torch.split(x, list(sizes), dim=1)


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


def step_columns(steps: Sequence[StepCapture], by_device: Sequence[Reduced]) -> Tensor:
    """`STEP_STATS` of steps, `(R, 7)`, from the statistics of their parameters."""
    norms = [x.values[..., :2] for x in by_device if x.names]
    device = norms[0].device if norms else torch.device("cpu")
    of_steps = [s.lr for s in steps], [s.scale for s in steps], [s.skipped for s in steps]
    lr, scale, skipped = (numbers_on(device, numbers) for numbers in of_steps)
    if norms:
        whole = torch.cat([moved(x, device) for x in norms])  # (n_params, R, 2)
        (total, clipped), mean = scaled_norm(whole, dim=0).unbind(1), whole[..., 0].mean(0)
    else:
        total, clipped = torch.zeros_like(lr), torch.where(skipped == 0, 0.0, torch.nan)
        mean = torch.full_like(lr, torch.nan)
    coef = torch.where(total == 0, torch.where(clipped == 0, 1.0, clipped), clipped / total)
    is_double = any(x.dtype is torch.float64 for x in norms)
    values = torch.stack([total, clipped, mean, lr, scale, skipped, coef], 1)
    return values.to(torch.float64 if is_double else torch.float32)
