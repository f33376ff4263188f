"""Pattern: how unlike a block of batches is to all blocks before, on their device."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

INDICES = {torch.int16, torch.int32, torch.int64}  # dtypes whose numbers are names
N_BINS = 256  # of pairs of indices
FACTORS, SHIFT = (0x9E3779B1, 0x85EBCA6B), 7  # odd ones, by which pairs are spread over the bins


class Kind(NamedTuple):
    """What the samples of a block are of.

    Attributes:
        shape: shape of the tensors if they are numbers, whose places it tells; None of indices.
        are_pairs: whether they are pairs of neighbors; else all are neighbors.
    """

    shape: tuple[int, ...] | None
    are_pairs: bool


class Pattern:
    """The mean of the patterns of all blocks, and the distance of each new block to it.

    The pattern of numbers is their mean at each place of the samples, over the batches of the block; the
    distance is the mean squared difference, relative to the variance of the numbers. Columns in another order
    or images that are turned change it, and the mean and the standard deviation of a batch do not. Tensors of
    another shape begin a new mean. The pattern of indices, as of tokens, is how often each pair of neighbors
    comes, in 256 bins; the distance is the squared Hellinger distance, 0 to 2. Another table of indices
    changes it.
    """

    def __init__(self) -> None:
        self._total, self._n = torch.empty(0, device="cpu"), 0
        self._shape: tuple[int, ...] | None = None

    def distances(self, rows: Tensor, sizes: list[int], kind: Kind) -> Tensor:
        """Distance of a block of batches, and of each of them, to blocks before, `(2, N)` on their device.

        That of the block is at its first batch, infinite if there are none before. NaN is what is not known.

        Args:
            rows: `(N, …)`, the samples of the batches, each from the first element on.
            sizes: their numbers of elements.
            kind: what they are of.
        """
        found = rows.new_full((2, len(rows)), math.nan)
        if len(sizes) < len(rows):
            return found
        of_each = rows[:, : sizes[0]] if kind.shape is not None else _shares_of(rows, sizes, kind.are_pairs)
        new = of_each.mean(0)
        is_first = new.shape != self._total.shape or new.device != self._total.device
        is_first |= kind.shape != self._shape
        self._shape = kind.shape
        before, self._n = self._total / max(1, self._n), 1 if is_first else self._n + 1
        self._total = new if is_first else self._total + new
        if is_first:
            found[0, 0] = math.inf
        elif kind.shape is None:
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


def _shares_of(rows: Tensor, sizes: list[int], are_pairs: bool) -> Tensor:
    if len({*sizes}) == 1:
        return _shares(rows[:, : sizes[0]], are_pairs)
    return torch.cat([_shares(row[None, :n], are_pairs) for row, n in zip(rows, sizes, strict=True)])


def _shares(rows: Tensor, are_pairs: bool) -> Tensor:
    """Share of the pairs of neighbors in each bin, `(len(rows), 256)`."""
    x = rows.long()
    first, second = (x[:, ::2], x[:, 1::2]) if are_pairs else (x[:, :-1], x[:, 1:])
    places = first.mul(FACTORS[0]).add_(second, alpha=FACTORS[1])
    places.bitwise_right_shift_(SHIFT).bitwise_and_(N_BINS - 1)
    ones = torch.ones((1, 1), device=x.device).expand(places.shape)
    return torch.zeros(len(x), N_BINS, device=x.device).scatter_add_(1, places, ones) / max(
        1, places.shape[1]
    )
