"""ShardReader: statistics of parameters of which each rank has a part, merged by two reductions a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hookcb.core.alone import Ranks
from hookcb.core.precision import moved, numbers_to, widened, widest
from hookcb.core.torch_private import is_flattened
from hookcb.gradients.samples import sketch_copy
from hookcb.gradients.stats import (
    WHOLE,
    Number,
    elements_of,
    number_of,
    plain_gradient,
    summarize_gradient,
)
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

Columns = dict[str, Tensor]  # statistics of a step, (1, n_columns), by name of the parameter

OF_GRADIENT = 7  # sums over a gradient: elements, squares, magnitudes, NaN and inf, zero rows, rows, clipped
# sums over weights: elements, Σ and Σ² around the pivot, and Σ² of those before, change, at the start, drift
OF_WEIGHTS = 7


@dataclass(slots=True)
class ShardCapture:
    """Numbers captured around one step, for this rank's part of each sharded parameter.

    Attributes:
        grads: sums over each gradient, as many as `OF_GRADIENT`.
        abs_max: the largest finite |gradient|; -1 if there is none.
        rows: whether each row of the gradient is not zero, for parameters that are not divided by rows.
        before: tracked weights before the step.
        names: parameters with a gradient.
        unsummed: gradients at the step of which the ranks have summands, by index of the parameter.
    """

    grads: list[list[Number]] = field(default_factory=list)
    abs_max: list[Number] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    unsummed: dict[int, Tensor] = field(default_factory=dict)


class ShardReader:
    """Captures this rank's parts of gradients and weights, and merges their statistics.

    What it communicates depends on the parameters only, and not on what is in them: as many numbers for each.

    Args:
        params: sharded parameters.
        sizes: numbers of elements on all ranks together, by id, of parameters that do not tell it.
        starts: tracked elements of each parameter before its first step, by name; it is added to.
        pivots: mean of the weights of each parameter at its first step, by name, around which sums keep their
            digits; it is added to.
        ranks: the ranks that share their sums; alone, as under `watch`, statistics are those of the part.
    """

    def __init__(
        self,
        params: Sequence[Param],
        sizes: dict[int, int],
        starts: dict[str, Tensor],
        pivots: dict[str, Tensor],
        ranks: Ranks,
    ) -> None:
        self.params, self._starts, self._pivots, self._ranks = params, starts, pivots, ranks
        self._is_merged = ranks.world > 1
        self.numels = {id(p): sizes.get(id(p), p.numel()) for _, p, _ in params}
        # of parameters that are divided along other dimensions than the first: a flag for each row
        self._n_rows = [p.shape[0] if self._is_merged and _needs_flags(p) else 0 for _, p, _ in params]
        self.device = local_part(params[0].p).device
        is_double = any(p.dtype in (torch.float64, torch.complex128) for _, p, _ in params)
        self._dtype = torch.float64 if is_double else torch.float32

    @torch.no_grad()
    def before_step(self, grads: dict[str, Tensor | None], grad_scale: Number) -> ShardCapture:
        """Captures weights, and gradients by name, `grad_scale` times too large; None if none is here."""
        capture = ShardCapture(names=list(grads))
        for (name, p, _), n_rows in zip(self.params, self._n_rows, strict=True):
            g = grads.get(name)
            x = None if g is None else self._read(g, grad_scale)
            numbers, largest, rows = _of_gradient(x)
            capture.grads.append(numbers)
            capture.abs_max.append(largest)
            if n_rows:
                flags = torch.zeros(n_rows, dtype=widest(self.device), device=self.device)
                if x is not None and g is not None:
                    first = first_row(g)  # None if rows are divided in a way that leaves them apart
                    begin, end = (0, n_rows) if first is None else (first, first + len(rows))
                    flags[begin:end] = math.nan if first is None else (rows != 0).to(flags.dtype)
                capture.rows.append(flags)
            capture.before.append(_tracked(p))
        return capture

    def at_step(self, capture: ShardCapture) -> None:
        """Captures gradients as the optimizer gets them."""
        for i, (name, p, _) in enumerate(self.params):
            if name in capture.names:
                if p.grad is not None and is_partial(p.grad):
                    capture.unsummed[i] = p.grad.clone()  # an optimizer's hook must not communicate
                    continue
                x = None if p.grad is None else plain_gradient(p.grad)
                capture.grads[i][-1] = 0.0 if x is None else _of_gradient(x)[0][1]

    @torch.no_grad()
    def after_step(self, capture: ShardCapture, skipped: Number) -> Columns:
        """Captures the updated weights; merges everything, and returns the statistics of this step.

        All ranks must call it at the same step.
        """
        for i, g in capture.unsummed.items():
            capture.grads[i][-1] = _of_gradient(self._read(g, 1.0))[0][1]
        weights, pivots = [], self._agree_on_pivots()
        for (name, p, _), before in zip(self.params, capture.before, strict=True):
            now, start = _tracked(p), self._starts.get(name)
            if start is None or len(start) != len(now):
                start = self._starts[name] = before
            weights.append(_of_weights(p, self._pivots[name], before, now, start.to(now)))
        rows = [row + own for row, own in zip(capture.grads, weights, strict=True)]
        sums = self._on_device([x for row in rows for x in row])
        maxs = torch.cat([self._on_device(capture.abs_max), *capture.rows])
        self._ranks.share(sums, maxs)
        if any(is_flattened(p) for _, p, _ in self.params):  # no rank may have a gradient
            n_grad = sums.view(len(rows), -1)[:, 0].tolist()
            with_grad = {name for (name, *_), n in zip(self.params, n_grad, strict=True) if n}
            capture.names = [name for name in capture.names if name in with_grad]
        by_param = self._columns(sums.view(len(rows), -1), maxs, pivots, skipped)
        return {
            name: column[None]
            for (name, *_), column in zip(self.params, by_param, strict=True)
            if name in capture.names
        }

    def _agree_on_pivots(self) -> Tensor:
        """The pivots of all parameters; of new ones, ranks share their sums of weights."""
        if not all(name in self._pivots for name, *_ in self.params):
            weights = [_weights(p, _tracked(p)) for _, p, _ in self.params]
            sums = self._on_device([x for w in weights for x in (float(w.numel()), number_of(w.sum()))])
            self._ranks.share(sums, sums.new_zeros(1))
            means = (sums[1::2] / sums[::2]).nan_to_num(posinf=0.0, neginf=0.0)
            for (name, *_), mean in zip(self.params, means, strict=True):
                self._pivots.setdefault(name, mean)
        return torch.stack([self._pivots[name].to(self.device) for name, *_ in self.params])

    def _read(self, g: Tensor, scale: Number) -> Tensor | None:
        """This rank's part of a gradient; None if it cannot be read, or summed."""
        if is_partial(g):
            if not self._is_merged:
                return None
            g = summed(g)
        x = plain_gradient(g)
        return x if x is None or (isinstance(scale, float) and scale == 1) else x / scale

    def _on_device(self, numbers: Sequence[Number]) -> Tensor:
        if self.device.type == "cpu":
            return torch.tensor(numbers, dtype=torch.float64, device="cpu")
        whole = [x if isinstance(x, Tensor) else torch.full((), x, device=self.device) for x in numbers]
        return torch.stack([moved(x, self.device) for x in whole])

    def _columns(self, sums: Tensor, maxs: Tensor, pivots: Tensor, skipped: Number) -> Tensor:
        """Statistics from sums and maxima, in the order of `GRAD_STATS`, and mean |gradient|."""
        n_grad, squares, size, nonfinite, zero_rows, n_rows, clipped = sums[:, :OF_GRADIENT].unbind(1)
        n_weights, total, around, before, change, start, drift = sums[:, OF_GRADIENT:].unbind(1)
        n = n_weights
        if self._is_merged:  # replicas count once: each of them has added the same
            n = numbers_to(sums.device, [*self.numels.values()], sums.dtype)
            copies, around, total = n_grad / n, around * n / n_weights, total * n / n_weights
            squares, clipped, size = squares / copies, clipped / copies, size / copies
            nonfinite = (nonfinite / copies).round()
        norm, used, off = squares.sqrt(), clipped.sqrt(), total / n
        made = torch.as_tensor(skipped, device=norm.device) == 0
        abs_max, *flags = torch.split(maxs, [len(n), *filter(None, self._n_rows)])
        abs_max = abs_max.masked_fill(abs_max < 0, math.nan)
        zeros, left = zero_rows / n_rows, iter(flags)
        for i, n_flags in enumerate(self._n_rows):
            if n_flags:
                zeros[i] = 1 - next(left).mean()
        zeros = zeros.masked_fill(abs_max.isnan() & (nonfinite > 0), math.nan)  # no element is finite
        variance = (around - n * off.square()).clamp(min=0) / (n - 1)
        of_weights = around + pivots * (2 * total + n * pivots)
        ratios = [_ratio(change, before), _ratio(drift, start)]
        values = [norm, used.where(made, math.nan), norm / n.sqrt(), abs_max, nonfinite, zeros]
        values += [of_weights.clamp(min=0).sqrt(), pivots + off, variance.sqrt(), *ratios, size / n]
        return torch.stack(values, 1).to(self._dtype)


def count_nonfinite(params: Sequence[Param], ranks: Ranks) -> list[float]:
    """Numbers of NaN and infinite elements in gradients of sharded parameters; all ranks must call it."""
    counts = []
    for param in params:
        x = None if param.p.grad is None else plain_gradient(param.p.grad)
        counts.append(0.0 if x is None else float(elements_of(x).isfinite().logical_not_().sum()))
    return ranks.sum(counts)


def _needs_flags(p: Tensor) -> bool:
    return p.ndim > 1 and is_dtensor(p) and is_divided(p) and not has_whole_rows(p)


def _of_gradient(x: Tensor | None) -> tuple[list[Number], Number, Tensor]:
    """Sums over a part of a gradient, its largest finite magnitude, and norms of its rows."""
    if x is None or not x.numel():
        n = 0.0 if x is None or x.ndim < 2 else float(x.shape[0])
        return [0.0, 0.0, 0.0, 0.0, n, n, 0.0], -1.0, torch.zeros(int(n), device="cpu")
    rows, largest, nonfinite = summarize_gradient(x)
    squares = number_of(widened(rows).square().sum())
    size = number_of(elements_of(x).abs().sum())
    zeros, n = (number_of((rows == 0).sum()), float(len(rows))) if x.ndim > 1 else (0.0, 0.0)
    return [float(x.numel()), squares, size, nonfinite, zeros, n, squares], largest, rows


def _of_weights(p: Tensor, pivot: Tensor, before: Tensor, now: Tensor, start: Tensor) -> list[Number]:
    """Sums over a part of the weights, all of them up to a size, and over tracked ones."""
    n = float(local_part(p.detach()).numel())
    if not n:
        return [0.0] * OF_WEIGHTS
    off = _weights(p, now) - pivot.to(now)
    share = n / off.numel()
    of_all = [off.sum() * share, off.square().sum() * share]
    tracked = [x.square().sum() * (n / len(now)) for x in (before, now - before, start, now - start)]
    return [n, *map(number_of, [*of_all, *tracked])]


def _weights(p: Tensor, tracked: Tensor) -> Tensor:
    """This rank's part of the weights, in the widest dtype; of a large one, the tracked elements."""
    part = local_part(p.detach())
    whole = plain_gradient(part) if part.numel() <= WHOLE else None
    return tracked if whole is None else widened(elements_of(whole))


def _tracked(p: Tensor) -> Tensor:
    """Copy of the tracked elements of this rank's part, in the widest dtype; see `widest`."""
    return widened(sketch_copy(p))


def _ratio(change: Tensor, of: Tensor) -> Tensor:
    """Ratio of two norms from their squares; 0 if nothing has changed."""
    return torch.where(change == 0, change, (change / of).sqrt())
