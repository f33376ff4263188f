"""Merger: statistics of layers' outputs of all ranks, from sums and maxima that they share."""

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookcb.activations.buffer import OutputBuffer, portions
from hookcb.activations.slab import Output, Waiting, stats_of
from hookcb.activations.stats import LAYER_STATS, summarize
from hookcb.core.alone import Ranks
from hookcb.core.precision import moved, numbers_to, widest
from hookcb.records.records import PHASES

# calls; elements, and those that moments and shares are from; Σd and Σd² around the pivot; numbers near zero,
# zero, and not finite: for each output, before the counts of its histogram
N_SUMS = 9
LOW, HIGH = LAYER_STATS.index("min"), LAYER_STATS.index("max")
Sizes = tuple[int, float, float, int]
About = tuple[str, tuple[int, ...]]  # type and shape of an output


class Look(NamedTuple):
    """This rank's part of a record.

    Attributes:
        outputs: type and shape of each output, by name.
        values: its `LAYER_STATS`, then the counts of its histogram if there are bins, `(columns,)`, on the
            device of the model.
        sizes: numbers of its elements, of those that moments and shares are from, and of ranks that have the
            same ones, 0 if that is unknown.
    """

    outputs: dict[str, About]
    values: dict[str, Tensor]
    sizes: dict[str, Sizes]


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
        self._names: dict[str, dict[str, int]] = {phase: {} for phase in PHASES}  # on which all have agreed
        self._pivots = {phase: self._tensor([]) for phase in PHASES}
        self._kept: list[Look] = []  # batches of a validation
        self._copies: dict[tuple[str, str], int] = {}  # ranks with the same part, found by comparing
        self._peers: tuple[int, ...] = ()  # ranks that compute outputs together, as in tensor parallelism
        self.elsewhere: dict[str, About] = {}  # outputs that only other ranks had when all agreed

    def merge(self, buffer: OutputBuffer, outputs: dict[str, Output], epoch: int, step: int) -> None:
        """Puts a training batch of all ranks into the store; all ranks must call it."""
        self._put("train", buffer, self._look("train", buffer, outputs), epoch, step)

    def keep(self, buffer: OutputBuffer, outputs: dict[str, Output]) -> None:
        """Keeps a validation batch until `merge_kept`."""
        self._kept.append(self._look("valid", buffer, outputs))

    def merge_kept(self, buffer: OutputBuffer, epoch: int, step: int) -> None:
        """Puts the validation batches of all ranks into the store; all ranks must call it."""
        kept, self._kept = self._kept, []
        for i in range(int(self.ranks.max([len(kept)])[0])):
            look = kept[i] if i < len(kept) else self._look("valid", buffer, {})
            self._put("valid", buffer, look, epoch, step)

    def note_peers(self, mesh: Any) -> None:
        """Notes the ranks that compute an output together."""
        self._peers = self._peers or tuple(mesh.mesh.flatten().tolist())

    # ---- this rank

    def _tensor(self, numbers: Any) -> Tensor:
        return numbers_to(self.device, numbers, self._dtype)

    def _look(self, phase: str, buffer: OutputBuffer, outputs: dict[str, Output]) -> Look:
        """Statistics of this rank's outputs; those of the same shape together, in a fraction of the time."""
        found = {name: output for name, output in outputs.items() if output.is_known}
        values: dict[str, Tensor] = {}
        for runs, rows, known in portions(Waiting(phase, name, 0, output) for name, output in found.items()):
            of_rows = summarize(rows, known, buffer.eps, wide=True)
            if buffer.bins is not None:
                of_rows = torch.cat([of_rows, buffer.bins.counts_of(rows).to(of_rows.dtype)], 1)
            values |= dict(zip((run[0].name for run in runs), moved(of_rows, self.device), strict=True))
        places = {name: output.place for name, output in found.items() if output.place}
        if places:
            sums = torch.stack([place.sums.to(self.device) for place in places.values()])
            values |= dict(zip(places, stats_of(sums), strict=True))
        sizes = {name: self._sizes(phase, name, output) for name, output in found.items()}
        return Look({name: (output.type, output.shape) for name, output in found.items()}, values, sizes)

    def _sizes(self, phase: str, name: str, output: Output) -> Sizes:
        taken = output.n_counted or output.n if output.elements is None else output.elements.numel()
        copies = output.copies or self._copies.get((phase, name), 0)
        return output.n, taken if output.exact is None else output.n, taken, copies

    # ---- all ranks

    def _put(self, phase: str, buffer: OutputBuffer, look: Look, epoch: int, step: int) -> None:
        known, is_new = list(self._names[phase]), not look.outputs.keys() <= self._names[phase].keys()
        values: list[Tensor] = []
        has_new: float = is_new
        if known:
            merged, flag = self._merged(phase, buffer, look, known, is_new)
            values += merged
            has_new = flag.item() if flag.is_cpu else is_new  # on a GPU, reading it would wait for the device
        if not known or self.device.type != "cpu":
            has_new = self.ranks.max([has_new])[0]
        if has_new:
            new = self._agree(phase, look)
            values += self._merged(phase, buffer, look, new, False)[0]
        store, names = buffer.stores[phase], self._names[phase]
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
        first, places = self._names[phase][names[0]], {name: i for i, name in enumerate(names)}
        pivots = self._pivots[phase][first : first + len(names)]
        n_columns = N_SUMS + (buffer.bins.n + 2 if buffer.bins else 0)
        sums = torch.zeros(len(names), n_columns, dtype=self._dtype, device=self.device)
        maxs = torch.full((2 * len(names) + 1,), -math.inf, dtype=self._dtype, device=self.device)
        most = maxs[:-1].view(-1, 2)
        if own := [name for name in look.outputs if name in places]:
            at = numbers_to(self.device, [places[name] for name in own], torch.int64)
            values = torch.stack([look.values[name] for name in own])
            sizes = self._tensor([look.sizes[name] for name in own])
            sums.index_copy_(0, at, _sums(values, sizes, pivots.index_select(0, at)))
            most.index_copy_(0, at, _extremes(values))
        maxs[-1] = float(is_new)
        self.ranks.share(sums, maxs)
        merged = _values(sums, most, pivots)
        pivots.copy_(merged[:, 0].where(merged[:, 0].isfinite(), pivots))
        return merged, maxs[-1]

    def _agree(self, phase: str, look: Look) -> list[str]:
        """Agrees on new names of all ranks, and on their pivots; returns the names."""
        names = self._names[phase]
        new = {name: about for name, about in look.outputs.items() if name not in names}
        digest = float(zlib.crc32(repr(list(new)).encode()))
        most, least, has_peers = self.ranks.max([digest, -digest, bool(self._peers)])
        if most != -least:
            of_ranks, new = self.ranks.gather(new), {}
            for theirs in of_ranks:
                new = theirs | new
            self.elsewhere |= new
        if has_peers:
            self._compare(phase, look, list(new))
        sums = torch.zeros(2, len(new), dtype=self._dtype, device=self.device)
        for i, name in enumerate(new):
            names[name] = len(names)
            if name in look.values:
                mean, n = look.values[name][0], look.sizes[name][0]
                sums[0, i] = torch.where(mean.isfinite(), mean * n, 0.0)
                sums[1, i] = mean.isfinite() * n
        self.ranks.share(sums, sums.new_zeros(1))
        pivots = (sums[0] / sums[1]).nan_to_num(0.0)
        self._pivots[phase] = torch.cat([self._pivots[phase], pivots])
        return list(new)

    def _compare(self, phase: str, look: Look, names: Sequence[str]) -> None:
        """Finds outputs that several ranks have alike, as they compute something else together."""
        own = {
            name: look.values[name].tolist()
            for name in names
            if name in look.sizes and not look.sizes[name][-1]
        }
        of_ranks = self.ranks.gather((self._peers, own))
        for name in own:
            same = [
                repr(theirs.get(name)) == repr(own[name])
                for peers, theirs in of_ranks
                if peers == self._peers
            ]
            self._copies[phase, name] = sum(same)
            look.sizes[name] = (*look.sizes[name][:-1], sum(same))

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
            self._names[phase] = {name: i for i, name in enumerate(names)}
            self._pivots[phase] = self._tensor(pivots)
        self._copies = dict(state["copies"])


def _sums(values: Tensor, sizes: Tensor, pivots: Tensor) -> Tensor:
    """The sums that a rank adds, `(n, N_SUMS)`, from `LAYER_STATS` of its outputs; then their counts."""
    mean, std, _, _, _, *shares, nonfinite = values[:, : len(LAYER_STATS)].unbind(1)
    near_zero, zeros = (share.nan_to_num() for share in shares)  # unknown if no element is finite
    n, n_measured, n_counted, copies = sizes.unbind(1)
    d = mean - pivots
    squares = torch.where(n_measured > 1, std.square() * (n_measured - 1) * (n / n_measured), 0.0)
    sums = [n, n_measured, n_counted, n * d, squares + n * d.square(), n * near_zero, n * zeros, nonfinite]
    counts = values[:, len(LAYER_STATS) :] * (n / n_counted)[:, None]
    of_all = torch.cat([torch.stack(sums, 1), counts], 1) / copies.clamp(min=1)[:, None]
    of_all = torch.where(n[:, None] > 0, of_all, 0.0)  # an output without elements
    return torch.cat([torch.ones_like(of_all[:, :1]), of_all], 1)


def _extremes(values: Tensor) -> Tensor:
    """Maximum and negative minimum, `(n, 2)`; -inf without finite elements."""
    extremes = torch.stack([values[:, HIGH], -values[:, LOW]], 1)
    return extremes.where(extremes.isfinite(), -math.inf)


def _values(sums: Tensor, maxs: Tensor, pivots: Tensor) -> Tensor:
    """`LAYER_STATS` and counts, `(n, columns)`, from sums and extremes over all ranks."""
    n_calls, n, n_measured, n_counted, d, squares, near_zero, zeros, nonfinite = sums[:, :N_SUMS].unbind(1)
    shift = d / n
    variance = (squares - n * shift.square()).clamp(min=0) / n * (n_measured / (n_measured - 1))
    high, low = _or_nan(maxs[:, 0]), -_or_nan(maxs[:, 1])
    values = [pivots + shift, variance.sqrt(), low, high, torch.maximum(high, -low)]
    values += [(share / n).where(low <= high, math.nan) for share in (near_zero, zeros)]
    values.append(nonfinite.where(n_calls > 0, math.nan))
    counts = sums[:, N_SUMS:] * (n_counted / n)[:, None]
    return torch.cat([torch.stack(values, 1), counts.round()], 1)


def _or_nan(maxs: Tensor) -> Tensor:
    return maxs.where(maxs > -math.inf, math.nan)
