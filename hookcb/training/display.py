"""Displays of a running fit: plain rows, a progress bar in a terminal, or a table in a notebook."""

import html
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hookcb.core.randomness import random_kept
from hookcb.records.printing import html_table

if TYPE_CHECKING:
    from rich.progress import TaskID


class Display:
    """Progress of a fit in a file or pipe: a line for each epoch, under a line of column names."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.names: list[str] = []

    def advance(self, doing: str, done: int, total: int | None) -> None:
        """Shows that `done` of `total` batches of the phase `doing` are done; here nothing."""

    def add_row(self, row: Mapping[str, float]) -> None:
        """Shows the row of an epoch."""
        if self.names != list(row):
            self.names = list(row)
            self._line(name.rjust(max(10, len(name))) for name in self.names)
        self._line(_text(name, value).rjust(max(10, len(name))) for name, value in row.items())

    def add_line(self, line: str) -> None:
        """Shows a line of text."""
        self._line([line])

    def _line(self, cells: Iterable[str]) -> None:
        self.console.print("  ".join(cells), soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        """Removes the progress bar, if there is one; rows stay on the screen."""


def open_display(console: Console, bar: bool) -> Display:
    """Opens the display that suits `console`; in a file or pipe, a bar would only show up at the end."""
    if console.is_jupyter:
        return _NotebookTable(console, bar)
    if console.is_interactive and bar:
        return _TerminalBar(console)
    return Display(console)


class _TerminalBar(Display):
    """A bar at the bottom of the terminal, the rows above it."""

    def __init__(self, console: Console) -> None:
        with random_kept():
            from rich import progress

        super().__init__(console)
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
        )
        self.live = progress.Progress(
            *columns, progress.TimeRemainingColumn(), console=console, transient=True, auto_refresh=False
        )
        self.task: TaskID | None = None
        self.live.start()

    def advance(self, doing: str, done: int, total: int | None) -> None:
        if self.task is None:
            self.task = self.live.add_task(doing, total=total)
        self.live.update(self.task, description=doing, completed=done, total=total, refresh=True)

    def add_row(self, row: Mapping[str, float]) -> None:
        if self.task is not None:
            self.live.remove_task(self.task)
            self.live.refresh()  # else the old bar would be drawn again below the row
            self.task = None
        super().add_row(row)

    def close(self) -> None:
        self.live.stop()


class _NotebookTable(Display):
    """An HTML table that grows and is saved with the notebook; rich's live display would not be saved."""

    def __init__(self, console: Console, bar: bool) -> None:
        with random_kept():
            import IPython.display

        super().__init__(console)
        ipython: Any = IPython.display  # untyped
        self.html, self.bar = ipython.HTML, bar
        self.began, self.first, self.last = time.perf_counter(), 0, 0
        self.rows: list[Mapping[str, float]] = []
        self.lines = ""
        self.handle = ipython.display(self.html(""), display_id=True)

    def advance(self, doing: str, done: int, total: int | None) -> None:
        if not self.bar:
            return
        now = time.perf_counter()
        if done <= self.last:  # another phase has begun
            self.began, self.first = now, done
        elif total:
            doing += f" · {(now - self.began) / (done - self.first) * (total - done):.0f} s left"
        self.last = done
        ends = f'value="{done}" max="{total}"' if total else ""
        self._show(f"<progress {ends}></progress> {done}/{total or '?'} · {html.escape(doing)}")

    def add_row(self, row: Mapping[str, float]) -> None:
        self.rows.append(row)
        self._show("")

    def add_line(self, line: str) -> None:
        self.lines += f"<div>{html.escape(line)}</div>"
        self._show("")

    def close(self) -> None:
        self._show("")

    def _show(self, below: str) -> None:
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        cells = ([_text(name, row[name]) if name in row else "–" for name in names] for row in self.rows)
        table = html_table(names, cells) if self.rows else ""
        self.handle.update(self.html(f"{self.lines}{table}<div>{below}</div>"))


def _text(name: str, value: float) -> str:
    if name == "time":
        return f"{int(value) // 60}:{value % 60:04.1f}"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if not value or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"
