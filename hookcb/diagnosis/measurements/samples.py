"""Samples of weights, and how two of them differ, parameter by parameter, without a device sync."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hookcb.gradients.samples import SKETCH, Gather, can_gather, works_on
from hookcb.processes.shards import local_part, local_parts

N_NARROW = 32  # elements of each matrix that are copied in every step
WILD = 10.0  # times the largest element of the parameter; a written element that is larger is corrupt
PAD = 0.25  # of the range of an element's earlier values, by which it is widened on both sides
# columns of a table: how many elements have changed, sums over these, and how many of them have a new value
# that is no larger, is among earlier ones, is that of the beginning, is wild, or is zero
COLUMNS = (
    *("n", "n_changed", "change", "before", "after", "product", "moved"),
    *("n_smaller", "n_earlier", "n_first", "n_wild", "n_zero"),
)


class Group:
    """Parameters on one device and of one dtype, of which samples are taken together.

    It holds views of some elements of each, so that a sample is one operation, and no parameter.

    Args:
        params: the parameters.
        places: their indices in the list of all.

    Attributes:
        places: the same.
        lengths: number of elements of each in a wide sample.
    """

    def __init__(self, params: Sequence[Tensor], places: Sequence[int]) -> None:
        self.places = list(places)
        self._tables: dict[int, Tensor] = {}
        self._view(params)

    def _view(self, params: Sequence[Tensor]) -> None:
        parts = [flat(p) for p in params]
        self._wide = [spread(x) for x in parts]
        are_vectors = all(p.ndim < 2 for p in params)
        self.lengths = [len(view) for view in self._wide]
        self._n_narrow = [N_NARROW * (p.ndim > 1 or are_vectors) for p in params]
        some = zip(parts, self._n_narrow, strict=True)
        self._narrow = [x[len(x) // 2 :][:n] for x, n in some if n]
        self._addresses = self._at(params)

    def narrow(self) -> Tensor:
        """Copies up to 32 elements of each matrix; of each parameter if there are only vectors."""
        return torch.cat(self._narrow)

    def wide(self, params: Sequence[Tensor]) -> Tensor:
        """Copies up to 1,024 elements of each parameter."""
        self.follow(params)
        return torch.cat(self._wide)

    def follow(self, params: Sequence[Tensor]) -> None:
        """Takes new views of the same parameters, if the data of any was replaced."""
        if self._at(params) != self._addresses:
            self._view(params)

    def _at(self, params: Sequence[Tensor]) -> list[int]:
        return [x.data_ptr() for x in local_parts(params)]

    def owners(self, x: Tensor) -> Tensor:
        """Index of the parameter that each element of a sample is of."""
        if len(x) not in self._tables:
            wide, few = self.lengths, iter(self._narrow)
            narrow = [len(next(few)) if n else 0 for n in self._n_narrow]
            sizes = torch.tensor(wide if sum(wide) == len(x) else narrow, device="cpu")
            index = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes)
            self._tables[len(x)] = index.to(x.device, non_blocking=True)
        return self._tables[len(x)]

    def sums(self, x: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """Sums of columns over the elements of each parameter, `(n_params, n_columns)`."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        table = torch.stack([column.to(dtype) for column in columns], 1)
        return table.new_zeros(len(self.places), len(columns)).index_add_(0, self.owners(x), table)


class Range:
    """Values that the elements of a sample have had: the first ones, the smallest and the largest."""

    def __init__(self, x: Tensor) -> None:
        self.first, self.low, self.high = x, x.clone(), x.clone()

    def add(self, x: Tensor) -> None:
        torch.minimum(self.low, x, out=self.low)
        torch.maximum(self.high, x, out=self.high)


def flat(x: Tensor) -> Tensor:
    """All elements of this rank's part, in their order in memory; a view, if they are adjacent there."""
    x = local_part(x.detach())
    x = torch.view_as_real(x) if x.is_complex() else x
    if not x.is_contiguous():
        x = x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))
    return x.reshape(-1)


def spread(x: Tensor) -> Tensor:
    """A view of up to 1,024 elements of a flat tensor, at equal distances."""
    step = -(-len(x) // SKETCH)
    return x[(len(x) - 1) % step // 2 :: step]


def spread_copy(xs: Sequence[Tensor]) -> Tensor:
    """Copies the elements of `spread` of tensors of one dtype and device, in one operation."""
    parts, dtype = local_parts(xs), xs[0].dtype
    if works_on(parts[0].device) and all([x.dtype is dtype and can_gather(x) for x in parts]):
        return Gather(parts[0].device, dtype).of(parts, _spread_places)
    return torch.cat([spread(flat(x)) for x in parts])


@lru_cache(maxsize=256)
def _spread_places(n: int) -> Tensor:
    return spread(torch.arange(n, device="cpu"))


def differ(x: Tensor, y: Tensor) -> Tensor:
    """True for elements that differ; NaN is equal to NaN."""
    return (x != y) & ~(x.isnan() & y.isnan())


def written(group: Group, before: Tensor, after: Tensor, seen: Range) -> Tensor:
    """Numbers of what has changed in each parameter, `(n_params, len(COLUMNS))`."""
    index, n = group.owners(before), len(group.places)
    dtype = torch.promote_types(before.dtype, torch.float32)
    before, after = before.to(dtype), after.to(dtype)
    changed = differ(before, after)
    size = before.abs()
    largest = size.new_zeros(n).scatter_reduce_(0, index, size, "amax")[index]
    pad = PAD * (seen.high - seen.low)
    smaller = (after.abs() <= size) & (after * before >= 0)
    earlier = (after >= seen.low - pad) & (after <= seen.high + pad)
    of_change = [(after - before).square(), before.square(), after.square(), after * before]
    numbers = [*of_change, (before - seen.first).square()]
    flags = [smaller, earlier, after == seen.first, ~(after.abs() <= WILD * largest), after == 0]
    columns = [torch.where(changed, x, 0.0) for x in numbers]
    return group.sums(before, [torch.ones_like(before), changed, *columns, *(changed & x for x in flags)])
