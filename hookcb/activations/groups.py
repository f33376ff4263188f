"""Statistics of several outputs together, from those that were recorded of each."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hookcb.activations.stats import HIGH, LOW, STORED, added, joined, stats_of, sums_from

N, MEAN = STORED.index("n"), STORED.index("mean")


def merged_stats(stats: Tensor, groups: Sequence[int]) -> Tensor:
    """`STORED` of the outputs of each group together, `(n_groups, 12)`, as if they were one output.

    Exact to the digits of what was recorded; see `added` for the formulas.

    Args:
        stats: `STORED` of each output, `(R, 12)`; NaN in rows of layers that were not called.
        groups: number of the group of each row, from 0.

    Raises:
        ValueError: If numbers of elements are missing, as in records of older versions.
    """
    stats, n_groups = stats.double(), 1 + max(groups, default=-1)
    was_called = stats[:, STORED.index("nonfinite")].isfinite()
    if bool(stats[was_called, N].isnan().any()):
        raise ValueError(
            "these records have no numbers of elements, without which layers and batches cannot be merged; "
            "hookcb 0.2 did not keep them, so record anew"
        )
    stats, at = stats[was_called], torch.tensor(groups, dtype=torch.int64, device="cpu")[was_called]
    zero, means = stats.new_zeros(n_groups), stats[:, MEAN].nan_to_num(0.0, 0.0, 0.0)
    n = torch.ones_like(means)
    pivots = zero.index_add(0, at, means) / zero.index_add(0, at, n).clamp(min=1)
    sums = sums_from(stats)
    parts = added(sums, pivots[at])
    low = (zero + math.inf).scatter_reduce(0, at, sums[:, LOW], "amin")
    high = (zero - math.inf).scatter_reduce(0, at, sums[:, HIGH], "amax")
    total = stats.new_zeros(n_groups, parts.shape[1]).index_add(0, at, parts)
    found = stats_of(joined(total, pivots, low, high), torch.finfo(torch.float32).eps)
    return found.where((zero.index_add(0, at, n) > 0)[:, None], math.nan)
