"""What rich prints, also as text and in notebooks."""

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from rich.jupyter import JupyterMixin

from hookcb.core.console import as_text
from hookcb.hooks.modules import listed


class Printed(JupyterMixin):
    """What rich prints, and `print` too: as wide as the terminal, in the characters of standard output."""

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__


class Named(Protocol):
    """A row with a name."""

    @property
    def name(self) -> str:
        """By which it is looked up."""


Row = TypeVar("Row", bound=Named)


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
