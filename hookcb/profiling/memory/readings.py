"""MemoryRecords: memory of watched batches by layer, its growth, and what to checkpoint."""

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from hookcb.core.console import printable
from hookcb.core.text import as_layer, format_bytes, join_names
from hookcb.core.torch_private import CHECKPOINT_HOOKS
from hookcb.hooks.modules import names_around
from hookcb.profiling.memory.growth import Growth, InUse, growth_of
from hookcb.profiling.memory.sizes import tensors_in
from hookcb.profiling.memory.sums import Advice, Params, Use, advise, bytes_by_layer, sum_layers
from hookcb.profiling.memory.watch import Forward
from hookcb.records.content import Content, MemoryUsed
from hookcb.records.frames import frame_of
from hookcb.records.printing import Printed
from hookcb.records.recording import Recording
from hookcb.records.tables import Column, LayerTable, Worst

MAX_IN_USE = 1000  # the latest ones, from which growth is computed
COMPILED = ", compiled"
CALL_FIELDS = ("calls", "allocated", "peak", "kept", "kept_self", "output_bytes")
PARAM_FIELDS = ("param_bytes", "grad_bytes", "optimizer_bytes")
Bytes = Mapping[str | None, int]  # by layer; None for outside the layers


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Memory of a layer in one batch, in bytes.

    Attributes:
        name: qualified name, empty for the whole model.
        type: class of the layer.
        depth: number of other layers around it.
        calls: number of calls.
        allocated: bytes alive at the end of its calls minus those at the beginning, over all calls.
        peak: peak in one of its calls, above the bytes at its beginning.
        kept: bytes kept for the backward, by it and the layers called in it; a storage counts once, for the
            layer that saved it first; parameters, buffers and the batch do not count.
        kept_self: the part of `kept` that no layer called in it has saved.
        output_bytes: size of its outputs.
        param_bytes: size of its own parameters that no earlier row has counted.
        grad_bytes: size of their gradients, after the backward.
        optimizer_bytes: size of the optimizer state for them, after its step.
    """

    name: str
    type: str
    depth: int
    calls: int
    allocated: int
    peak: int
    kept: int
    kept_self: int
    output_bytes: int
    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryTotals:
    """Memory of a whole batch, in bytes.

    Attributes:
        kept: bytes kept for the backward, by layers, the loss and any code in between.
        kept_by_loss: the part of `kept` that the loss saved first.
        peak: peak of the live bytes that the forward and the loss made.
        param_bytes, grad_bytes, optimizer_bytes: sums over all parameters.
    """

    kept: int
    kept_by_loss: int
    peak: int
    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, slots=True)
class RankPeak:
    """The highest peak of all ranks, each in its fullest watched batch; prints as a sentence.

    Attributes:
        rank: the rank that has it.
        peak: its peak, see `MemoryTotals`.
        usual: median of the peaks of the other ranks.
    """

    rank: int
    peak: int
    usual: float

    @classmethod
    def of(cls, peaks: Sequence[float]) -> "RankPeak":
        """The highest of the peaks of two or more ranks."""
        rank = max(range(len(peaks)), key=peaks.__getitem__)
        return cls(rank, int(peaks[rank]), statistics.median([*peaks[:rank], *peaks[rank + 1 :]]))

    def __str__(self) -> str:
        usual = f"that of the others is usually {format_bytes(self.usual)}"
        return printable(f"highest peak: {format_bytes(self.peak)} on rank {self.rank}; {usual}")


class LayerMemories(LayerTable[LayerMemory]):
    """Memory of layers, each under the one around it; `totals` is the memory of the whole batch."""

    missing = "no watched layer is named"
    columns = (
        Column("type", lambda row: row.type + (f" ×{row.calls}" if row.calls > 1 else ""), 1, is_text=True),
        Column("kept", lambda row: _cell(row.kept)),
        Column("self", lambda row: _cell(row.kept_self), 4),
        Column("allocated", lambda row: _cell(row.allocated), 8),
        Column("peak", lambda row: _cell(row.peak), 2),
        Column("output", lambda row: _cell(row.output_bytes), 5),
        Column("params", lambda row: _cell(row.param_bytes), 3),
        Column("grads", lambda row: _cell(row.grad_bytes), 6),
        Column("optimizer", lambda row: _cell(row.optimizer_bytes), 7),
    )

    def __init__(
        self, rows: Iterable[LayerMemory], totals: MemoryTotals, title: str, worst: Worst = None
    ) -> None:
        super().__init__(rows, title, worst)
        self.totals = totals

    @staticmethod
    def size(row: LayerMemory) -> float:
        """Bytes kept for the backward, without those of the layers called in it."""
        return row.kept_self


class MemoryReport(Printed):
    """The table of layers, and sentences below it."""

    def __init__(self, layers: LayerMemories, lines: Sequence[str]) -> None:
        self.layers, self.lines = layers, list(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.layers
        yield Text("\n".join(self.lines))


class MemoryRecords(Recording):
    """Memory of the watched batches of a fit.

    Args:
        types: classes of the layers, by name.
        every: number of training batches from one watched batch to the next.

    Attributes:
        called: layers that were called in a watched batch.
        hidden: type or layout of tensors whose memory is unknown, by layer.
        n_watched: number of watched batches.
        rank_peak: the highest peak of all ranks, updated at the end of each training; None for one process.
    """

    def __init__(self, types: Mapping[str, str], every: int) -> None:
        self.types, self.every, self.n_watched = dict(types), every, 0
        self.called: set[str] = set()
        self.hidden: dict[str, str] = {}
        self.rank_peak: RankPeak | None = None
        # of the fullest batch: its forward without calls and storages, its step, and memory by layer
        self._fullest: Forward | None = None
        self._step = 0
        self._uses: dict[str, Use] = {}
        self._advice: tuple[Advice, ...] = ()
        self._in_use = deque[InUse](maxlen=MAX_IN_USE)
        self._stays: dict[str, int] = {}
        self._bytes: dict[str, Bytes] = {name: {} for name in PARAM_FIELDS}

    # ---- records

    def add_batch(self, step: int, seen: Forward) -> None:
        """Adds a watched batch; its layers are recorded if it keeps as much as any before."""
        self.n_watched += 1
        for name in seen.compiled:
            if name in self.types and not self.types[name].endswith(COMPILED):
                self.types[name] += COMPILED
        uses = sum_layers(seen, self.types)
        self.called |= {name for name, use in uses.items() if use["calls"]}
        self.hidden |= seen.hidden
        self._in_use.append((step, seen.old_bytes, seen.allocated_before))
        self._stays = seen.stays
        most = -1 if self._fullest is None else self._fullest.kept
        if seen.kept > most:
            self._advice = advise(seen, self.types)
        if seen.kept >= most:  # of equal ones the later: on CUDA the first allocates workspaces
            self._fullest, self._step, self._uses = replace(seen, calls=[], saved=[]), step, uses

    @property
    def peak(self) -> int:
        """Peak of the fullest batch, 0 if none was watched."""
        return 0 if self._fullest is None else self._fullest.peak

    def note_params(self, params: Params) -> None:
        """Records the size of parameters, and of their gradients while they exist."""
        self._bytes["param_bytes"] = bytes_by_layer(params, lambda p: [p])
        self._bytes["grad_bytes"] = bytes_by_layer(params, lambda p: [] if p.grad is None else [p.grad])

    def note_optimizer(self, params: Params, opt: object) -> None:
        """Records the size of the optimizer state of each parameter."""
        states = getattr(opt, "state", {})
        self._bytes["optimizer_bytes"] = bytes_by_layer(params, lambda p: tensors_in(states.get(p, {})))

    # ---- readings

    def layers(self, depth: int | None = None, *, worst: Worst = None) -> LayerMemories:
        """Memory of each layer in the watched batch that keeps most, in the order of the model.

        Args:
            depth: number of levels to show, by default all.
            worst: number of layers to show, by `kept_self`, largest first; "auto" for 20 if there are more
                than 30.

        Raises:
            TypeError, ValueError: If `worst` is invalid.
            RuntimeError: If no batch was watched.
        """
        totals = self.totals
        rows = list(self._rows()) if depth is None else _folded(self._rows(), depth)
        batches = "1 watched batch" if self.n_watched == 1 else f"{self.n_watched} watched batches"
        title = f"memory in step {self._step}, the fullest of {batches}"
        return LayerMemories(rows, totals, title, worst)

    def table(self) -> list[dict[str, Any]]:
        """The rows of `layers()` as dicts with the fields of `LayerMemory`.

        Raises:
            RuntimeError: If no batch was watched.
        """
        self._watched()
        return [asdict(row) for row in self._rows()]

    def to_frame(self) -> Any:
        """`table()` as a DataFrame of pandas or polars.

        Raises:
            ModuleNotFoundError: If neither is installed.
            RuntimeError: If no batch was watched.
        """
        return frame_of(self.table())

    @property
    def totals(self) -> MemoryTotals:
        """Memory of the watched batch that keeps most."""
        forward = self._watched()
        sums = {name: sum(sizes.values()) for name, sizes in self._bytes.items()}
        return MemoryTotals(forward.kept, forward.kept_by_loss, forward.peak, **sums)

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Layers to checkpoint first, best first; see `torch.utils.checkpoint`."""
        self._watched()
        return self._advice

    def growth(self) -> Growth:
        """Growth of memory per step, and the layers whose tensors stay alive."""
        return growth_of(list(self._in_use), self._stays)

    @property
    def notes(self) -> list[str]:
        """Sentences about what could not be counted."""
        forward = self._watched()
        unknown = f"bytes kept for the backward are unknown: {forward.why_unknown}"
        lines = [unknown] if forward.why_unknown else []
        for hooks in dict.fromkeys(forward.other_hooks.values()):
            names = join_names(
                [as_layer(name) for name, other in forward.other_hooks.items() if other == hooks], 4
            )
            what = (
                "recomputed in the backward" if hooks == CHECKPOINT_HOOKS else f"not counted, kept by {hooks}"
            )
            lines.append(f"{what}: {names}")
        return lines

    def report(self, depth: int | None = None, *, worst: Worst = "auto") -> MemoryReport:
        """The table of layers, with totals, growth of memory, and what to checkpoint first.

        Args:
            depth: number of levels to show, by default all.
            worst: number of layers to show, by `kept_self`, largest first; None for all, in the order of the
                model. By default all of up to 30 layers, and the largest 20 of more.

        Raises:
            TypeError, ValueError: If `worst` is invalid.
            RuntimeError: If no batch was watched.
        """
        layers = self.layers(depth, worst=worst)
        lines = [_totals_text(layers.totals), *self.notes, str(self.growth()), *_advice_lines(self.advice)]
        if self.rank_peak is not None:
            lines.append(f"all of this is of one rank; {self.rank_peak}")
        return MemoryReport(layers, lines)

    def show_on(self, page: Content) -> None:
        """Shows bytes by layer, and the sentences of the report."""
        page.memory = MemoryUsed(["kept", "parameters", "gradients", "optimizer"])
        if self._fullest is not None:
            page.memory.layers = {
                row.name: [float(getattr(row, column)) for column in ("kept_self", *PARAM_FIELDS)]
                for row in self.layers()
            }
            lines = "\n".join(self.report().lines)  # what is indented belongs to the line above
            page.memory.sentences = lines.replace(":\n  ", ": ").replace("\n  ", "; ").split("\n")

    def _watched(self) -> Forward:
        if self._fullest is None:
            every = self.every
            which = "every batch" if every == 1 else f"batches 0, {every}, {2 * every} …"
            raise RuntimeError(f"no batch was watched; {which} of a training would be")
        return self._fullest

    def _rows(self) -> Iterator[LayerMemory]:
        for name, kind in self.types.items():
            use, depth = self._uses.get(name, Use()), sum(outer in self.types for outer in names_around(name))
            of_calls = {field: use[field] for field in CALL_FIELDS}
            of_params = {field: sizes.get(name, 0) for field, sizes in self._bytes.items()}
            yield LayerMemory(name, kind, depth, **of_calls, **of_params)


def _folded(rows: Iterable[LayerMemory], depth: int) -> list[LayerMemory]:
    """Rows down to `depth`; the deepest include the layers inside them."""
    kept: list[LayerMemory] = []
    for row in rows:
        if row.depth <= depth:
            kept.append(row)
        elif kept:
            sums = {
                name: getattr(kept[-1], name) + getattr(row, name) for name in ("kept_self", *PARAM_FIELDS)
            }
            kept[-1] = replace(kept[-1], **sums)
    return kept


def _cell(n: int) -> str:
    """A number of bytes; empty for 0, as most layers have none of most kinds."""
    return format_bytes(n or None)


def _totals_text(totals: MemoryTotals) -> str:
    rest = (totals.param_bytes, totals.grad_bytes, totals.optimizer_bytes)
    params, grads, optimizer = (_cell(n) or "none" for n in rest)
    loss = f", {format_bytes(totals.kept_by_loss)} of it by the loss" if totals.kept_by_loss else ""
    return (
        f"kept for the backward: {_cell(totals.kept) or 'nothing'}{loss}; "
        f"parameters {params}, gradients {grads}, optimizer {optimizer}"
    )


def _advice_lines(advice: Sequence[Advice]) -> list[str]:
    if not advice:
        return ["to checkpoint: nothing that would free much"]
    lines = ["to checkpoint first:"]
    for x in advice:
        n_calls = f"{x.n_calls} × " if x.n_calls > 1 else ""
        which = f"{as_layer(x.layers)} ({n_calls}{x.type})"
        lines.append(f"  {which} frees {format_bytes(x.frees)}, lowers the peak by {format_bytes(x.lowers)}")
    return lines
