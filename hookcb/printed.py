"""What rich prints, also as text and in notebooks."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from hookcb.modules import listed

NARROW = 100  # columns of a terminal, below which a table leaves out some of its own


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


class Named(Protocol):
    """A row with a name."""

    @property
    def name(self) -> str:
        """By which it is looked up."""


Row = TypeVar("Row", bound=Named)
Layer = TypeVar("Layer", bound=LayerRow)


class Rows(Printed, Generic[Row]):
    """Rows in their order, which can be had by name."""

    missing = "there is no"  # what to say of a name that none has

    def __init__(self, rows: Iterable[Row], title: str) -> None:
        self.rows, self.title = list(rows), title

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise LookupError(f"{self.missing} {name!r}; there are {listed([row.name for row in self.rows])}")


class Column(NamedTuple, Generic[Layer]):
    """Of a table of layers: shown where any row has a text for it, and in a narrow terminal if `always`."""

    title: str
    text: Callable[[Layer], str]
    always: bool = True


class LayerTable(Rows[Layer]):
    """Layers, each under the one it is inside of."""

    columns: ClassVar[Sequence[Column[Any]]]

    def type_text(self, row: Layer) -> str:
        """What stands for its type."""
        return row.type

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=self.title)
        table.add_column("layer", overflow="fold")
        table.add_column("type", overflow="fold")
        shown = [column for column in self.columns if self._has(column, options.max_width)]
        for column in shown:
            table.add_column(column.title, justify="right", no_wrap=True)
        for row, name in zip(self.rows, indented(self.rows), strict=True):
            table.add_row(*map(Text, [name, self.type_text(row), *(column.text(row) for column in shown)]))
        yield table

    def _has(self, column: Column[Any], width: int) -> bool:
        return (column.always or width >= NARROW) and any(map(column.text, self.rows))


def indented(rows: Iterable[LayerRow]) -> Iterator[str]:
    """Their names, indented, each without that of the layer it stands under; the model's is its class."""
    around: list[str] = []
    for row in rows:
        del around[row.depth :]
        outer = f"{around[-1]}." if around and around[-1] else ""
        yield "  " * row.depth + (row.name or row.type).removeprefix(outer)
        around.append(row.name)
