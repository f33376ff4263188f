"""Merger: statistics of layers' outputs of all ranks, from sums and maxima that they share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.activations.buffer import OutputBuffer, Waiting
from hookcb.activations.slab import Output
from hookcb.activations.stats import (
    COLUMNS,
    HIGH,
    LAYER_STATS,
    LOW,
    PIVOT,
    SCALE,
    around,
    center_of,
    stats_of,
)
from hookcb.core.alone import Ranks
from hookcb.core.precision import moved, numbers_to, widest
from hookcb.records.records import PHASES

About = tuple[str, tuple[int, ...]]  # type and shape of an output


class Look(NamedTuple):
    """This rank's part of a record, by the names of outputs.

    Attributes:
        outputs: their types and shapes.
        copies: numbers of ranks that have the same elements, 0 if that is unknown.
        sums: see `COLUMNS`; then the counts of a histogram if there are bins; on the device of the model.
    """

    outputs: dict[str, About]
    copies: dict[str, int]
    sums: dict[str, Tensor]


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
        self._kept: list[Look] = []  # batches of a validation
        self._copies: dict[tuple[str, str], int] = {}  # ranks with the same part, found by comparing
        self._peers: tuple[int, ...] = ()  # ranks that compute outputs together, as in tensor parallelism
        self.elsewhere: dict[str, About] = {}  # outputs that any rank had when all agreed

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
            self._put("valid", buffer, kept[i] if i < len(kept) else Look({}, {}, {}), epoch, step)

    def note_peers(self, mesh: Any) -> None:
        """Notes the ranks that compute an output together."""
        self._peers = self._peers or tuple(mesh.mesh.flatten().tolist())

    def _tensor(self, numbers: Any) -> Tensor:
        return numbers_to(self.device, numbers, self._dtype)

    def _look(self, buffer: OutputBuffer, outputs: Mapping[str, Output]) -> Look:
        found = {name: output for name, output in outputs.items() if output.has_stats}
        sums: dict[str, Tensor] = {}
        for some, rows in buffer.summed(Waiting("", name, 0, output) for name, output in found.items()):
            sums |= dict(zip((item.name for item in some), moved(rows, self.device), strict=True))
        places = {name: output for name, output in found.items() if output.slab is not None}
        if places:
            rows = torch.stack([output.sums.to(self.device) for output in places.values()])
            sums |= dict(zip(places, rows, strict=True))
        abouts = {name: (output.type, tuple(output.shape)) for name, output in found.items()}
        return Look(abouts, {name: output.copies for name, output in found.items()}, sums)

    def _put(self, phase: str, buffer: OutputBuffer, look: Look, epoch: int, step: int) -> None:
        names, store = self._names[phase], buffer.stores[phase]
        is_new, values = not look.sums.keys() <= set(names), list[Tensor]()
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
        self, phase: str, buffer: OutputBuffer, look: Look, names: Sequence[str], is_new: bool
    ) -> tuple[Tensor, Tensor]:
        """Statistics of outputs on all ranks, `(n, columns)`, and whether any rank has a new one.

        Args:
            phase: "train" or "valid".
            buffer: has the histograms' bins.
            look: this rank's part.
            names: adjacent ones of those that the ranks have agreed on.
            is_new: whether this rank has a new one.
        """
        first = self._names[phase].index(names[0])
        pivots = self._pivots[phase][first : first + len(names)]
        n_columns = len(COLUMNS) + (buffer.bins.n + 2 if buffer.bins else 0)
        sums = torch.zeros(len(names), n_columns, dtype=self._dtype, device=self.device)
        maxs = torch.full((2 * len(names) + 1,), -math.inf, dtype=self._dtype, device=self.device)
        ends = maxs[:-1].view(-1, 2)
        if own := [(i, name) for i, name in enumerate(names) if name in look.sums]:
            at = numbers_to(self.device, [i for i, _ in own], torch.int64)
            rows = torch.stack([look.sums[name] for _, name in own])
            copies = [look.copies[name] or self._copies.get((phase, name), 1) for _, name in own]
            parts = around(rows, pivots.index_select(0, at)) / self._tensor(copies)[:, None]
            parts[:, SCALE] = 1.0  # it was called
            sums.index_copy_(0, at, parts)
            ends.index_copy_(0, at, torch.stack([rows[:, HIGH], -rows[:, LOW]], 1))
        maxs[-1] = float(is_new)
        self.ranks.share(sums, maxs)
        was_called = sums[:, SCALE, None] > 0
        sums[:, PIVOT], sums[:, SCALE], sums[:, HIGH], sums[:, LOW] = pivots, 1.0, ends[:, 0], -ends[:, 1]
        merged = stats_of(sums).where(was_called, math.nan)
        merged[:, len(LAYER_STATS) :].round_()
        pivots.copy_(merged[:, 0].where(merged[:, 0].isfinite(), pivots))
        return merged, maxs[-1]

    def _agree(self, phase: str, look: Look) -> list[str]:
        """Agrees on new names, their pivots, and which ranks have the same elements; returns the names."""
        names = self._names[phase]
        own = [name for name in look.outputs if name not in names]  # in the order of the forward
        rows = torch.stack([look.sums[name] for name in own])[:, : len(COLUMNS)].tolist() if own else []
        about = {name: (look.outputs[name], row) for name, row in zip(own, rows, strict=True)}
        of_ranks = self.ranks.gather((self._peers, about))
        new = list(dict.fromkeys(name for _, theirs in of_ranks for name in theirs))
        for name in new:
            known = [theirs[name] for _, theirs in of_ranks if name in theirs]
            self.elsewhere[name] = known[0][0]
            pivot = center_of(self._tensor([row for _, row in known]))
            self._pivots[phase] = torch.cat([self._pivots[phase], pivot[None]])
            if self._peers and name in about:
                of_peers = [theirs.get(name) for peers, theirs in of_ranks if peers == self._peers]
                same = [x for x in of_peers if x is not None and repr(x[1]) == repr(about[name][1])]
                self._copies[phase, name] = len(same)
        names += new
        return new

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
