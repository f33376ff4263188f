"""Pattern: how unlike a block of batches is to all blocks before, on their device."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

INDICES = {torch.int16, torch.int32, torch.int64}  # dtypes whose numbers are names
N_BINS = 256  # of pairs of indices
ODD, TINY = 3.0, 1e-30  # times the median distance of batches, above which one does not count; a variance
FACTORS, SHIFT = (0x9E3779B1, 0x85EBCA6B), 7  # odd ones, by which pairs are spread over the bins


class Kind(NamedTuple):
    """Kind of the samples of a block.

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
    changes it. Batches that are three times as far as the median one of their block do not count.
    """

    def __init__(self) -> None:
        self._shape: tuple[int, ...] | None = None
        self._total = self._n = torch.empty(0, device="cpu")  # of the batches so far, on their device

    def distances(self, rows: Tensor, lengths: Tensor | None, kind: Kind | None, std: Tensor) -> Tensor:
        """Distance of a block of batches, and of each of them, to blocks before, `(2, N)` on their device.

        That of the block is at its first batch, infinite if there are none before. NaN is what is not known.

        Args:
            rows: `(N, …)`, the samples of the batches, each from the first element on.
            lengths: `(N,)`, their numbers of elements, None if they are all whole rows.
            kind: what they are of, None if that differs.
            std: `(N,)`, their standard deviations.
        """
        found = rows.new_full((2, len(rows)), math.nan)
        if kind is None:
            return found
        are_numbers = kind.shape is not None
        x = rows if are_numbers else _shares(rows, lengths, kind.are_pairs)
        is_first = kind.shape != self._shape or x[0].shape != self._total.shape or x.device != self._n.device
        before = x.sort(0).values[len(x) // 2] if is_first else self._total / self._n.clamp_min(1)
        scale = std.nanmedian().square().clamp_min(TINY) if are_numbers else None
        found[1] = _distances(x, before, scale)
        are_usual = found[1] <= ODD * found[1].nanmedian()  # else one damaged batch would change the pattern
        total, n = torch.where(are_usual[:, None], x, 0.0).sum(0), are_usual.sum()
        found[0, 0] = math.inf if is_first else _distances((total / n)[None], before, scale)[0]
        self._shape = kind.shape
        self._total, self._n = (total, n) if is_first else (self._total + total, self._n + n)
        return found


def _distances(x: Tensor, before: Tensor, scale: Tensor | None) -> Tensor:
    """Distance of each row to a pattern: squares relative to `scale`, or by Hellinger if that is None."""
    if scale is None:
        return (x.sqrt() - before.sqrt()).square_().sum(1)
    return (x - before).square_().mean(1) / scale


def _shares(rows: Tensor, lengths: Tensor | None, are_pairs: bool) -> Tensor:
    """Share of the pairs of neighbors in each bin, `(len(rows), 256)`."""
    x = rows.long()
    first, second = (x[:, :-1:2], x[:, 1::2]) if are_pairs else (x[:, :-1], x[:, 1:])
    places = first.mul(FACTORS[0]).add_(second, alpha=FACTORS[1])
    places.bitwise_right_shift_(SHIFT).bitwise_and_(N_BINS - 1)
    n, counts = places.shape[1], torch.zeros(len(x), N_BINS, device=x.device)
    if lengths is None:
        return counts.scatter_add_(1, places, torch.ones((1, 1), device=x.device).expand(places.shape)) / max(
            1, n
        )
    lengths = (lengths // 2 if are_pairs else lengths - 1)[:, None]
    return counts.scatter_add_(1, places, _within(n, lengths).float()) / lengths.clamp_min(1)


def _within(n: int, lengths: Tensor) -> Tensor:
    """Whether an element is before the end of its row, `(len(lengths), n)`."""
    return torch.arange(n, device=lengths.device) < lengths


def moments_of(rows: Tensor, lengths: Tensor | None) -> Tensor:
    """Mean and standard deviation of each row, `(2, N)`; see `Pattern.distances`."""
    if lengths is None:
        mean = rows.mean(1, keepdim=True)  # a third of the time of torch.var_mean
        return torch.stack([mean[:, 0], (rows - mean).square_().mean(1).sqrt_()])
    is_within, n = _within(rows.shape[1], lengths[:, None]), lengths[:, None]
    mean = torch.where(is_within, rows, 0.0).sum(1, keepdim=True) / n
    squares = torch.where(is_within, rows - mean, 0.0).square_().sum(1)
    return torch.stack([mean[:, 0], (squares / lengths).sqrt_()])
