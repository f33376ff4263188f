"""Relabels: samples that come again with another target."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hookcb.diagnosis.measurements.ranges import Shift
from hookcb.records.store import Arriving

N_KNOWN = 4_096  # samples
N_ROWS, N_PLACES = 64, 64  # samples of a batch, and elements of each, that are read
MIN_SAME = 64  # samples that have come again with the same target before, and after which others are over
MIN_OTHER, MIN_BATCHES, SHARE = (
    16,
    3,
    1 / 20,
)  # with another one, in so many batches, and of all that come again
MAX_WAITING = 1_024  # batches on a device that is no GPU
BITS = 52  # of a hash, which a float64 holds
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass
class _Since:
    """Samples that have come again since the first batch in which one had another target."""

    step: int
    n_again: int = 0
    n_other: int = 0
    n_batches: int = 0  # with another target
    n_same: int = 0  # samples in a row without


class Relabels:
    """Compares the targets of samples that come again, as those of one data set do in each epoch.

    A sample is known by a hash of up to 64 elements of its inputs, evenly spread, and its target likewise. Up
    to 64 samples of a batch are read, and up to 4,096 are known, with their first targets; of more, those
    whose hash ends in enough zeros. Augmented samples never come again, and tell nothing. If a sample comes
    with another target before 64 have come again with the same one, targets are not fixed, and nothing is
    found.

    Source: J. Carter & M. Wegman, "Universal classes of hash functions", 1979, for the hash; P. Flajolet, "On
    adaptive sampling", 1990, for the choice of samples. The limits are ours.

    Attributes:
        found: from the first batch on with another target, a twentieth or more of the samples that come again
            have one, 16 or more in three batches or more; None if that was not seen.
    """

    def __init__(self) -> None:
        self.found: Shift | None = None
        self._known: dict[float, float] = {}  # hashes of targets, by those of samples
        self._mask = 0  # bits of a hash that are 0 in those that are known
        self._n_same, self._last = 0, 0  # until the last batch that has no other target, and that batch
        self._since: _Since | None = None
        self._is_over = False
        self._weights: dict[tuple[int, torch.device], Tensor] = {}
        self._arriving = Arriving[int](MAX_WAITING)

    def add(self, step: int, x: Tensor, y: Tensor) -> None:
        """Adds the inputs `(N, …)` and the targets of a batch, N times as many numbers; waits for nothing."""
        if self._is_over or (hashes := self._hashes(x, y)) is None:
            return
        if hashes.is_cpu:
            self._see(step, hashes.tolist())
        else:
            self._arriving.add(step, hashes)
            for at, pairs in self._arriving.there():
                self._see(at, pairs)

    def rest(self) -> None:
        """Takes what is on a device; waits for it."""
        for at, pairs in self._arriving.rest():
            self._see(at, pairs)

    def count(self, x: Tensor, y: Tensor) -> tuple[int, int]:
        """Numbers of samples of a batch on the CPU that come again, and of those with another target."""
        if self._n_same < MIN_SAME or not (x.is_cpu and y.is_cpu):
            return 0, 0
        hashes = self._hashes(x, y)
        again = [] if hashes is None else self._are_others(hashes.tolist())
        return len(again), sum(again)

    def _hashes(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Hashes of samples and of their targets, `(2, n)`, whole numbers; None without samples."""
        n = x.shape[0] if x.ndim else 0
        if n < 2 or x.numel() < n or not y.numel() or not y.ndim or len(y) % n or x.device != y.device:
            return None
        rows = [z.detach().reshape(n, len(z) // n, *z.shape[1:])[:: -(-n // N_ROWS)] for z in (x, y)]
        return torch.stack([*map(self._hash, rows)]).double()

    def _hash(self, rows: Tensor) -> Tensor:
        """Hashes of rows `(n, …)`, `(n,)`: weighted sums of their bits, exact, as integers are added."""
        rows = _few_of(rows).flatten(1)
        if rows.dtype in FLOATS:
            rows = (rows.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
        key = rows.shape[1], rows.device
        if (weights := self._weights.get(key)) is None:
            own = torch.Generator("cpu").manual_seed(0)
            weights = torch.randint(-(2**63), 2**63 - 1, (key[0],), generator=own, device="cpu") | 1
            weights = self._weights[key] = weights.to(rows.device, non_blocking=True)
        hashes: Tensor = (rows.long() * weights).sum(1) >> (64 - BITS) & (2**BITS - 1)
        return hashes

    def _are_others(self, pairs: Sequence[Sequence[float]]) -> list[bool]:
        """Whether the target of each sample that comes again is another one; takes those that are new."""
        again = []
        for sample, target in zip(*pairs, strict=True):
            if int(sample) & self._mask:
                continue
            if sample in self._known:
                again.append(self._known[sample] != target)
            else:
                self._known[sample] = target
        while len(self._known) > N_KNOWN:
            self._mask = 2 * self._mask + 1
            self._known = {key: of for key, of in self._known.items() if not int(key) & self._mask}
        return again

    def _see(self, step: int, pairs: Sequence[Sequence[float]]) -> None:
        if self._is_over or not (again := self._are_others(pairs)):
            return
        n_other = sum(again)
        if self._since is None and not n_other:
            self._n_same, self._last = self._n_same + len(again), step
            return
        if self._n_same < MIN_SAME:
            self._is_over = True
            return
        since = self._since = self._since or _Since(step)
        since.n_again, since.n_other = since.n_again + len(again), since.n_other + n_other
        since.n_batches += n_other > 0
        since.n_same = 0 if n_other else since.n_same + len(again)
        if since.n_same >= MIN_SAME:  # only some batches were odd
            self._since, self._last = None, step
        elif since.n_other >= max(MIN_OTHER, SHARE * since.n_again) and since.n_batches >= MIN_BATCHES:
            slack = since.step - self._last - 1
            begin = f"{'about ' * bool(slack)}step {since.step:,}"
            said = (
                f"{since.n_other} of {since.n_again} samples that come again from {begin} on have another "
                "target than before"
            )
            self.found = Shift(since.step, "targets", (), slack, said)
            self._is_over = True


def _few_of(rows: Tensor) -> Tensor:
    """A view of rows `(n, …)` with up to 64 elements of each, spread over the longest dimensions."""
    while rows[0].numel() > N_PLACES:
        dim = max(range(1, rows.ndim), key=rows.shape.__getitem__)
        rows = rows[(*[slice(None)] * dim, slice(1, None, 2))]
    return rows
