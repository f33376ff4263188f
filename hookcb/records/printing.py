"""Objects that rich, `print` and notebooks show alike."""

import html
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

from rich.jupyter import JupyterMixin

from hookcb.core.console import as_text
from hookcb.core.text import join_names


class Printed(JupyterMixin):
    """Base of objects that `print` shows as rich does: in the terminal's width and encoding."""

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__


def html_of(shown: Any) -> str:
    """Text of an object that is `Printed`, in HTML, as notebooks show it; rich escapes it."""
    return f"{shown._repr_mimebundle_((), ())['text/html']}"


class Named(Protocol):
    """A row with a name."""

    @property
    def name(self) -> str:
        """Key of the row."""


Row = TypeVar("Row", bound=Named)


class Rows(Printed, Generic[Row]):
    """Rows in order, also found by name."""

    missing = "there is no"  # beginning of the error for an unknown name

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
    """A table in HTML, its first `n_left` columns left-aligned; texts are escaped."""

    def line(cells: Iterable[str], tag: str) -> str:
        sides = (' style="text-align: left"' if i < n_left else "" for i in count())
        return "".join(
            f"<{tag}{side}>{html.escape(cell)}</{tag}>" for cell, side in zip(cells, sides, strict=False)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
