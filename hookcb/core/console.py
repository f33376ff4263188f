"""Printing that never ends a training: missing characters are spelled in ASCII, errors become warnings."""

import copy
import io
import logging
import os
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import rich
from rich.console import Console, RenderableType

from hookcb.core.whose import OURS, TORCH

LOGGER = logging.getLogger("hookcb")  # warnings, and the headline of each verdict, for those who log
LOGGER.addHandler(logging.NullHandler())  # else logging prints them a second time
NEVER_AT = OURS, TORCH, str(Path(rich.__file__).parent) + os.sep  # to which warnings do not point
BARS = dict(zip("▁▂▃▄▅▆▇█", ".:-=+*#@", strict=True))  # bars of a sparkline, lowest first
SPELLED = BARS | dict(
    pair.split(" ")
    for pair in (
        *("× x", "→ ->", "← <-", "≤ <=", "≥ >=", "≠ !=", "≈ ~", "± +/-", "∞ inf", "\N{MINUS SIGN} -"),
        *("· *", "• *", "… ...", "µ u", "‖ ||", "Δ d", "√ sqrt", "² ^2", "³ ^3"),
    )
)
BY_CATEGORY = {"Pd": "-", "Pi": "'", "Pf": "'"}  # dashes and quotation marks; there are many of each


def encoding_of(file: object) -> str:
    """Encoding of a stream; UTF-8 if it names none."""
    return getattr(file, "encoding", None) or "utf-8"


def spelled(text: str, encoding: str) -> str:
    """Spells `text` in the characters of an encoding: "->" for an arrow, an escape for a Chinese letter.

    >>> spelled("64→64, ×3 ≤ 1 µs – café", "ascii")
    '64->64, x3 <= 1 us - cafe'
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(c if _has(encoding, c) else _spelled(c, encoding) for c in text)
    except LookupError:  # an encoding that Python does not know; the stream that names it does
        return text
    return text


def _has(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _spelled(c: str, encoding: str) -> str:
    known = SPELLED.get(c) or BY_CATEGORY.get(unicodedata.category(c))
    if plain := known or unicodedata.normalize("NFKD", c).encode("ascii", "ignore").decode():
        return plain
    return "" if unicodedata.combining(c) else c.encode("ascii", "backslashreplace").decode()


class SafeFile:
    """Wraps the file of a console: spells characters that it lacks, and warns once about errors.

    Args:
        console: the console; its file is looked up at each write.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._has_warned = console, False

    @property
    def encoding(self) -> str:
        """Encoding of the file."""
        return encoding_of(self._console.file)

    def write(self, text: str) -> int:
        """Writes `text` if that is possible."""
        self._try(lambda file: _write(file, text))
        return len(text)

    def flush(self) -> None:
        """Flushes the file if that is possible."""
        self._try(lambda file: file.flush())

    def _try(self, act: Callable[[IO[str]], object]) -> None:
        try:
            act(self._console.file)
        except Exception as error:  # a closed file, a broken pipe, a full disk, or a bug in a user's class
            if not self._has_warned:
                self._has_warned = True
                warn(f"the output could not be written: {error!r}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # else a copy that has no attributes yet would recurse forever
            raise AttributeError(name)
        return getattr(self._console.file, name)


def _write(file: IO[str], text: str) -> None:
    try:
        file.write(spelled(text, encoding_of(file)))
    except UnicodeEncodeError:  # a stream that writes to others may name the wrong encoding, or none
        file.write(spelled(text, "ascii"))


def safe_console(console: Console | None = None) -> Console:
    """Copy of `console`, by default of standard output, that survives errors and missing characters."""
    original = Console() if console is None else console
    safe = copy.copy(original)
    safe.file = cast(IO[str], SafeFile(original))
    return safe


_rank: int | None = None  # of this process, while it trains with others


@contextmanager
def shown_once(rank: int | None) -> Iterator[None]:
    """Has `show` and `warn` do nothing in a `with` block if this rank is not 0, as all ranks call them.

    Args:
        rank: number of this rank; None if it is alone.
    """
    global _rank
    before, _rank = _rank, rank
    try:
        yield
    finally:
        _rank = before


def show(*objects: RenderableType, console: Console | None = None, **options: Any) -> None:
    """Prints as `Console.print` does, by default to standard output; an error becomes a warning."""
    if not _rank:
        attempt(lambda: safe_console(console).print(*objects, **options))


def show_error(text: str) -> None:
    """Writes a line to standard error, if that is possible."""
    with suppress(OSError, ValueError, AttributeError):  # it is closed, full, or not a stream
        sys.stderr.write(f"{spelled(text, encoding_of(sys.stderr))}\n")


def attempt(act: Callable[[], object]) -> bool:
    """Calls `act`, which only shows something; turns an error into a warning, and returns False then."""
    try:
        act()
    except Exception as error:
        warn(f"something could not be shown: {error!r}")
        return False
    return True


class _Lines(io.StringIO):
    """Text in memory, in the characters of standard output."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute in typeshed
        return encoding_of(sys.stdout)


def as_text(renderable: Any) -> str:
    """Renders as text with the terminal's width, in characters of standard output."""
    lines = _Lines()
    Console(file=lines, color_system=None, force_jupyter=False).print(renderable)
    return "\n".join(line.rstrip() for line in printable(lines.getvalue()).splitlines())


def printable(text: str) -> str:
    """Spells `text` in the characters of standard output, so that `print` does not raise."""
    return spelled(text, encoding_of(sys.stdout))


def warn(text: str, stacklevel: int | None = None, *, is_of_rank: bool = False) -> None:
    """Warns as `warnings.warn` does, by default at the user's line, and logs it as the logger "hookcb".

    Lost if there is no standard error.

    Args:
        text: what it says.
        stacklevel: see `warnings.warn`.
        is_of_rank: whether it is about this rank only, so that each rank that has it says so, with its
            number; else only rank 0 warns.

    Raises:
        Warning: If the user's filters turn warnings into errors.
    """
    if is_of_rank and _rank is not None:
        text = f"rank {_rank}: {text}"
    elif _rank:
        return
    level = _users_stacklevel() if stacklevel is None else stacklevel + 1
    log(logging.WARNING, text)
    with suppress(OSError, ValueError, AttributeError):  # it is closed, full, or not a stream
        warnings.warn(spelled(text, encoding_of(sys.stderr)), stacklevel=level)


def log(level: int, text: str) -> None:
    """Logs a line as the logger "hookcb"; an error in a handler ends no training."""
    with suppress(Exception):
        LOGGER.log(level, "%s", text)


def _users_stacklevel() -> int:
    """Number of frames from the caller up to the first that is not in this package, rich or torch."""
    frame, n = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NEVER_AT):
        frame, n = frame.f_back, n + 1
    return n
