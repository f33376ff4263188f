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
from hookcb.gradients.reduce import MEAN, columns_of, moments
from hookcb.gradients.samples import SKETCH
from hookcb.gradients.stats import Number, in_rows, norms_as_read, plain_gradient, row_norms
from hookcb.hooks.params import Param
from hookcb.processes.shards import (
    divided_as,
    first_row,
    has_whole_rows,
    is_divided,
    is_divided_as,
    is_dtensor,
    local_part,
)
from hookcb.records.memory import Memory

Columns = dict[str, Tensor]  # statistics of a step, (1, n_columns), by name of the parameter
# sums over a gradient: elements, Σx², Σ|x|, NaN and inf, rows not zero, rows, Σx² at the step; then over
# weights: elements, Σ around the pivot, Σx², Σ(x - mean)², Σ(mean - pivot)², and Σx² of the tracked columns
OF_GRADIENT = 7


@dataclass(slots=True)
class ShardCapture:
    """Numbers captured around one step, for this rank's part of each sharded parameter.

    Attributes:
        capture: numbers of the parts; those of a gradient that is not here are of zeros.
        names: parameters with a gradient, on this rank or on others.
        is_here: whether this rank has a part of the gradient, by parameter in the order of the reader.
        flags: whether each row of the gradient is not zero, for parameters that are not divided by rows.
        unmoved: gradients at the step that are not divided as their parameter, by index in the reader.
    """

    capture: Capture
    names: list[str]
    is_here: list[bool]
    flags: list[Tensor]
    unmoved: dict[int, Tensor] = field(default_factory=dict)


class ShardReader:
    """Captures this rank's parts of gradients and weights, and merges their statistics.

    What it communicates depends on the parameters only, and not on what is in them: as many numbers for each.

    Args:
        params: sharded parameters, on one device.
        sizes: numbers of elements on all ranks together, by id, of parameters that do not tell it.
        pivots: means of the weights at their first step, by name, around which sums keep their digits; it is
            added to.
        ranks: the ranks that share their sums; alone, as under `watch`, statistics are those of the part.
        memory: lends memory for copies.
    """

    def __init__(
        self,
        params: Sequence[Param],
        sizes: dict[int, int],
        pivots: dict[str, Tensor],
        ranks: Ranks,
        memory: Memory,
    ) -> None:
        self.params, self._pivots, self._ranks, self._memory = params, pivots, ranks, memory
        self._is_merged = ranks.world > 1
        self.numels = {id(p): sizes.get(id(p), p.numel()) for _, p, _ in params}
        # of parameters that are divided along other dimensions than the first: a flag for each row
        self._n_rows = [p.shape[0] if self._is_merged and _needs_flags(p) else 0 for _, p, _ in params]
        self._arrange()

    def _arrange(self) -> None:
        self._reader = DeviceReader(self.params, self._memory)
        place = {param.name: i for i, param in enumerate(self._reader.params)}
        self._order = [place[name] for name, *_ in self.params]  # which all ranks have in common

    @torch.no_grad()
    def before_step(self, grads: dict[str, Tensor | None], grad_scale: Number) -> ShardCapture:
        """Captures weights, and gradients by name, `grad_scale` times too large; None if none is here."""
        if self._reader.numels != [local_part(param.p).numel() for param in self._reader.params]:
            self._arrange()
        # in the order of all ranks, as moving a gradient is a collective
        found = {name: self._part(grads.get(name), p) for name, p, _ in self.params}
        parts = [found[name] for name, *_ in self._reader.params]
        capture = self._reader.before(parts, grad_scale, is_detailed=True)
        is_here = [x is not None and x.numel() > 0 for x in parts]
        with_flags = [param for param, n in zip(self.params, self._n_rows, strict=True) if n]
        flags = [self._flags(p, found[name]) for name, p, _ in with_flags]
        return ShardCapture(capture, list(grads), is_here, flags)

    def _part(self, g: Tensor | None, p: Tensor) -> Tensor | None:
        """This rank's part of a gradient, divided as its parameter; None if it is unknown here."""
        part = None if g is None else divided_as(g.detach(), p, self._is_merged)
        return None if part is None else usable(part)

    def _flags(self, p: Tensor, part: Tensor | None) -> Tensor:
        flags = torch.zeros(p.shape[0], dtype=torch.float64, device=self._reader.device)
        if part is not None and part.numel():
            first = first_row(p)  # None if rows are divided in a way that leaves them apart
            begin, end = (0, len(flags)) if first is None else (first, first + len(part))
            filled = row_norms(in_rows(at_least_float32(part))) != 0
            flags[begin:end] = math.nan if first is None else filled.to(flags.dtype)
        return flags

    def at_step(self, step: ShardCapture) -> None:
        """Captures gradients as the optimizer gets them, whose hook must not communicate."""
        grads = [param.p.grad for param in self._reader.params]
        for i, (g, param) in enumerate(zip(grads, self._reader.params, strict=True)):
            if g is not None and not is_divided_as(g, param.p):
                step.unmoved[i], grads[i] = g.clone(), None
        self._reader.at_step(step.capture, grads)

    @torch.no_grad()
    def after_step(self, step: ShardCapture, skipped: Number) -> Columns:
        """Merges what was captured around a step on all ranks, and returns the statistics of this step.

        All ranks must call it at the same step.
        """
        self._move(step)
        m = moments([step.capture])[0][self._order]
        pivots = self._agree_on_pivots(m)
        sums, largest = self._sums(step, m, pivots)
        maxs = torch.cat([largest, *step.flags])
        self._ranks.share(sums, maxs)
        names = step.names
        if any(is_flattened(p) for _, p, _ in self.params):  # no rank may have a gradient
            with_grad = {name for (name, *_), n in zip(self.params, sums[:, 0].tolist(), strict=True) if n}
            names = [name for name in names if name in with_grad]
        by_param = self._columns(sums, maxs, pivots, skipped)
        return {name: own for (name, *_), own in zip(self.params, by_param, strict=True) if name in names}

    def _move(self, step: ShardCapture) -> None:
        """Divides gradients at the step as their parameters, and reads them."""
        clipped = step.capture.clipped
        for i in self._order:
            if (g := step.unmoved.pop(i, None)) is not None and clipped is not None:
                part = self._part(g, self._reader.params[i].p)
                norm = 0.0 if part is None else norms_as_read([in_rows(at_least_float32(part))])[0]
                clipped[i] = norm  # type: ignore[index]  # a list or a tensor

    def _agree_on_pivots(self, m: Tensor) -> Tensor:
        """The pivots of all parameters; of new ones, ranks share their sums of weights."""
        if not all(name in self._pivots for name, *_ in self.params):
            n = self._n_here(m)
            pairs = torch.stack([n, (n * m[:, MEAN]).where(n > 0, 0.0)])
            self._ranks.share(pairs, pairs.new_zeros(1))
            means = (pairs[1] / pairs[0]).nan_to_num(posinf=0.0, neginf=0.0)
            for (name, *_), mean in zip(self.params, means, strict=True):
                self._pivots.setdefault(name, mean)
        return torch.stack([self._pivots[name].to(m.device) for name, *_ in self.params])

    def _n_here(self, m: Tensor) -> Tensor:
        return numbers_to(m.device, self._reader.numels, m.dtype)[self._order]

    def _sums(self, step: ShardCapture, m: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor]:
        """Sums to add up over ranks, `(n_params, 16)`, and the largest finite |gradient|; -1 for none."""
        norm, size, largest, nonfinite, rows, used, weight, mean, std, *tracked = m.unbind(1)
        n, n_rows = self._n_here(m), numbers_to(m.device, self._reader.n_rows, m.dtype)[self._order]
        is_here = numbers_to(m.device, step.is_here, torch.bool)[self._order]
        of_grad = [n, norm.square(), size, nonfinite, rows, n_rows, used.square()]
        off, around = mean - pivots, (std.square() * (n - 1)).where(n > 1, 0.0)
        of_weights = [n, n * off, weight.square(), around, n * off.square()]
        of_weights += [x.square() * (n / n.clamp(max=SKETCH)) for x in tracked]
        sums = torch.stack(of_grad, 1).where(is_here[:, None], 0.0)
        sums = torch.cat([sums, torch.stack(of_weights, 1).where(n[:, None] > 0, 0.0)], 1)
        return sums, largest.where(is_here, -1.0)

    def _columns(self, sums: Tensor, maxs: Tensor, pivots: Tensor, skipped: Number) -> Tensor:
        """Statistics from sums and maxima over all ranks, `(n_params, 1, n_columns)`."""
        n_grad, norm, size, nonfinite, rows, n_rows, used = sums[:, :OF_GRADIENT].unbind(1)
        n_weights, off, weight, around, apart, *tracked = sums[:, OF_GRADIENT:].unbind(1)
        n = numbers_to(sums.device, [*self.numels.values()], sums.dtype) if self._is_merged else n_weights
        in_grad, in_weights = n_grad / n, n_weights / n  # replicas count once: each has added the same
        largest, *flags = torch.split(maxs, [len(n), *filter(None, self._n_rows)])
        left = iter(flags)
        for i, n_flags in enumerate(self._n_rows):
            if n_flags:
                rows[i], n_rows[i] = next(left).sum(), n_flags
        around = (around + apart - off.square() / n_weights).clamp(min=0) / in_weights
        merged = [(norm / in_grad).sqrt(), size / in_grad, largest, (nonfinite / in_grad).round(), rows]
        merged += [(used / in_grad).sqrt(), (weight / in_weights).sqrt(), pivots + off / n_weights]
        merged += [(around / (n - 1)).sqrt(), *(x.sqrt() for x in tracked)]
        made = torch.as_tensor(skipped, device=n.device)[None]
        return columns_of(torch.stack(merged, 1)[None], n, n_rows, made).to(self._reader.dtype)


def count_nonfinite(params: Sequence[Param], ranks: Ranks) -> list[float]:
    """Numbers of NaN and infinite elements in gradients of sharded parameters; all ranks must call it."""
    counts = []
    for param in params:
        x = None if param.p.grad is None else plain_gradient(param.p.grad)
        counts.append(0.0 if x is None else float(x.isfinite().logical_not_().sum()))
    return ranks.sum(counts)


def _needs_flags(p: Tensor) -> bool:
    return p.ndim > 1 and is_dtensor(p) and is_divided(p) and not has_whole_rows(p)
