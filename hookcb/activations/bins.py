"""Ranges of histograms: each record has one that fits it, 2ᵏ times as wide as the first one; all are joined.

One edge of the bins is the same at every level k: an end of the range that is 0, as after a ReLU, else the
middle. So the bins of a level are parts of those of a higher one, and counts can be joined without a guess.
"""

import torch
from torch import Tensor

HELD = 0.99  # share of the values of all records that the joined range holds
PICKED = 256  # elements by which a range is chosen, so that it holds 99 % of these
MAX_LEVEL = 60  # more would exceed the numbers of float32


def level_of(rows: Tensor, ranges: Tensor, bins: int) -> Tensor:
    """Levels at which ranges hold nearly all elements of rows.

    Args:
        rows: `(R, n)`.
        ranges: ranges at level 0, `(R, 2)`.
        bins: number of bins.

    Returns:
        `(R,)`, whole numbers in the dtype of `ranges`.
    """
    still = n_below(ranges, bins)
    width = (ranges[:, 1] - ranges[:, 0]) / bins
    center = ranges[:, 0] + still * width
    some = rows[:, :: max(1, rows.shape[1] // PICKED) | 1].to(ranges.dtype)  # odd: not always of one channel
    some = torch.where(some.isfinite(), some - center[:, None], 0.0)
    if not some.shape[1]:
        return torch.zeros_like(center)
    # nothing can be done for elements beyond an end that stays
    above = torch.where(still < bins, 1 / ((bins - still) * width), 0.0)[:, None]
    below = torch.where(still > 0, -1 / (still * width), 0.0)[:, None]
    n_outside = round((1 - HELD) * some.shape[1])
    reach = (some * torch.where(some > 0, above, below)).topk(1 + n_outside, 1).values[:, -1]
    mantissa, exponent = torch.frexp(reach)
    return (exponent - mantissa.eq(0.5).int()).clamp(-MAX_LEVEL, MAX_LEVEL).to(ranges.dtype)


def n_below(ranges: Tensor, bins: int) -> Tensor:
    """Number of bins below the edge that is the same at all levels, `(R,)`."""
    low, high = ranges.unbind(-1)
    at_end = torch.where(high == 0, float(bins), float(bins // 2))
    return torch.where(low == 0, 0.0, at_end).to(ranges.dtype)


def at_level(ranges: Tensor, levels: Tensor, bins: int) -> Tensor:
    """Ranges `(R, 2)` at levels `(R,)`."""
    still = n_below(ranges, bins)
    width = (ranges[:, 1] - ranges[:, 0]) / bins
    center, width = ranges[:, 0] + still * width, width * torch.exp2(levels)
    moved = torch.stack([center - still * width, center + (bins - still) * width], 1)
    return torch.where(levels[:, None] == 0, ranges, moved)  # exactly, without rounding


def join(counts: Tensor, levels: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Counts at different levels, as counts of the narrowest range that holds 99 % of them.

    The counts of a record with a wider range are spread evenly over the narrower bins.

    Args:
        counts: `(n_records, bins + 2)`, first the number below the range and last that above; NaN if unknown.
        levels: level of each record, `(n_records,)`.
        edges: the range at level 0, `(2,)`.

    Returns:
        Counts `(n_records, bins + 2)` in float64, and their range `(2,)`.
    """
    counts, levels, edges = counts.double(), levels.double(), edges.double()
    known = sorted(set(levels[~counts[:, 0].isnan()].tolist()))
    bins = counts.shape[1] - 2
    for level in known:
        joined = torch.full_like(counts, torch.nan)
        for own in known:
            is_own = levels == own
            joined[is_own] = counts[is_own] @ _shares(own - level, bins, float(n_below(edges, bins)))
        total = joined.nan_to_num(0).sum(0)
        if level == known[-1] or total[1:-1].sum() >= HELD * total.sum():
            return joined, at_level(edges[None], torch.tensor([level], device="cpu").double(), bins)[0]
    return counts, edges


def _shares(higher: float, bins: int, still: float) -> Tensor:
    """Share of each bin that is in each bin of another range, `(bins + 2, bins + 2)`.

    Args:
        higher: level of the bins above that of the other range.
        bins: number of bins.
        still: number of bins below the edge that both have.
    """
    size = 2.0**higher  # in bins of the other range, as are the positions, which begin at the edge both have
    begins = (torch.arange(bins, dtype=torch.float64, device="cpu") - still) * size
    cuts = torch.arange(bins + 1, dtype=torch.float64, device="cpu") - still
    far = torch.tensor([torch.inf], dtype=torch.float64, device="cpu")
    lows, highs = torch.cat([-far, cuts]), torch.cat([cuts, far])
    overlap = torch.minimum(begins[:, None] + size, highs) - torch.maximum(begins[:, None], lows)
    shares = torch.zeros(bins + 2, bins + 2, dtype=torch.float64, device="cpu")
    shares[1:-1] = overlap.clamp(min=0) / size
    shares[0, 0] = shares[-1, -1] = 1.0
    return shares
