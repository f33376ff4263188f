"""Compares embeddings whose outputs are added, as the autograd graph of the first loss shows."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hookcb.core import graph
from hookcb.core.optim import detached_scalar
from hookcb.diagnosis.probes.linear_links import nodes_of
from hookcb.diagnosis.run import Observation
from hookcb.hooks.modules import named_modules

SAME_SCALE = (*graph.SAME_ORDER, "Slice", "Expand")  # whose rows are those of a table
MAX_RATIO = 30.0  # of the RMS of two tables, before the first step and at the end; healthy ones end at 18


class AddedTables:
    """RMS of the tables of embeddings, of tokens and of positions, whose outputs are added.

    Attributes:
        is_known: whether all sums in the graph were looked at.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._names: list[list[str]] = []  # of the layers or parameters, in each sum
        self._tables: list[list[Tensor]] = []
        self._first: list[list[float | Tensor]] = []  # RMS before the first step, on their devices

    def read_graph(self, node: Any, model: nn.Module) -> None:
        """Finds sums of tables in the graph of the first loss, and measures these."""
        names = {
            id(p): name or path
            for name, m in reversed(named_modules(model).items())
            for path, p in m.named_parameters(name, recurse=False)
        }
        if (nodes := nodes_of(node)) is None:
            return
        self.is_known = True
        sums = {at: tables for at in nodes if len(tables := _added(at)) > 1}
        inner = {after for at in sums for after in graph.inputs(at)}
        for at, tables in sums.items():
            if at not in inner and all(id(table) in names for table in tables):
                self._names.append([names[id(table)] for table in tables])
                self._tables.append(tables)
                self._first.append([_rms(table) for table in tables])

    def observations(self) -> Iterator[Observation]:
        """One for each sum of which one table was, and is, far larger than another."""
        for names, tables, first in zip(self._names, self._tables, self._first, strict=True):
            begin, end = list(map(float, first)), [float(_rms(table)) for table in tables]
            small, large = end.index(min(end)), end.index(max(end))
            if begin[large] > MAX_RATIO * begin[small] > 0 and end[large] > MAX_RATIO * end[small] > 0:
                one, other = names[small], names[large]
                yield Observation(
                    "embed.scale",
                    one,
                    step=0,
                    value=end[large] / end[small],
                    text=f"The output of {one} is added to that of {other}, which is far larger: the RMS of "
                    f"their weights was {begin[small]:.2g} and {begin[large]:.2g} at the beginning, and is "
                    f"{end[small]:.2g} and {end[large]:.2g} now (limit: {MAX_RATIO:g} times).",
                    causes=("embeddings that are initialized on different scales",),
                    next_steps=(f"Initialize {one} and {other} with the same std, such as 0.02",),
                )


def _added(at: Any) -> list[Tensor]:
    """Tables whose rows this node adds; empty if it adds anything else."""
    if graph.name(at) == "Add":
        parts = [_added(after) for after, _ in at.next_functions]
        return [table for part in parts for table in part] if all(parts) else []
    table = graph.leaf(graph.peel(graph.peel(at, SAME_SCALE), ("Embedding",)))
    return [table] if table is not None and table.ndim > 1 else []


def _rms(table: Tensor) -> float | Tensor:
    return detached_scalar(table.detach().float().square().mean().sqrt())
