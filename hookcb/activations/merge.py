"""Merger: statistics of layers' outputs of all ranks, from sums and maxima that they share."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.activations.buffer import OutputBuffer
from hookcb.activations.slab import Output
from hookcb.activations.stats import ADDED, HIGH, LOW, STORED, added, joined, mean_of, stats_of
from hookcb.core.alone import Ranks
from hookcb.core.precision import moved, numbers_to, widest
from hookcb.records.records import PHASES

About = tuple[str, tuple[int, ...]]  # type and shape of an output


class Part(NamedTuple):
    """This rank's part of an output in a record; see `Output`, and `COLUMNS` for the sums."""

    about: About
    copies: int
    n_counted: float
    sums: Tensor


class Merger:
    """Merges what ranks see in the same batch, so that all have the same records, of all samples.

    A training batch is merged at its end, by one sum and one maximum over all ranks, of as many numbers on
    each of them, whichever layers it has called; if one has a new name, all first agree on it. The batches of
    a validation are merged at its end, as ranks may have different numbers of them.

    Source: the mean of the last record is the pivot of the sums of squares: T. Chan, G. Golub, R. LeVeque,
    "Algorithms for computing the sample variance", 1983.

    Args:
        ranks: the ranks.
        device: the device of the model, on which they communicate.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device, self._dtype = ranks, device, widest(device)
        self._names: dict[str, list[str]] = {phase: [] for phase in PHASES}  # on which all have agreed
        self._pivots = {phase: self._tensor([]) for phase in PHASES}
        self._kept: list[dict[str, Part]] = []  # batches of a validation
        self._copies: dict[tuple[str, str], int] = {}  # ranks with the same part, found by comparing
        self._peers: tuple[int, ...] = ()  # ranks that compute outputs together, as in tensor parallelism
        self.elsewhere: dict[str, About] = {}  # outputs of any rank when all agreed, if they differed

    def merge(self, buffer: OutputBuffer, outputs: Mapping[str, Output], epoch: int, step: int) -> None:
        """Puts a training batch of all ranks into the store; all ranks must call it."""
        self._put("train", buffer, self._look(buffer, outputs), epoch, step)

    def keep(self, buffer: OutputBuffer, outputs: Mapping[str, Output]) -> None:
        """Keeps a validation batch until `merge_kept`."""
        self._kept.append(self._look(buffer, outputs))

    def merge_kept(self, buffer: OutputBuffer, epoch: int, step: int) -> None:
        """Puts the validation batches of all ranks into the store; all ranks must call it."""
        kept, self._kept = self._kept, []
        for i in range(int(self.ranks.max([len(kept)])[0])):
            self._put("valid", buffer, kept[i] if i < len(kept) else {}, epoch, step)

    def note_peers(self, mesh: Any) -> None:
        """Notes the ranks that compute an output together."""
        self._peers = self._peers or tuple(mesh.mesh.flatten().tolist())

    def _tensor(self, numbers: Any) -> Tensor:
        return numbers_to(self.device, numbers, self._dtype)

    def _look(self, buffer: OutputBuffer, outputs: Mapping[str, Output]) -> dict[str, Part]:
        """This rank's parts of a record by name, in the order of the forward, on the device of the model."""
        sums: dict[str, Tensor] = {}
        if written := {name: output for name, output in outputs.items() if output.slab is not None}:
            rows = torch.stack([output.sums.to(self.device) for output in written.values()])
            sums |= dict(zip(written, rows, strict=True))
        for names, rows in buffer.summed(outputs.items()):
            sums |= dict(zip(names, moved(rows, self.device), strict=True))
        return {
            name: Part(
                (output.type, tuple(output.shape)),
                output.copies,
                output.n_counted if output.elements is None else output.elements.numel(),
                sums[name],
            )
            for name, output in outputs.items()
            if output.has_stats
        }

    def _put(self, phase: str, buffer: OutputBuffer, look: Mapping[str, Part], epoch: int, step: int) -> None:
        names, store = self._names[phase], buffer.stores[phase]
        is_new, values = not look.keys() <= set(names), list[Tensor]()
        has_new: float = is_new
        if names:
            merged, flag = self._merged(phase, buffer, look, names, is_new)
            values += merged
            has_new = flag.item() if flag.is_cpu else is_new  # on a GPU, reading it would wait for the device
        if not names or self.device.type != "cpu":
            has_new = self.ranks.max([has_new])[0]
        if has_new:
            new = self._agree(phase, look)
            values += self._merged(phase, buffer, look, new, False)[0]
        record = store.begin(epoch, step) if names else 0
        for name, row in zip(names, values, strict=True):
            store.put(name, [record], row[None])

    def _merged(
        self,
        phase: str,
        buffer: OutputBuffer,
        look: Mapping[str, Part],
        names: Sequence[str],
        is_new: bool,
    ) -> tuple[Tensor, Tensor]:
        """Statistics of outputs on all ranks, `(n, columns)`, and whether any rank has a new one.

        Args:
            phase: "train" or "valid".
            buffer: has the histograms' bins.
            look: this rank's part.
            names: adjacent ones of those that the ranks have agreed on.
            is_new: whether this rank has a new one.
        """
        first, n_sums = self._names[phase].index(names[0]), len(ADDED) + 2
        pivots = self._pivots[phase][first : first + len(names)]
        # calls; elements that histograms have; what parts add up to
        n_columns = n_sums + (buffer.bins.n + 2 if buffer.bins else 0)
        sums = torch.zeros(len(names), n_columns, dtype=self._dtype, device=self.device)
        maxs = torch.full((2 * len(names) + 1,), -math.inf, dtype=self._dtype, device=self.device)
        ends = maxs[:-1].view(-1, 2)
        if own := [(i, name, look[name]) for i, name in enumerate(names) if name in look]:
            at = numbers_to(self.device, [i for i, *_ in own], torch.int64)
            rows = torch.stack([part.sums for *_, part in own])
            copies = [[part.copies or self._copies.get((phase, name), 1)] for _, name, part in own]
            counted, n = self._tensor([[part.n_counted] for *_, part in own]), rows[:, :1]
            parts = torch.cat([(n >= 0).to(n.dtype), counted, added(rows, pivots.index_select(0, at))], 1)
            parts[:, n_sums:] *= (n / counted).nan_to_num()  # as if all were counted
            sums.index_copy_(0, at, parts / self._tensor(copies))
            ends.index_copy_(0, at, torch.stack([rows[:, HIGH], -rows[:, LOW]], 1).where(n > 0, -math.inf))
        maxs[-1] = float(is_new)
        self.ranks.share(sums, maxs)
        merged = stats_of(joined(sums[:, 2:], pivots, -ends[:, 1], ends[:, 0]), torch.finfo(self._dtype).eps)
        merged[:, len(STORED) :] *= (sums[:, 1] / sums[:, 2])[:, None]
        merged = merged.where(sums[:, :1] > 0, math.nan)
        merged[:, len(STORED) :].round_()
        pivots.copy_(merged[:, 0].where(merged[:, 0].isfinite(), pivots))
        return merged, maxs[-1]

    def _agree(self, phase: str, look: Mapping[str, Part]) -> list[str]:
        """Agrees on new names of all ranks, and on their pivots; returns the names."""
        names = self._names[phase]
        own = {name: part for name, part in look.items() if name not in names}
        new = {name: part.about for name, part in own.items()}
        digest = float(_digest(list(new)))
        most, least, has_peers = self.ranks.max([digest, -digest, bool(self._peers)])
        if most != -least:
            new = {name: about for theirs in self.ranks.gather(new) for name, about in theirs.items()}
            self.elsewhere |= new
        if has_peers:
            self._compare(phase, {name: part for name, part in own.items() if not part.copies})
        rows = [part.sums for part in own.values()]
        means = dict(zip(own, mean_of(torch.stack(rows)).tolist() if rows else [], strict=True))
        known = (means.get(name, math.nan) for name in new)
        pivots = self.ranks.max([mean if math.isfinite(mean) else -math.inf for mean in known])
        pivots = [pivot if math.isfinite(pivot) else 0.0 for pivot in pivots]
        self._pivots[phase] = torch.cat([self._pivots[phase], self._tensor(pivots)])
        names += new
        return list(new)

    def _compare(self, phase: str, own: Mapping[str, Part]) -> None:
        """Counts the ranks that have the same elements of outputs, as they compute others together."""
        digests = {name: _digest(part.sums.tolist()) for name, part in own.items()}
        of_ranks = self.ranks.gather((self._peers, digests))
        for name, digest in digests.items():
            alike = (theirs.get(name) == digest for peers, theirs in of_ranks if peers == self._peers)
            self._copies[phase, name] = sum(alike)

    # ---- resuming

    def state(self) -> dict[str, Any]:
        """Names, pivots and copies that all have agreed on, of types that `weights_only=True` reads."""
        agreed = {
            phase: (
                list(names),
                self._pivots[phase].tolist(),
                [0.0] * len(names),
            )  # levels, in older versions
            for phase, names in self._names.items()
        }
        return {"agreed": agreed, "copies": self._copies}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what `state` has returned."""
        for phase, (names, pivots, _) in state["agreed"].items():
            self._names[phase] = list(names)
            self._pivots[phase] = self._tensor(pivots)
        self._copies = dict(state["copies"])


def _digest(x: list[Any]) -> int:
    """A number by which ranks find out whether they have the same."""
    return zlib.crc32(repr(x).encode())
