"""What rich prints, also as text and in notebooks."""

import html
from collections.abc import Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from rich.jupyter import JupyterMixin

from hookcb.core.console import as_text
from hookcb.core.text import join_names

if TYPE_CHECKING:
    pass


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
        raise LookupError(f"{self.missing} {name!r}; there are {join_names([row.name for row in self.rows])}")


def html_table(head: Iterable[str], rows: Iterable[Iterable[str]], n_left: int = 0) -> str:
    """A table in HTML, its first `n_left` columns aligned to the left; the texts are escaped."""

    def line(cells: Iterable[str], tag: str) -> str:
        sides = (' style="text-align: left"' if i < n_left else "" for i in count())
        return "".join(
            f"<{tag}{side}>{html.escape(cell)}</{tag}>" for cell, side in zip(cells, sides, strict=False)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
