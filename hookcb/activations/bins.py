"""Bins of histograms: fixed, and equal for all layers, records and ranks, so that counts can be added.

By default they are logarithmic on both sides of 0, so that one set of them fits every layer.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.core.precision import widest

SHOWN = 0.99  # share of a layer's elements that the bins of a picture hold, if these were counted
LEAST, MOST = -10, 10  # powers of 2 at which logarithmic bins begin and end on both sides of 0


class Bins(NamedTuple):
    """Bins of equal width in `ends`; without ends, of equal ratio from 2⁻¹⁰ to 2¹⁰ on both sides of 0.

    The bin next to 0 begins at 0; if their number is odd, one lies around it.

    >>> Bins(6).edges.tolist()
    [-1024.0, -1.0, -0.0009765625, 0.0, 0.0009765625, 1.0, 1024.0]
    """

    n: int
    ends: tuple[float, float] | None = None

    @property
    def edges(self) -> Tensor:
        """Edges of the bins, `(n + 1,)`, float64."""
        if self.ends is not None:
            return torch.linspace(*self.ends, self.n + 1, dtype=torch.float64, device="cpu")
        k = (self.n + 1) // 2
        powers = torch.linspace(LEAST, MOST, k, dtype=torch.float64, device="cpu")
        above = torch.exp2(powers if k > 1 else powers + MOST - LEAST)
        return torch.cat([-above.flip(0), above.new_zeros(1 - self.n % 2), above])

    @property
    def scale(self) -> tuple[float, float, int]:
        """Origin, extent and number of steps of x between `ends`, or of log2(|x|) beyond the first bin."""
        if self.ends is not None:
            low, high = self.ends
            return low, high - low, self.n
        k = (self.n + 1) // 2
        return (LEAST, MOST - LEAST, k - 1) if k > 1 else (MOST, 1, 1)

    def counts_of(self, rows: Tensor) -> Tensor:
        """Numbers of elements of each row, below the bins, in each of them, and above; NaN is in none.

        Args:
            rows: `(R, m)`, float32 or float64.

        Returns:
            `(R, n + 2)`, float32 or, where that is not exact, float64.
        """
        n = self.n + 3  # the last is that of NaN
        slots = self._slots(rows).nan_to_num_(nan=n - 1).int()
        slots += torch.arange(0, n * len(rows), n, dtype=slots.dtype, device=rows.device)[:, None]
        dtype = torch.float32 if rows.shape[1] < 2**24 else widest(rows.device)
        if rows.is_cpu and not torch.compiler.is_compiling():  # elsewhere it waits for the device
            counts = torch.bincount(slots.view(-1), minlength=n * len(rows)).to(dtype)
        else:
            one = rows.new_ones((), dtype=dtype)
            counts = rows.new_zeros(n * len(rows), dtype=dtype)
            # of one dimension, as torch's deterministic algorithms take no other
            counts.scatter_add_(0, slots.view(-1).long(), one.expand(slots.numel()))
        return counts.view(len(rows), n)[:, :-1]

    def _slots(self, rows: Tensor) -> Tensor:
        """Place of each element among the counts, as a float; NaN for NaN."""
        origin, extent, steps = self.scale
        if self.ends is not None:
            # what is above is found by the edge itself, as products are rounded
            place = rows.sub(origin).div_(extent).mul_(steps).clamp_(-1, self.n - 1).floor_().add_(1)
            return place.add_(rows.clone().gt_(self.ends[1]))
        k, is_odd = (self.n + 1) // 2, self.n % 2
        place = rows.abs().log2_().sub_(origin).div_(extent).mul_(steps).clamp_(-1, k - 1).floor_()
        return place.add_(1.0 if is_odd else 1.5).copysign_(rows).add_((self.n + 1) / 2)


def trimmed(counts: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """The bins that hold 99 % of the elements in all records; what is in others counts as beyond them.

    Takes counts `(n_records, n + 2)`, NaN if the layer was not called, and edges `(n + 1,)`; returns such of
    fewer bins, the counts in float64.
    """
    counts, n = counts.double(), len(edges) - 1
    total = counts.nan_to_num(0).sum(0)
    spare = (1 - SHOWN) / 2 * total.sum()  # at each end
    first, last = (int((ends.cumsum(0)[1:-1] <= spare).sum()) for ends in (total, total.flip(0)))
    if first + last >= n:
        return counts, edges
    ends = counts[:, : first + 1].sum(1, True), counts[:, n - last + 1 :].sum(1, True)
    return torch.cat([ends[0], counts[:, first + 1 : n - last + 1], ends[1]], 1), edges[first : n + 1 - last]


def from_levels(store: dict[str, Any], ranges: Mapping[str, Any], edges: Tensor) -> dict[str, Any]:
    """State of a store with the bins of all layers, from that of an older version.

    There each record had a level k: its bins were 2ᵏ times as wide as those of the layer's range, and one
    edge was the same at all levels: an end that was 0, else the middle. Counts are spread evenly.

    Args:
        store: state of a store in which the last columns are counts and their level.
        ranges: range of each layer at level 0.
        edges: edges of the bins.
    """
    first, values, far = store["columns"].index("bin 0"), {}, edges.new_tensor([torch.inf])
    n = len(store["columns"]) - first - 3
    lows, highs = torch.cat([-far, edges]), torch.cat([edges, far])
    for name, x in store["values"].items():
        low, high = ranges.get(name, (0.0, 1.0))
        still = 0 if low == 0 else n if high == 0 else n // 2
        width = (high - low) / n * torch.exp2(x[:, -1].double().nan_to_num(0))[:, None, None]
        places = torch.arange(n, dtype=torch.float64, device="cpu")[:, None] - still
        begins = low + still * (high - low) / n + places * width
        shares = (torch.minimum(begins + width, highs) - torch.maximum(begins, lows)).clamp(min=0) / width
        counts = x[:, first:-1].double()
        new = (counts[:, None, 1:-1] @ shares).squeeze(1)
        new[:, 0] += counts[:, 0]
        new[:, -1] += counts[:, -1]
        values[name] = torch.cat([x[:, :first], new.to(x.dtype)], 1)
    return store | {"columns": store["columns"][:-1], "values": values}
