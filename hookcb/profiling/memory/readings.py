"""What can be read of watched batches: memory by layer, how it grows, and what would free some."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from hookcb.core.text import format_bytes, join_names
from hookcb.core.torch_private import CHECKPOINT_HOOKS
from hookcb.profiling.memory.growth import Growth, Look, growth_of
from hookcb.profiling.memory.sizes import tensors_in
from hookcb.profiling.memory.sums import Advice, LayerUse, Params, advise, bytes_by_layer, sum_layers
from hookcb.profiling.memory.watch import Forward
from hookcb.records.printing import Printed
from hookcb.records.tables import Column, LayerTable, Worst

KEEP = 1000  # of the latest looks growth is told
COMPILED = ", compiled"
OF_ITS_OWN = ("kept_self", "param_bytes", "grad_bytes", "optimizer_bytes")
Bytes = Mapping[str | None, int]  # by layer; None is of none of them


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What a layer takes in one batch, in bytes.

    Attributes:
        name: qualified, empty for the whole model.
        type: its class.
        depth: how many of the other layers it is inside of.
        calls: how often it was called.
        allocated: alive when its calls ended less those when they began, over all calls.
        peak: the most in one of its calls, less those when it began.
        kept: for the backward, in it and the layers called in it; a storage counts once, for the first that
            saved it, and neither parameters, buffers nor the batch count.
        kept_self: of these, those that no layer called in it has saved.
        output_bytes: size of its outputs.
        param_bytes: of parameters of its own that no earlier row has counted.
        grad_bytes: of their gradients, after the backward.
        optimizer_bytes: of what the optimizer keeps for them, after its step.
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
    """What a batch takes in all, in bytes.

    Attributes:
        kept: for the backward, by layers, by the loss and by what runs between.
        kept_by_loss: of these, those that the loss was the first to save.
        peak: the most of what the forward and the loss made that was alive at a time.
        param_bytes, grad_bytes, optimizer_bytes: of all parameters.
    """

    kept: int
    kept_by_loss: int
    peak: int
    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int


@dataclass(slots=True)
class Watched:
    """A watched batch, as it stays.

    Attributes:
        step: of the training, from 0.
        kept, kept_by_loss, peak: as in `MemoryTotals`.
        uses: by layer.
        advice: what to checkpoint first.
        other_hooks: layers that ran under someone else's hooks on saved tensors, with the name of these.
        why_unknown: where what is kept could not be told, why.
    """

    step: int
    kept: int
    kept_by_loss: int
    peak: int
    uses: dict[str, LayerUse]
    advice: tuple[Advice, ...]
    other_hooks: dict[str, str]
    why_unknown: str

    @classmethod
    def of(cls, step: int, seen: Forward, uses: dict[str, LayerUse], advice: tuple[Advice, ...]) -> Self:
        """Of what was seen, without the calls and storages."""
        sums = seen.kept, seen.kept_by_loss, seen.peak
        return cls(step, *sums, uses, advice, seen.other_hooks, seen.why_unknown)


class LayerMemories(LayerTable[LayerMemory]):
    """The memory of layers, each under the one it is inside of; `totals` is of all."""

    missing = "no layer was watched that is called"
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
        """Bytes that it keeps for the backward, without those of the layers in it."""
        return row.kept_self


class MemoryReport(Printed):
    """The table of layers, and below it in words what it comes to."""

    def __init__(self, layers: LayerMemories, lines: Sequence[str]) -> None:
        self.layers, self.lines = layers, list(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.layers
        yield Text("\n".join(self.lines))


@dataclass(slots=True)
class ParamBytes:
    """Sizes by layer, and None for what is in no layer."""

    params: Bytes = field(default_factory=Counter)
    grads: Bytes = field(default_factory=Counter)
    optimizer: Bytes = field(default_factory=Counter)


class MemoryReadings:
    """The readings of a callback that has watched batches.

    Attributes:
        types: the classes of the layers, by name.
        called: the layers that were called in a watched batch.
        hidden: tensors whose memory could not be told, by layer, with their type or layout.
    """

    every: int | None
    n_batches: int
    n_skipped: int

    def clear(self, types: Mapping[str, str]) -> None:
        """Forgets what was recorded; `types` are the classes of the layers, by name."""
        self.types = dict(types)
        self.called: set[str] = set()
        self.hidden: dict[str, str] = {}
        self._fullest: Watched | None = None
        self._looks = deque[Look](maxlen=KEEP)
        self._stays: dict[str, int] = {}
        self._bytes = ParamBytes()

    # ---- records

    def add(self, step: int, seen: Forward) -> None:
        """Adds a watched batch; of its layers what it took stays if it keeps as much as any before."""
        for name in seen.compiled:
            if name in self.types and not self.types[name].endswith(COMPILED):
                self.types[name] += COMPILED
        uses = sum_layers(seen, self.types)
        self.called |= {name for name, use in uses.items() if use.calls}
        self.hidden |= seen.hidden
        self._looks.append(Look(step, seen.old_bytes, seen.allocated_before))
        self._stays = seen.stays
        before = self._fullest
        if before is None or seen.kept > before.kept:
            self._fullest = Watched.of(step, seen, uses, advise(seen, self.types))
        elif seen.kept == before.kept:  # the later, as on CUDA the first one allocates workspaces
            self._fullest = Watched.of(step, seen, uses, before.advice)

    def note_params(self, params: Params) -> None:
        """Notes how large parameters are, and their gradients, while these are there."""
        self._bytes.params = bytes_by_layer(params, lambda p: [p])
        self._bytes.grads = bytes_by_layer(params, lambda p: [] if p.grad is None else [p.grad])

    def note_optimizer(self, params: Params, opt: object) -> None:
        """Notes what the optimizer keeps for each parameter."""
        states = getattr(opt, "state", {})
        self._bytes.optimizer = bytes_by_layer(params, lambda p: tensors_in(states.get(p, {})))

    # ---- readings

    def layers(self, depth: int | None = None, *, worst: Worst = None) -> LayerMemories:
        """What each layer takes in the watched batch that keeps most, in the order of the model.

        Args:
            depth: how many levels of layers to show, by default all.
            worst: how many layers to show, those first that keep most for the backward themselves; "auto" for
                20 of more than 30.

        Raises:
            TypeError, ValueError: If `worst` is invalid.
            RuntimeError: where no batch was watched.
        """
        watched = self._watched()
        rows = list(self._rows(watched)) if depth is None else _folded(self._rows(watched), depth)
        times = "1 watched batch" if self.n_batches == 1 else f"{self.n_batches} watched batches"
        title = f"memory in step {watched.step}, the fullest of {times}"
        return LayerMemories(rows, self.totals, title, worst)

    @property
    def totals(self) -> MemoryTotals:
        """What that batch takes in all."""
        watched, of = self._watched(), self._bytes
        sums = (sum(x.values()) for x in (of.params, of.grads, of.optimizer))
        return MemoryTotals(watched.kept, watched.kept_by_loss, watched.peak, *sums)

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What to checkpoint first, see `torch.utils.checkpoint`; the best first."""
        return self._watched().advice

    def growth(self) -> Growth:
        """How memory grows from step to step, and whose tensors stay."""
        return growth_of(list(self._looks), self._stays)

    @property
    def notes(self) -> list[str]:
        """What could not be counted, in words."""
        watched = self._watched()
        unknown = f"what is kept for the backward is not known: {watched.why_unknown}"
        lines = [unknown] if watched.why_unknown else []
        for hooks in dict.fromkeys(watched.other_hooks.values()):
            names = join_names([name for name, other in watched.other_hooks.items() if other == hooks], 4)
            what = (
                "computed again in the backward"
                if hooks == CHECKPOINT_HOOKS
                else f"not counted, kept by {hooks}"
            )
            lines.append(f"{what}: {names}")
        return lines

    def report(self, depth: int | None = None, *, worst: Worst = "auto") -> MemoryReport:
        """The table of layers, what it comes to, how memory grows, and what to checkpoint first.

        Args:
            depth: how many levels of layers to show, by default all.
            worst: how many layers to show, those first that keep most for the backward themselves; None for
                all, in the order of the model. By default all of up to 30, and the 20 worst of more.

        Raises:
            TypeError, ValueError: If `worst` is invalid.
            RuntimeError: where no batch was watched.
        """
        layers = self.layers(depth, worst=worst)
        lines = [_totals_text(layers.totals), *self.notes, str(self.growth()), *_advice_lines(self.advice)]
        return MemoryReport(layers, lines)

    def _watched(self) -> Watched:
        if self._fullest is None:
            every = self.every or 1
            which = "every batch" if every == 1 else f"batches 0, {every}, {2 * every} …"
            raise RuntimeError(
                f"no batch was watched; {which} of a training would be, and of {self.n_skipped} none was"
            )
        return self._fullest

    def _rows(self, watched: Watched) -> Iterator[LayerMemory]:
        of = self._bytes
        for name, kind in self.types.items():
            use = watched.uses.get(name) or LayerUse()
            yield LayerMemory(
                name=name,
                type=kind,
                depth=sum(_is_inside(name, other) for other in self.types),
                calls=use.calls,
                allocated=use.allocated,
                peak=use.peak,
                kept=use.kept,
                kept_self=use.kept_self,
                output_bytes=use.output_bytes,
                param_bytes=of.params.get(name, 0),
                grad_bytes=of.grads.get(name, 0),
                optimizer_bytes=of.optimizer.get(name, 0),
            )


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _folded(rows: Iterable[LayerMemory], depth: int) -> list[LayerMemory]:
    """The rows down to `depth`, the deepest with what is inside."""
    kept: list[LayerMemory] = []
    for row in rows:
        if row.depth <= depth:
            kept.append(row)
        elif kept:
            sums = {name: getattr(kept[-1], name) + getattr(row, name) for name in OF_ITS_OWN}
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
        which = f"{x.layers} ({x.n_calls} × {x.type})" if x.n_calls > 1 else f"{x.layers} ({x.type})"
        lines.append(f"  {which} frees {format_bytes(x.frees)}, lowers the peak by {format_bytes(x.lowers)}")
    return lines
