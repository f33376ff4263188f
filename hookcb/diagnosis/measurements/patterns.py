"""Pattern: how unlike a block of batches is to all blocks before, on their device."""

import math

import torch
from torch import Tensor

INDICES = {torch.int16, torch.int32, torch.int64}  # dtypes whose numbers are names
N_BINS = 256  # of pairs of indices
FACTORS, SHIFT = (0x9E3779B1, 0x85EBCA6B), 7  # odd ones, by which pairs are spread over the bins


class Pattern:
    """The mean of the patterns of all blocks, and the distance of each new block to it.

    The pattern of numbers is their mean at each place of the samples, over the batches of the block; the
    distance is the mean squared difference, relative to the variance of the numbers. Columns in another order
    or images that are turned change it, and the mean and the standard deviation of a batch do not. The
    pattern of indices, as of tokens, is how often each pair of neighbors comes, in 256 bins; the distance is
    the squared Hellinger distance, 0 to 2. Another table of indices changes it.
    """

    def __init__(self) -> None:
        self._total, self._n = torch.empty(0, device="cpu"), 0

    def distances(self, rows: Tensor, sizes: list[int], are_indices: bool) -> Tensor:
        """Distance of a block of batches, and of each of them, to blocks before, `(2, N)` on their device.

        That of the block is at the first batch. NaN is what is not known: all of the first block.

        Args:
            rows: `(N, …)`, the samples of the batches, each from the first element on.
            sizes: their numbers of elements; numbers have a pattern only if these are all the same.
            are_indices: whether they are indices.
        """
        found, is_even = rows.new_full((2, len(rows)), math.nan), len({*sizes}) == 1
        if len(sizes) < len(rows) or not (is_even or are_indices):
            return found
        of_each = rows[:, : sizes[0]]
        if are_indices and is_even:
            of_each = _pairs(of_each)
        elif are_indices:
            of_each = torch.cat([_pairs(row[None, :n]) for row, n in zip(rows, sizes, strict=True)])
        new = of_each.mean(0)
        is_first = new.shape != self._total.shape or new.device != self._total.device
        before, self._n = self._total / max(1, self._n), 1 if is_first else self._n + 1
        self._total = new if is_first else self._total + new
        if is_first:
            return found
        if are_indices:
            root = before.sqrt()
            found[0, 0], found[1] = (
                (new.sqrt() - root).square().sum(),
                (of_each.sqrt() - root).square().sum(1),
            )
        else:
            variance = of_each.var()
            found[0, 0] = (new - before).square().mean() / variance
            found[1] = (of_each - before).square().mean(1) / variance
        return found


def _pairs(rows: Tensor) -> Tensor:
    """Share of the pairs of neighbors in each bin, `(len(rows), 256)`."""
    x = rows.long()
    places = x[:, :-1].mul(FACTORS[0]).add_(x[:, 1:], alpha=FACTORS[1])
    places.bitwise_right_shift_(SHIFT).bitwise_and_(N_BINS - 1)
    ones = torch.ones((1, 1), device=x.device).expand(places.shape)
    return torch.zeros(len(x), N_BINS, device=x.device).scatter_add_(1, places, ones) / max(
        1, places.shape[1]
    )
