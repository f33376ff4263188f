"""ShardReader: statistics of parameters of which each rank has a part, merged by two reductions a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hookcb.core.alone import Ranks
from hookcb.core.precision import at_least_float32, numbers_to
from hookcb.core.torch_private import is_flattened
from hookcb.gradients.device import Capture, DeviceReader, usable
from hookcb.gradients.reduce import columns_of, moments
from hookcb.gradients.samples import SKETCH
from hookcb.gradients.stats import Number, in_rows, norms_as_read, plain_gradient, row_norms
from hookcb.hooks.params import Param
from hookcb.processes.shards import (
    first_row,
    has_whole_rows,
    is_divided,
    is_dtensor,
    is_partial,
    local_part,
    summed,
)
from hookcb.records.memory import Memory

Columns = dict[str, Tensor]  # statistics of a step, (1, n_columns), by name of the parameter


@dataclass(slots=True)
class ShardCapture:
    """Numbers captured around one step, for this rank's part of each sharded parameter.

    Attributes:
        capture: numbers of the parts; those of a gradient that is not here are of zeros.
        names: parameters with a gradient, on this rank or on others.
        is_here: whether this rank has a part of the gradient, by parameter in the order of the reader.
        flags: whether each row of the gradient is not zero, for parameters that are not divided by rows.
        unsummed: gradients at the step of which the ranks have summands, by index in the reader.
    """

    capture: Capture
    names: list[str]
    is_here: list[bool]
    flags: list[Tensor]
    unsummed: dict[int, Tensor] = field(default_factory=dict)


class ShardReader:
    """Captures this rank's parts of gradients and weights, and merges their statistics.

    What it communicates depends on the parameters only, and not on what is in them: as many numbers for each.

    Args:
        params: sharded parameters, on one device.
        sizes: numbers of elements on all ranks together, by id, of parameters that do not tell it.
        ranks: the ranks that share their sums; alone, as under `watch`, statistics are those of the part.
        memory: lends memory for copies.
    """

    def __init__(self, params: Sequence[Param], sizes: dict[int, int], ranks: Ranks, memory: Memory) -> None:
        self.params, self._ranks, self._memory = params, ranks, memory
        self._is_merged = ranks.world > 1
        self.numels = {id(p): sizes.get(id(p), p.numel()) for _, p, _ in params}
        # of parameters that are divided along other dimensions than the first: a flag for each row
        self._n_rows = [p.shape[0] if self._is_merged and _needs_flags(p) else 0 for _, p, _ in params]
        self._reader = DeviceReader(params, memory)

    @torch.no_grad()
    def before_step(self, grads: dict[str, Tensor | None], grad_scale: Number) -> ShardCapture:
        """Captures weights, and gradients by name, `grad_scale` times too large; None if none is here."""
        if self._reader.numels != [local_part(param.p).numel() for param in self._reader.params]:
            self._reader = DeviceReader(self.params, self._memory)
        found = {name: None if g is None else self._part(g) for name, g in grads.items()}
        parts = [found.get(name) for name, *_ in self._reader.params]
        zeros = zip(parts, self._reader.shapes, strict=True)
        xs = [torch.zeros(shape, device=self._reader.device) if x is None else x for x, shape in zeros]
        capture = self._reader.before(xs, grad_scale, is_detailed=True)
        is_here = [x is not None and x.numel() > 0 for x in parts]
        with_flags = [param for param, n in zip(self.params, self._n_rows, strict=True) if n]
        flags = [self._flags(p, grads.get(name), found.get(name)) for name, p, _ in with_flags]
        return ShardCapture(capture, list(grads), is_here, flags)

    def _part(self, g: Tensor) -> Tensor | None:
        """This rank's part of a gradient; None if it cannot be read, or summed."""
        if is_partial(g):
            if not self._is_merged:
                return None
            g = summed(g)
        return usable(local_part(g.detach()))

    def _flags(self, p: Tensor, g: Tensor | None, part: Tensor | None) -> Tensor:
        flags = torch.zeros(p.shape[0], dtype=torch.float64, device=self._reader.device)
        if g is not None and part is not None and part.numel():
            first = first_row(g)  # None if rows are divided in a way that leaves them apart
            begin, end = (0, len(flags)) if first is None else (first, first + len(part))
            filled = row_norms(in_rows(at_least_float32(part))) != 0
            flags[begin:end] = math.nan if first is None else filled.to(flags.dtype)
        return flags

    def at_step(self, step: ShardCapture) -> None:
        """Captures gradients as the optimizer gets them."""
        self._reader.at_step(step.capture)
        for i, (_, p, _) in enumerate(self._reader.params):
            if p.grad is not None and is_partial(p.grad):
                step.unsummed[i] = p.grad.clone()  # an optimizer's hook must not communicate

    @torch.no_grad()
    def after_step(self, step: ShardCapture, skipped: Number) -> Columns:
        """Merges what was captured around a step on all ranks, and returns the statistics of this step.

        All ranks must call it at the same step.
        """
        for i, g in step.unsummed.items():
            part = self._part(g)
            norm = 0.0 if part is None else norms_as_read([in_rows(at_least_float32(part))])[0]
            if step.capture.clipped is not None:
                step.capture.clipped[i] = norm  # type: ignore[index]  # a list or a tensor
        order = [self._reader.params.index(param) for param in self.params]
        sums, largest = self._sums(step, order)
        maxs = torch.cat([largest, *step.flags])
        self._ranks.share(sums, maxs)
        names = step.names
        if any(is_flattened(p) for _, p, _ in self.params):  # no rank may have a gradient
            with_grad = {name for (name, *_), n in zip(self.params, sums[:, 0].tolist(), strict=True) if n}
            names = [name for name in names if name in with_grad]
        by_param = self._columns(sums, maxs, skipped)
        return {name: own for (name, *_), own in zip(self.params, by_param, strict=True) if name in names}

    def _sums(self, step: ShardCapture, order: list[int]) -> tuple[Tensor, Tensor]:
        """Sums to add up over ranks, `(n_params, 16)`, and the largest finite |gradient|; -1 for none."""
        reader = step.capture.reader
        m = moments([step.capture])[0][order]
        norm, size, largest, nonfinite, rows, used, weight, mean, std, *tracked = m.unbind(1)
        n = numbers_to(m.device, reader.numels, m.dtype)[order]
        is_here = numbers_to(m.device, step.is_here, torch.bool)[order]
        n_rows = numbers_to(m.device, [s[0] if len(s) > 1 else 0 for s in reader.shapes], m.dtype)[order]
        around = (std.square() * (n - 1)).where(n > 1, 0.0)
        of_grad = [n, norm.square(), size, nonfinite, rows, n_rows, used.square()]
        of_weights = [n, n * mean, weight.square(), around, n * mean.square()]
        of_weights += [x.square() * (n / n.clamp(max=SKETCH)) for x in tracked]
        sums = torch.stack(of_grad, 1).where(is_here[:, None], 0.0)
        return torch.cat([sums, torch.stack(of_weights, 1).where(n[:, None] > 0, 0.0)], 1), largest.where(
            is_here, -1.0
        )

    def _columns(self, sums: Tensor, maxs: Tensor, skipped: Number) -> Tensor:
        """Statistics from sums and maxima over all ranks, `(n_params, 1, n_columns)`."""
        (
            n_grad,
            norm,
            size,
            nonfinite,
            rows,
            n_rows,
            used,
            n_weights,
            total,
            of_weights,
            around,
            of_means,
            *tracked,
        ) = sums.unbind(1)
        n = numbers_to(sums.device, [*self.numels.values()], sums.dtype) if self._is_merged else n_weights
        in_grad, in_weights = n_grad / n, n_weights / n  # replicas count once: each has added the same
        mean = total / n_weights
        around = (around + of_means - total * mean).clamp(min=0) / in_weights
        largest, *flags = torch.split(maxs, [len(n), *filter(None, self._n_rows)])
        left = iter(flags)
        for i, n_flags in enumerate(self._n_rows):
            if n_flags:
                rows[i], n_rows[i] = next(left).sum(), n_flags
        merged = [(norm / in_grad).sqrt(), size / in_grad, largest, (nonfinite / in_grad).round(), rows]
        merged += [(used / in_grad).sqrt(), (of_weights / in_weights).sqrt(), mean, (around / (n - 1)).sqrt()]
        merged += [x.sqrt() for x in tracked]
        whole = torch.stack(merged, 1)[None]
        return columns_of(whole, n, n_rows, torch.as_tensor(skipped, device=n.device)[None]).to(
            self._reader.dtype
        )


def count_nonfinite(params: Sequence[Param], ranks: Ranks) -> list[float]:
    """Numbers of NaN and infinite elements in gradients of sharded parameters; all ranks must call it."""
    counts = []
    for param in params:
        x = None if param.p.grad is None else plain_gradient(param.p.grad)
        counts.append(0.0 if x is None else float(x.isfinite().logical_not_().sum()))
    return ranks.sum(counts)


def _needs_flags(p: Tensor) -> bool:
    return p.ndim > 1 and is_dtensor(p) and is_divided(p) and not has_whole_rows(p)
