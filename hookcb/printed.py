"""What rich prints, also as text and in notebooks."""

import io
from collections.abc import Iterable, Iterator
from typing import Protocol

from rich.console import Console
from rich.jupyter import JupyterMixin


class Printed(JupyterMixin):
    """What rich prints; as text it is as wide as it needs to be."""

    def __str__(self) -> str:
        lines = io.StringIO()
        Console(file=lines, width=1000, color_system=None, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in lines.getvalue().splitlines())

    __repr__ = __str__


class LayerRow(Protocol):
    """A row of a table of layers."""

    @property
    def name(self) -> str:
        """Qualified, empty for the whole model."""

    @property
    def type(self) -> str:
        """Its class."""

    @property
    def depth(self) -> int:
        """How many of the other layers it is inside of."""


def indented(rows: Iterable[LayerRow]) -> Iterator[str]:
    """Their names, indented, each without that of the layer it stands under; the model's is its class."""
    around: list[str] = []
    for row in rows:
        del around[row.depth :]
        outer = f"{around[-1]}." if around and around[-1] else ""
        yield "  " * row.depth + (row.name or row.type).removeprefix(outer)
        around.append(row.name)
