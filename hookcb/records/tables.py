"""Tables of named rows that fit the terminal: columns are left out before names are shortened."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hookcb.core.arguments import check_count
from hookcb.core.console import spelled
from hookcb.records.plots import cut_name, without_common_parts
from hookcb.records.printing import Named, Row, Rows

MIN_NAME, MIN_TEXT = 24, 12  # minimum widths of long names and of texts that wrap
MAX_WORD = 20  # longest word, such as a code of a finding, that is kept whole in a text that wraps
MANY, WORST = 30, 20  # by default a table of more than MANY rows shows the WORST of them
Worst = int | None | Literal["auto"]


class Column(NamedTuple, Generic[Row]):
    """Column of a table, shown if it has text in any row.

    Attributes:
        title: heading.
        text: function that returns the text for a row.
        rank: columns with the highest rank are left out first in a narrow terminal.
        is_text: whether texts are left-aligned and may wrap; else they are numbers.
        style: rich style of the texts.
    """

    title: str
    text: Callable[[Row], str]
    rank: int = 0
    is_text: bool = False
    style: str = ""


class LayerRow(Named, Protocol):
    """A row of a table of layers, by qualified name; that of the whole model is empty."""

    @property
    def type(self) -> str:
        """Class."""

    @property
    def depth(self) -> int:
        """Number of layers that contain it."""


Layer = TypeVar("Layer", bound=LayerRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A row of a report.

    Attributes:
        name: name of the layer or parameter.
        module: qualified name of the module by which rows are grouped.
        weight: numbers compared in order; the rows with the largest are the worst.
        n: number of rows it represents, as the worst of them.
    """

    name: str
    module: str
    weight: tuple[float, ...]
    n: int = 1


class VerdictLike(Protocol):
    """The judgment that a report marks its rows with, see `hookcb.Verdict`."""

    @property
    def findings(self) -> Sequence[Any]:
        """All findings, the worst first, each with a `code`, and with a `layer` or `param`, or ""."""


class Mark(NamedTuple):
    """Findings about a row.

    Attributes:
        weight: the larger, the worse; 0 without a finding.
        text: codes of the findings, the worst first.
    """

    weight: int = 0
    text: str = ""


NO_MARK = Mark()


def marks_of(verdict: VerdictLike | None, attribute: Literal["layer", "param"]) -> dict[str, Mark]:
    """Marks by name of the layer or parameter that findings are about; none without a verdict.

    Raises:
        TypeError: If `verdict` has no findings.
    """
    if verdict is not None and not hasattr(verdict, "findings"):
        raise TypeError(f"verdict must be a Verdict, such as learn.diagnose(), or None, got {verdict!r:.80}")
    findings = () if verdict is None else verdict.findings
    marks: dict[str, Mark] = {}
    for i, finding in enumerate(findings):
        if name := getattr(finding, attribute):
            weight, text = marks.get(name, (len(findings) - i, ""))
            codes = dict.fromkeys([*filter(None, text.split(", ")), finding.code])
            marks[name] = Mark(weight, ", ".join(codes))
    return marks


Shown = TypeVar("Shown", bound=Ranked)
COUNT: Column[Any] = Column("worst of", lambda row: f"{row.n}" if row.n > 1 else "", rank=1)


class WorstRows(Rows[Row]):
    """Rows as a table: all of them in their order, or the worst first.

    Args:
        rows: all rows.
        title: text above the table.
        worst: number of rows to show, the worst first; None for all, in their order; "auto" for all of up to
            30 rows, and 20 of more.
        weight: function of a row; the rows with the largest values are the worst.
        caption: text below the table.

    Raises:
        TypeError, ValueError: If `worst` is invalid.
    """

    head, which, is_tree = "layer", "worst", False
    columns: ClassVar[Sequence[Column[Any]]]

    def __init__(
        self, rows: Iterable[Row], title: str, worst: Worst, weight: Callable[[Row], Any], caption: str = ""
    ) -> None:
        shown = found = list(rows)
        n = (WORST if len(found) > MANY else None) if worst == "auto" else worst
        if n is not None:
            shown = sorted(found, key=weight, reverse=True)[: check_count("worst", n, "rows")]
            is_part = len(shown) < len(found)
            part = f"the {len(shown)} {self.which} of {len(found)}; worst=None shows all"
            caption = "\n".join(filter(None, [part if is_part else f"{self.which} first", caption]))
        super().__init__(shown, title)
        self.in_order, self.caption = n is None, caption
        self._names = [row.name for row in found]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield fitted(
            self.rows,
            self._labels(),
            self.columns,
            options,
            title=self.title,
            head=self.head,
            is_tree=self.is_tree,
            among=self._names,
            caption=self.caption,
        )

    def _labels(self) -> list[str]:
        return [row.name for row in self.rows]


class Report(WorstRows[Shown]):
    """Layers or parameters with their numbers, in the order of the model or the worst first.

    Args:
        rows: rows in the order of the model.
        title, worst, caption: see `WorstRows`.
        depth: shows the worst row of each group of modules whose names agree in the first `depth` parts.

    Raises:
        TypeError, ValueError: If `worst` or `depth` is invalid.
    """

    def __init__(
        self,
        rows: Sequence[Shown],
        title: str,
        *,
        worst: Worst = "auto",
        depth: int | None = None,
        caption: str = "",
    ) -> None:
        found = rows if depth is None else _grouped(rows, depth)
        super().__init__(found, title, worst, lambda row: row.weight, caption)
        self._names = [row.name for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._names or self.caption:
            yield from super().__rich_console__(console, options)
        else:
            yield Text(f"nothing is recorded, no {self.head} has numbers yet")


def _grouped(rows: Sequence[Shown], depth: int) -> Iterator[Shown]:
    """The worst row of each group of modules, see `Report`."""
    check_count("depth", depth, "levels")
    groups: dict[tuple[str, ...], list[Shown]] = {}
    for row in rows:
        groups.setdefault(tuple(row.module.split(".")[:depth]), []).append(row)
    for group in groups.values():
        yield replace(max(group, key=lambda row: row.weight), n=len(group))


class LayerTable(WorstRows[Layer]):
    """Layers as a tree, or the largest first."""

    which = "largest"

    def __init__(self, rows: Iterable[Layer], title: str, worst: Worst = None) -> None:
        super().__init__(rows, title, worst, self.size)
        self.is_tree = self.in_order

    @staticmethod
    def size(row: Any) -> float:
        """Size of a layer without the layers in it."""
        raise NotImplementedError

    def _labels(self) -> list[str]:
        return list(_indented(self.rows)) if self.is_tree else [row.name or row.type for row in self.rows]


def _indented(rows: Iterable[LayerRow]) -> Iterator[str]:
    """Indented names, each without the name of the layer above; the model's name is its class."""
    around: list[str] = []
    for row in rows:
        del around[row.depth :]
        outer = f"{around[-1]}." if around and around[-1] else ""
        yield "  " * row.depth + (row.name or row.type).removeprefix(outer)
        around.append(row.name)


# ---- how they fit


def fitted(
    rows: Sequence[Any],
    names: Sequence[str],
    columns: Sequence[Column[Any]],
    options: ConsoleOptions,
    *,
    title: str | None = None,
    head: str = "layer",
    is_tree: bool = False,
    is_framed: bool = True,
    among: Iterable[str] = (),
    caption: str = "",
) -> Table:
    """A table of `rows` with as many of `columns` as fit beside their names.

    A long name gets at least 24 characters, and as many as distinguish it from all others, also `among` rows
    that are not shown. Names that are too long are shown without their common beginning, then without more of
    their beginnings; those of a tree, which are indented, are wrapped. `head` is the heading of the names;
    `is_framed` says whether there are lines around cells; `options` has the console's width and encoding.
    """
    names = [spelled(name, options.encoding) for name in names]
    others = {spelled(name, options.encoding) for name in among}
    cells = {c: [spelled(c.text(row), options.encoding) for row in rows] for c in columns}
    widths = {c: _width([c.title, *texts]) for c, texts in cells.items() if any(texts)}
    least = {c: _squeezed(c, width, cells[c]) for c, width in widths.items()}
    gap, edge = (3, 1) if is_framed else (2, 0)
    need = _width(names) if is_tree else _distinct_width(names, others.union(names))
    need = min(need, options.max_width // 2) if is_tree else need  # a deep tree leaves room for a number
    room = options.max_width - edge - gap
    shown = _chosen(least, room - max(need, min(MIN_NAME, _width([head, *names]))), gap)
    room = max(1, room - sum(gap + least[c] for c in shown))
    if not is_tree and _width(names) > room:
        names, begin = _shortened(names, room, options.encoding)
        caption = "\n".join(filter(None, [caption, begin and f"each name begins with {begin}"]))
    table = Table() if is_framed else Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    table.title, table.caption = title, Text(caption, "table.caption") if caption else None
    width = min(room, _width([head, *names]))
    table.add_column(head, width=width, overflow="fold", no_wrap=not is_tree)
    _add_columns(table, {c: (least[c], widths[c]) for c in shown}, room - width)
    for i, name in enumerate(names):
        table.add_row(Text(name), *(Text(cells[c][i]) for c in shown))
    return table


def _chosen(widths: Mapping[Column[Any], int], room: int, gap: int) -> list[Column[Any]]:
    """The columns that fit into a width of `room`, with a gap before each."""
    shown = list(widths)
    while shown and sum(gap + widths[c] for c in shown) > room:
        shown.remove(max(reversed(shown), key=lambda c: c.rank))
    return shown


def _add_columns(table: Table, widths: Mapping[Column[Any], tuple[int, int]], spare: int) -> None:
    """Adds columns with their minimum widths, widened in order while there is spare room."""
    for c, (least, width) in widths.items():
        final = min(width, least + spare)
        spare -= final - least
        side: Literal["left", "right"] = "left" if c.is_text else "right"
        table.add_column(
            c.title, justify=side, width=final, no_wrap=not c.is_text, overflow="fold", style=c.style
        )


def _width(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _squeezed(column: Column[Any], width: int, texts: Iterable[str]) -> int:
    """Minimum width of a column whose full width is `width`; words of its texts are kept whole."""
    if not column.is_text:
        return width
    word = _width(word for text in texts for word in text.split())
    return min(width, max(MIN_TEXT, min(word, MAX_WORD)))


def _distinct_width(names: Iterable[str], among: Iterable[str]) -> int:
    """Number of characters, with one for the cut, whose ends distinguish `names` from all others."""
    backwards = sorted(name[::-1] for name in among)
    alike = [_n_alike(*pair) for pair in pairwise(backwards)]
    before, after = [0, *alike], [*alike, 0]
    need = {name[::-1]: max(n, m) + 2 for name, n, m in zip(backwards, before, after, strict=False)}
    return max((min(len(name), need[name]) for name in names), default=0)


def _n_alike(a: str, b: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _shortened(names: Sequence[str], width: int, encoding: str) -> tuple[list[str], str]:
    """`names` shortened to `width`, and the common beginning that was removed, such as "encoder.layers."."""
    short = without_common_parts(names, at_end=False) if len(names) > 1 else names
    cut = spelled("…", encoding)
    return [cut_name(name, width, cut) for name in short], names[0].removesuffix(short[0])
