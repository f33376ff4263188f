"""embed.scale, embed.single_index: embeddings that are lost in a sum, or get one index only."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hookcb.core import graph
from hookcb.core.optim import detached_scalar
from hookcb.core.text import as_layer
from hookcb.core.torch_private import parameters_of
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.tokens import Tokens
from hookcb.diagnosis.rules import MIN_BATCHES, is_trivial
from hookcb.diagnosis.run import Passed, Run
from hookcb.diagnosis.verdict import Severity
from hookcb.hooks.modules import named_modules

MAX_NODES = 4096
SAME_SCALE = (*graph.SAME_ORDER, "Slice", "Expand")  # whose rows are those of a table
MAX_RATIO = 30.0  # of the RMS of two tables, before the first step and at the end; healthy ones end at 18
POSITIONS = ("pos", "wpe")  # in the name of a table of positions


@fault(
    "embed.scale",
    Site.MODULES,
    needs="batches graph",
    leads_to="loss.trivial loss.flat",
    subject="embeddings",
)
class EmbeddingScales(Fault):
    """An embedding that is lost in the sum, as a far larger one is added to it.

    Formula: RMS of one table / RMS of the other, of embeddings of tokens or positions whose outputs are added
    in the autograd graph of the first loss. Limit: 30, before the first step and at the end, if the model
    is no better than a constant: a warning where `loss.trivial` finds that, a note from 50 batches on. Tables
    that begin at zero are left out; healthy ones with positions of std 0.02 beside N(0, 1) end at 18.

    Source: Vaswani et al., "Attention Is All You Need", 2017, who scale embeddings beside positions.
    """

    headline = "An embedding is lost in the sum"
    passed = "embeddings on different scales"
    unless = "too little was seen of the sums in the graph"

    def __init__(self) -> None:
        super().__init__()
        # name of each table in each sum, of embeddings or parameters, and its RMS before the first step
        self._tables: list[list[tuple[str, Tensor, float | Tensor]]] = []
        self.sums: list[list[tuple[str, float, float]]] = []  # name, first and last RMS of each table

    def on_first_graph(self, run: Run) -> None:
        names = {
            id(p): name or path
            for name, m in reversed(named_modules(run.loop.model).items())
            for path, p in parameters_of(m).items()
            if p is not None
        }
        if (nodes := graph.uses(run.loop.loss_node, MAX_NODES)) is None:
            return
        self.unless = ""
        adding = [at for at in nodes if graph.name(at) == "Add"]
        sums = {at: tables for at in adding if len(tables := _added(at)) > 1}
        inner = {after for at in sums for after, _ in at.next_functions}
        for at, tables in sums.items():
            if at not in inner and all(id(table) in names for table in tables):
                self._tables.append([(names[id(table)], table, _rms(table)) for table in tables])

    def tell(self, run: Run) -> None:
        self.sums = [
            [(name, float(begin), float(_rms(table))) for name, table, begin in tables]
            for tables in self._tables
        ]

    def freeze(self) -> None:
        self._tables = []

    def findings(self, run: Run) -> Iterator[Result]:
        if not is_trivial(run, MIN_BATCHES):
            yield Passed(self.passed)
            return
        severity: Severity = "warning" if is_trivial(run) else "info"
        seen = []
        for tables in self.sums:
            one, begin, end = min(tables, key=lambda x: x[2])
            other, large, last = max(tables, key=lambda x: x[2])
            if large > MAX_RATIO * begin > 0 and last > MAX_RATIO * end > 0:
                about = self.finding(
                    f"The output of {one} is added to that of {other}, which is far larger: the RMS of "
                    f"their weights was {begin:.2g} and {large:.2g} at the beginning, and is {end:.2g} "
                    f"and {last:.2g} now (limit: {MAX_RATIO:g} times).",
                    severity,
                    at=one,
                    when=0,
                    value=last / end,
                    causes=("embeddings that are initialized on different scales",),
                    next_steps=(f"Initialize {one} and {other} with the same std, such as 0.02",),
                )
                seen.append(about)
        yield from self.told(run, seen, self.unless)


def _added(at: Any) -> list[Tensor]:
    """Tables whose rows this node adds; empty if it adds anything else."""
    if graph.name(at) == "Add":
        tables: list[Tensor] = []
        for after, _ in reversed(at.next_functions):  # a residual connection is first, what it joins second
            if not (part := _added(after)):
                return []
            tables = part + tables
        return tables
    table = graph.leaf(graph.peel(graph.peel(at, SAME_SCALE), ("Embedding",)))
    return [table] if table is not None and table.ndim > 1 else []


def _rms(table: Tensor) -> float | Tensor:
    return detached_scalar(table.detach().float().square().mean().sqrt())


@fault("embed.single_index", Site.MODULES, needs="batches", subject="embeddings", exact=True)
class SingleIndex(Fault):
    """An embedding that gets the same index at all positions of all inspected batches.

    Exact: smallest and largest index in three batches, of an embedding with as many rows as positions, eight
    or more. A warning for an embedding with "pos" or "wpe" in its name, as positions then cannot be told
    apart; else a note, as an id that all samples share may be intended.
    """

    headline = "An embedding gets one index only"
    uses = (Tokens,)
    passed = "embeddings that get a single index"

    def findings(self, run: Run) -> Iterator[Result]:
        indices, seen = run.measured(Tokens).indices, []
        for layer, (n, low, high) in indices.items():
            if low == high:
                is_position = any(part in layer.lower() for part in POSITIONS)
                about = self.finding(
                    f"Embedding {as_layer(layer) or 'of the model'} gets index {low} at all positions of all "
                    f"{n} inspected batches"
                    f"{', so the model cannot tell positions apart' if is_position else ''}.",
                    "warning" if is_position else "info",
                    at=layer,
                    value=float(low),
                    causes=("positions or ids that are all 0, as torch.zeros gives them",),
                    next_steps=("For positions, pass torch.arange(T); it is fine for an id that all share",),
                )
                seen.append(about)
        return self.told(run, seen, "" if indices else run.why_not("indices of embeddings"))
