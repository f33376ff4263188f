"""Merger: statistics of layers' outputs of all ranks, from sums and maxima that they share."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookcb.activations.bins import at_level
from hookcb.activations.buffer import HIGH, LOW, OutputBuffer, Waiting, floats, pair, portions, range_around
from hookcb.activations.rows import Output
from hookcb.activations.stats import histogram, summarize
from hookcb.core.precision import moved, numbers_to, widest
from hookcb.core.ranks import Ranks
from hookcb.records.records import PHASES

# calls; elements, and those that moments and shares are from; Σd and Σd² around the pivot; numbers near zero,
# zero, and not finite: for each output, before the counts of its histogram
N_SUMS = 9
Sizes = tuple[int, int, int, int]
About = tuple[str, tuple[int, ...]]  # type and shape of an output


@dataclass(slots=True)
class Look:
    """This rank's part of a record.

    Attributes:
        outputs: type and shape of each output, by name.
        values: its `LAYER_STATS`, `(8,)`, on the device of the model.
        sizes: numbers of its elements, of those that moments and shares are from, and of ranks that have the
            same ones, 0 if that is unknown.
        rows: its elements, until they are counted for a histogram, by name.
        counts: histograms, by name.
        levels: level of the histogram, and the one that would fit this rank's elements, `(2,)`, by name.
    """

    outputs: dict[str, About]
    values: dict[str, Tensor]
    sizes: dict[str, Sizes]
    rows: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
    levels: dict[str, Tensor] = field(default_factory=dict)


class Merger:
    """Merges what ranks see in the same batch, so that all have the same records, of all samples.

    A training batch is merged at its end, by one sum and one maximum over all ranks, of as many numbers on
    each of them, whichever layers it has called; if one has a new name, all first agree on it. The batches of
    a validation are merged at its end, as ranks may have different numbers of them. A histogram has the level
    that fitted the record before, as all ranks know it then.

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
        self._ranges: dict[tuple[str, str], Tensor] = {}  # of histograms at level 0, by phase and name
        self._levels = {phase: self._tensor([]) for phase in PHASES}  # of the next histograms
        self._kept: list[Look] = []  # batches of a validation
        self._copies: dict[tuple[str, str], int] = {}  # ranks with the same part, found by comparing
        self._peers: tuple[int, ...] = ()  # ranks that compute outputs together, as in tensor parallelism
        self.elsewhere: dict[str, About] = {}  # outputs that only other ranks had when all agreed

    def merge(self, buffer: OutputBuffer, outputs: dict[str, Output], epoch: int, step: int) -> None:
        """Puts a training batch of all ranks into the store; all ranks must call it."""
        self._put("train", buffer, self._look("train", buffer, outputs), epoch, step)

    def keep(self, buffer: OutputBuffer, outputs: dict[str, Output]) -> None:
        """Keeps a validation batch until `merge_kept`."""
        look = self._look("valid", buffer, outputs)
        look.rows = {}
        self._kept.append(look)

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
        found = {name: output for name, output in outputs.items() if output.elements is not None}
        look = Look({name: (output.type, output.shape) for name, output in found.items()}, {}, {})
        for runs, rows, known in portions(Waiting(phase, name, 0, output) for name, output in found.items()):
            names = [run.name for run in runs]
            values = moved(summarize(rows, known, buffer.eps, wide=True), self.device)
            look.values |= dict(zip(names, values, strict=True))
            look.rows |= dict(zip(names, rows, strict=True)) if buffer.bins else {}
        look.sizes |= {name: self._sizes(phase, name, output) for name, output in found.items()}
        self._count(phase, buffer, look)
        return look

    def _sizes(self, phase: str, name: str, output: Output) -> Sizes:
        taken = 0 if output.elements is None else output.elements.numel()
        copies = output.copies or self._copies.get((phase, name), 0)
        return output.n, taken if output.exact is None else output.n, taken, copies

    def _count(self, phase: str, buffer: OutputBuffer, look: Look) -> None:
        """Counts elements for the histograms whose ranges all ranks have agreed on."""
        for name in list(look.rows):
            edges = self._range_of(phase, name)
            if edges is not None:
                row = look.rows.pop(name)[None]
                ranges, level = moved(edges, row.device)[None], moved(self._level_of(phase, name), row.device)
                low, high = at_level(ranges, level[None], buffer.bins)[0].unbind()
                look.counts[name] = moved(histogram(row, low, high, buffer.bins)[0], self.device)
                fitting = buffer.levels(row, ranges)[0]
                look.levels[name] = moved(torch.stack([level, fitting]), self.device)

    def _range_of(self, phase: str, name: str) -> Tensor | None:
        # elements of a validation are gone when its range could be agreed on
        return self._ranges.get((phase, name), self._ranges.get(("train", name)))

    def _level_of(self, phase: str, name: str) -> Tensor:
        known = self._names[phase]
        if name not in known:
            phase, known = "train", self._names["train"]
        return self._levels[phase][known[name]] if name in known else self._tensor(0.0)

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
            new = self._agree(phase, buffer, look)
            values += self._merged(phase, buffer, look, new, False)[0]
        store, names = buffer.stores[phase], self._names[phase]
        record = store.begin(epoch, step) if names else 0
        for name, row in zip(names, values, strict=True):
            store.put(name, [record], row[None])
            if buffer.bins:
                buffer.ranges[phase, name] = self._ranges[phase, name]

    def _merged(
        self, phase: str, buffer: OutputBuffer, look: Look, names: Sequence[str], is_new: bool
    ) -> tuple[Tensor, Tensor]:
        """Statistics of outputs on all ranks, `(n, columns)`, and whether any rank has a new one.

        Args:
            phase: "train" or "valid".
            buffer: gives the histograms' number of bins.
            look: this rank's part.
            names: adjacent ones of those that the ranks have agreed on.
            is_new: whether this rank has a new one.
        """
        first, places = self._names[phase][names[0]], {name: i for i, name in enumerate(names)}
        pivots = self._pivots[phase][first : first + len(names)]
        n_bins = buffer.bins + 2 if buffer.bins else 0
        sums = torch.zeros(len(names), N_SUMS + n_bins, dtype=self._dtype, device=self.device)
        n_maxs = 4 if n_bins else 2
        maxs = torch.full((n_maxs * len(names) + 1,), -math.inf, dtype=self._dtype, device=self.device)
        if own := [name for name in look.outputs if name in places]:
            at = numbers_to(self.device, [places[name] for name in own], torch.int64)
            values = torch.stack([look.values[name] for name in own])
            sizes = self._tensor([look.sizes[name] for name in own])
            part = _sums(values, sizes, pivots.index_select(0, at))
            if n_bins:
                nothing = torch.full((n_bins,), math.nan, dtype=self._dtype, device=self.device)
                counts = torch.stack([look.counts.get(name, nothing) for name in own])
                n, _, n_counted, copies = sizes.unbind(1)
                part = torch.cat([part, counts * (n / n_counted / copies.clamp(min=1))[:, None]], 1)
            sums.index_copy_(0, at, part)
            most = _extremes(values)
            if n_bins:
                unknown = torch.full((2,), -math.inf, dtype=self._dtype, device=self.device)
                most = torch.cat([most, torch.stack([look.levels.get(name, unknown) for name in own])], 1)
            maxs[:-1].view(-1, n_maxs).index_copy_(0, at, most)
        maxs[-1] = float(is_new)
        self.ranks.share(sums, maxs)
        most = maxs[:-1].view(-1, n_maxs)
        merged = _values(sums, most[:, :2], pivots)
        if n_bins:
            level, fitting = most[:, 2:].unbind(1)
            merged = torch.cat([merged, _or_nan(level)[:, None]], 1)
            levels = self._levels[phase][first : first + len(names)]
            levels.copy_(fitting.where(fitting > -math.inf, levels))
        pivots.copy_(merged[:, 0].where(merged[:, 0].isfinite(), pivots))
        return merged, maxs[-1]

    def _agree(self, phase: str, buffer: OutputBuffer, look: Look) -> list[str]:
        """Agrees on new names of all ranks, and on their pivots and ranges; returns the names."""
        names = self._names[phase]
        new = {name: (about, _known_range(buffer, phase, name)) for name, about in look.outputs.items()}
        new = {name: facts for name, facts in new.items() if name not in names}
        digest = float(zlib.crc32(repr([(name, edges) for name, (_, edges) in new.items()]).encode()))
        most, least, has_peers = self.ranks.max([digest, -digest, bool(self._peers)])
        if most != -least:
            of_ranks, new = self.ranks.gather(new), {}
            for name, facts in (pair for theirs in of_ranks for pair in theirs.items()):
                new[name] = facts if name not in new or new[name][1] is None else new[name]
            self.elsewhere |= {name: about for name, (about, _) in new.items()}
        if has_peers:
            self._compare(phase, look, list(new))
        sums = torch.zeros(2, len(new), dtype=self._dtype, device=self.device)
        maxs = torch.full((len(new), 2), -math.inf, dtype=self._dtype, device=self.device)
        for i, name in enumerate(new):
            if name in look.values:
                mean, n = look.values[name][0], look.sizes[name][0]
                sums[0, i] = torch.where(mean.isfinite(), mean * n, 0.0)
                sums[1, i] = mean.isfinite() * n
                maxs[i] = _extremes(look.values[name][None])[0]
        self.ranks.share(sums, maxs)
        highs, lows = _or_nan(maxs[:, 0]), -_or_nan(maxs[:, 1])
        for i, (name, (_, edges)) in enumerate(new.items()):
            names[name] = len(names)
            known = self._range_of(phase, name) if edges is None else pair(edges)
            edges_of_all = range_around(lows[i], highs[i]) if known is None else known
            self._ranges[phase, name] = moved(edges_of_all, self.device)
        pivots = (sums[0] / sums[1]).nan_to_num(0.0)
        self._pivots[phase] = torch.cat([self._pivots[phase], pivots])
        self._levels[phase] = torch.cat([self._levels[phase], torch.zeros_like(pivots)])
        self._count(phase, buffer, look)
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
            phase: (list(names), self._pivots[phase].tolist(), self._levels[phase].tolist())
            for phase, names in self._names.items()
        }
        return {"agreed": agreed, "copies": self._copies}

    def load_state(self, state: dict[str, Any], buffer: OutputBuffer) -> None:
        """Restores what `state` has returned, with the ranges of a buffer's histograms."""
        for phase, (names, pivots, levels) in state["agreed"].items():
            self._names[phase] = {name: i for i, name in enumerate(names)}
            self._pivots[phase], self._levels[phase] = self._tensor(pivots), self._tensor(levels)
        self._ranges = {key: moved(edges, self.device) for key, edges in buffer.ranges.items()}
        self._copies = dict(state["copies"])


def _known_range(buffer: OutputBuffer, phase: str, name: str) -> tuple[float, float] | None:
    """Range of a histogram that this rank has from before, or was given."""
    edges = buffer.ranges.get((phase, name)) if buffer.bins else None
    return buffer.hist_range if edges is None else floats(edges)


def _sums(values: Tensor, sizes: Tensor, pivots: Tensor) -> Tensor:
    """The sums that a rank adds, `(n, N_SUMS)`, from `LAYER_STATS` of its outputs."""
    mean, std, _, _, _, *shares, nonfinite = values.unbind(1)
    near_zero, zeros = (share.nan_to_num() for share in shares)  # unknown if no element is finite
    n, n_measured, n_counted, copies = sizes.unbind(1)
    d = mean - pivots
    squares = torch.where(n_measured > 1, std.square() * (n_measured - 1) * (n / n_measured), 0.0)
    sums = [n, n_measured, n_counted, n * d, squares + n * d.square(), n * near_zero, n * zeros, nonfinite]
    of_all = torch.stack(sums, 1) / copies.clamp(min=1)[:, None]
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
