"""ShardReader: statistics of parameters of which each rank has a part, merged by two reductions a step."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hookcb.core.alone import Ranks
from hookcb.core.precision import at_least_float32, numbers_to
from hookcb.core.torch_private import is_flattened
from hookcb.gradients.device import Capture, DeviceReader, Reduced, usable
from hookcb.gradients.samples import SKETCH
from hookcb.gradients.stats import Number, columns_of, in_rows, norms_as_read, row_norms
from hookcb.hooks.params import Param
from hookcb.processes.shards import (
    first_row,
    has_whole_rows,
    is_divided,
    is_dtensor,
    local_part,
)
from hookcb.records.memory import Memory

# sums over a gradient: elements, Σx², Σ|x|, NaN and inf, rows not zero, rows, Σx² at the step; then over
# weights: elements, Σ(x - pivot), Σ(x - pivot)², and Σx² of the tracked columns
OF_GRADIENT = 7
MEAN = 7  # the column of `moments` with the mean of the weights


class ShardReader(DeviceReader):
    """Reads this rank's parts of gradients and weights, and merges their statistics at each step.

    What it communicates depends on the parameters only, and not on what is in them: as many numbers for each.

    Args:
        params: sharded parameters, on one device, with or without a gradient.
        memory, starts: see `DeviceReader`.
        sizes: numbers of elements on all ranks together, by id, of parameters that do not tell it.
        pivots: means of the weights at their first step, by name, around which sums keep their digits; it is
            added to.
        ranks: the ranks that share their sums; alone, as under `watch`, statistics are those of the part.
    """

    is_wide = True

    def __init__(
        self,
        params: Sequence[Param],
        memory: Memory,
        starts: dict[str, Tensor],
        sizes: dict[int, int],
        pivots: dict[str, Tensor],
        ranks: Ranks,
    ) -> None:
        super().__init__(params, memory, starts)
        self._shared, self._means, self._ranks = params, pivots, ranks  # in the order of all ranks
        self._order = [self.names.index(name) for name, *_ in params]
        self._is_merged = ranks.world > 1
        self._n_whole = [sizes.get(id(p), p.numel()) for _, p, _ in params]
        # of parameters that are divided along other dimensions than the first: a flag for each row
        self._n_flags = [p.shape[0] if self._is_merged and _needs_flags(p) else 0 for _, p, _ in params]
        # of the step in progress: the parameters of whose gradients this rank has a part, whether each row is
        # not zero, and gradients at the step that are not divided as their parameters
        self._here: set[str] = set()
        self._flags: list[Tensor] = []
        self._unmoved: dict[str, Tensor] = {}

    @torch.no_grad()
    def before(self, grads: Mapping[str, Tensor | None], scale: Number, is_detailed: bool) -> Capture:
        """Numbers of gradients, in which all ranks take part, and of weights; always with details."""
        parts = {name: self._part(grads.get(name), p) for name, p, _ in self._shared}
        capture = super().before(parts, scale, is_detailed=True)
        capture.names = [name for name in self.names if name in grads]
        self._here = {name for name, x in parts.items() if x is not None and x.numel()}
        with_flags = [param for param, n in zip(self._shared, self._n_flags, strict=True) if n]
        self._flags, self._unmoved = [self._rows_of(p, parts[name]) for name, p, _ in with_flags], {}
        return capture

    def _weights(self) -> list[Tensor]:
        return [local_part(p) for _, p, _ in self.params]

    def _part(self, g: Tensor | None, p: Tensor) -> Tensor | None:
        """This rank's part of a gradient, divided as its parameter; None if it is unknown here."""
        part = None if g is None else divided_as(g.detach(), p, self._is_merged)
        return None if part is None else usable(part)

    def _rows_of(self, p: Tensor, part: Tensor | None) -> Tensor:
        flags = torch.zeros(p.shape[0], dtype=torch.float64, device=self.device)
        if part is not None and part.numel():
            first = first_row(p)  # None if rows are divided in a way that leaves them apart
            begin, end = (0, len(flags)) if first is None else (first, first + len(part))
            filled = row_norms(in_rows(at_least_float32(part))) != 0
            flags[begin:end] = math.nan if first is None else filled.to(flags.dtype)
        return flags

    def at_step(self, capture: Capture) -> None:
        """Reads the gradients again, as the optimizer gets them, whose hook must not communicate."""
        grads = {name: p.grad for name, p, _ in self.params}
        self._unmoved = {
            name: g.clone()
            for name, p, _ in self._shared
            if (g := grads[name]) is not None and not is_divided_as(g, p)
        }
        known = {name: g for name, g in grads.items() if g is not None and name not in self._unmoved}
        self._clip(capture, {name: usable(local_part(g.detach())) for name, g in known.items()})

    @torch.no_grad()
    def after(self, capture: Capture) -> None:
        """Reads the weights after the step, and merges everything; all ranks must call it together."""
        super().after(capture)
        self._move(capture)
        pivots = self._agree_on_pivots(capture)
        sums, largest = self._sums_of(self.moments([capture])[0][self._order])
        maxs = torch.cat([largest, *self._flags])
        self._ranks.share(sums, maxs)
        names = set(capture.names)
        if any(is_flattened(p) for _, p, _ in self._shared):  # no rank may have a gradient
            with_grad = zip(self._shared, sums[:, 0].tolist(), strict=True)
            names &= {name for (name, *_), n in with_grad if n}
        which = [i for i, (name, *_) in enumerate(self._shared) if name in names]
        capture.names = [self._shared[i].name for i in which]
        capture.merged = self._columns(sums, maxs, pivots, capture.skipped)[which]
        capture.before = capture.after = capture.before.new_empty(0)

    def reduced(self, captures: Sequence[Capture]) -> Reduced:
        """Statistics of the parameters in R steps."""
        return captures[0].names, torch.cat([c.merged for c in captures if c.merged is not None], 1)

    def _move(self, capture: Capture) -> None:
        """Divides gradients at the step as their parameters, and reads them."""
        for name, g in self._unmoved.items():
            i = self.names.index(name)
            part = self._part(g, self.params[i].p)
            norm = 0.0 if part is None else norms_as_read([in_rows(at_least_float32(part))])[0]
            capture.clipped[i] = norm  # type: ignore[index]  # a list or a tensor
        self._unmoved = {}

    def _agree_on_pivots(self, capture: Capture) -> Tensor:
        """Pivots of all parameters in the order of ranks; of new ones, ranks share their sums of weights."""
        if not all(name in self._means for name in self.names):
            self._pivots = None
            m = self.moments([capture])[0][self._order]
            n = self._in_order(self.numels, m)
            pairs = torch.stack([n, (n * m[:, MEAN]).where(n > 0, 0.0)])
            self._ranks.share(pairs, pairs.new_zeros(1))
            means = (pairs[1] / pairs[0]).nan_to_num(posinf=0.0, neginf=0.0)
            for (name, *_), mean in zip(self._shared, means, strict=True):
                self._means.setdefault(name, mean)
        if self._pivots is None:
            self._pivots = torch.stack([self._means[name].to(self.device) for name in self.names])
        return self._pivots[self._order]

    def _in_order(self, numbers: Sequence[float], m: Tensor) -> Tensor:
        return numbers_to(m.device, [numbers[i] for i in self._order], m.dtype)

    def _sums_of(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """Sums to add up over ranks, `(n_params, 14)`, and the largest finite |gradient|; -1 for none."""
        norm, size, largest, nonfinite, rows, used, _, off, std, *tracked = m.unbind(1)
        n, n_rows = self._in_order(self.numels, m), self._in_order(self.n_rows, m)
        is_here = self._in_order([name in self._here for name in self.names], m) > 0
        of_grad = [n, norm.square(), size, nonfinite, rows, n_rows, used.square()]
        around = (std.square() * (n - 1)).where(n > 1, 0.0) + n * off.square()
        of_weights = [n, n * off, around]
        of_weights += [x.square() * (n / n.clamp(max=SKETCH)) for x in tracked]
        sums = torch.stack(of_grad, 1).where(is_here[:, None], 0.0)
        sums = torch.cat([sums, torch.stack(of_weights, 1).where(n[:, None] > 0, 0.0)], 1)
        return sums, largest.where(is_here, -1.0)

    def _columns(self, sums: Tensor, maxs: Tensor, pivots: Tensor, skipped: Number) -> Tensor:
        """Statistics from sums and maxima over all ranks, `(n_params, 1, n_columns)`."""
        n_grad, norm, size, nonfinite, rows, n_rows, used = sums[:, :OF_GRADIENT].unbind(1)
        n_weights, off, around, *tracked = sums[:, OF_GRADIENT:].unbind(1)
        n = numbers_to(sums.device, self._n_whole, sums.dtype) if self._is_merged else n_weights
        in_grad, in_weights = n_grad / n, n_weights / n  # replicas count once: each has added the same
        largest, *flags = torch.split(maxs, [len(n), *filter(None, self._n_flags)])
        left = iter(flags)
        for i, n_flags in enumerate(self._n_flags):
            if n_flags:
                rows[i], n_rows[i] = next(left).sum(), n_flags
        weight = (around + pivots * (2 * off + n_weights * pivots)).clamp(min=0)
        around = (around - off.square() / n_weights).clamp(min=0) / in_weights
        merged = [(norm / in_grad).sqrt(), size / in_grad, largest, (nonfinite / in_grad).round(), rows]
        merged += [(used / in_grad).sqrt(), (weight / in_weights).sqrt(), pivots + off / n_weights]
        merged += [(around / (n - 1)).sqrt(), *(x.sqrt() for x in tracked)]
        made = torch.as_tensor(skipped, device=n.device)[None]
        return columns_of(torch.stack(merged, 1)[None], n, n_rows, made).to(self.dtype)


def is_divided_as(x: Tensor, p: Tensor) -> bool:
    """Whether a gradient is divided as its parameter, which torch promises of plain tensors only."""
    return not (is_dtensor(x) and is_dtensor(p)) or bool(x.placements == p.placements)  # type: ignore[attr-defined]


def divided_as(x: Tensor, p: Tensor, may_send: bool) -> Tensor | None:
    """This rank's part of a gradient, summed and divided as its parameter is; all ranks must call it.

    None if ranks have summands or other parts of it, and may not send them.
    """
    if is_divided_as(x, p):
        return local_part(x)
    from torch.distributed.tensor import Replicate

    now, wanted = x.placements, p.placements  # type: ignore[attr-defined]
    if not may_send and any(a != b and not a.is_replicate() for a, b in zip(now, wanted, strict=True)):
        return None
    summed = x.redistribute(placements=[Replicate() if a.is_partial() else a for a in now])  # type: ignore[attr-defined]
    return local_part(summed.redistribute(placements=wanted))


def _needs_flags(p: Tensor) -> bool:
    return p.ndim > 1 and is_dtensor(p) and is_divided(p) and not has_whole_rows(p)
