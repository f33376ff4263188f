"""Samples of weights, and how two of them differ, parameter by parameter, without a device sync."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hookcb.core.shards import local_part
from hookcb.core.torch_private import flattened
from hookcb.gradients.stats import sketch_copy

N_NARROW = 8  # elements of each parameter that are copied in every step
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

    It holds small views of them, and no parameter.

    Args:
        params: the parameters.
        places: their indices in the list of all.

    Attributes:
        places: the same.
    """

    def __init__(self, params: Sequence[Tensor], places: Sequence[int]) -> None:
        self.places = list(places)
        self._views = [_few(p) for p in params]
        self._tables: dict[int, tuple[Tensor, int]] = {}

    def narrow(self) -> Tensor:
        """Copies few elements of each parameter: one kernel."""
        return torch.cat(self._views)

    def wide(self, xs: Sequence[Tensor]) -> Tensor:
        """Copies up to 1,024 elements of each of these tensors, as many as there are parameters."""
        return self.joined([sketch_copy(x) for x in xs])

    def joined(self, samples: Sequence[Tensor]) -> Tensor:
        """Wide samples of all parameters as one."""
        self._sizes = [len(x) for x in samples]
        return flattened(list(samples))

    def renew(self, params: Sequence[Tensor]) -> None:
        """Takes new views of the same parameters, whose data may have been replaced."""
        self._views = [_few(p) for p in params]

    def owners(self, x: Tensor) -> tuple[Tensor, int]:
        """Index of the parameter that each element of a sample is of, and the number of parameters."""
        if len(x) not in self._tables:
            narrow = [len(view) for view in self._views]
            sizes = narrow if sum(narrow) == len(x) else self._sizes
            index = torch.repeat_interleave(
                torch.arange(len(sizes), device="cpu"), torch.tensor(sizes, device="cpu")
            )
            self._tables[len(x)] = index.to(x.device, non_blocking=True), len(sizes)
        return self._tables[len(x)]

    def sums(self, x: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """Sums of columns over the elements of each parameter, `(n_params, n_columns)`."""
        index, n = self.owners(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        table = torch.stack([column.to(dtype) for column in columns], 1)
        return table.new_zeros(n, len(columns)).index_add_(0, index, table)


class Range:
    """Values that the elements of a sample have had: the first ones, the smallest and the largest."""

    def __init__(self, x: Tensor) -> None:
        self.first, self.low, self.high = x, x.clone(), x.clone()

    def add(self, x: Tensor) -> None:
        torch.minimum(self.low, x, out=self.low)
        torch.maximum(self.high, x, out=self.high)


def _few(p: Tensor) -> Tensor:
    """A flat view of up to eight elements in the middle of a parameter."""
    x = local_part(p.detach())
    x = torch.view_as_real(x) if x.is_complex() else x
    while x.ndim > 1:
        x = x[len(x) // 2]
    return x.view(-1)[:N_NARROW] if x.ndim else x.view(1)


def differ(x: Tensor, y: Tensor) -> Tensor:
    """True for elements that differ; NaN is equal to NaN."""
    return (x != y) & ~(x.isnan() & y.isnan())


def written(group: Group, before: Tensor, after: Tensor, seen: Range) -> Tensor:
    """Numbers of what has changed in each parameter, `(n_params, len(COLUMNS))`."""
    index, n = group.owners(before)
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
