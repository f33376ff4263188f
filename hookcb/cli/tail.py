"""`hookcb tail`: the records of a JSONLLogger, as they are written."""

from pathlib import Path
from time import sleep
from typing import Any

from hookcb.core.console import show, show_error
from hookcb.core.text import join_names
from hookcb.loggers.jsonl import JSONLLogger, parse_record

POLL = 0.5  # seconds between looks at the file
MAX_NUMBERS = 8  # in the line of a record


def tail(path: Path, n: int, follow: bool) -> int:
    """Shows the last `n` records of a file of `JSONLLogger`; with `follow`, new ones too, until Ctrl-C.

    A text, such as a verdict, is shown when it differs from the one before.

    Returns:
        Exit code: 0, or 1 if the file cannot be read.
    """
    reader = RecordReader(path)
    shown: dict[str, str] = {}
    try:
        JSONLLogger(path)  # checks that it is a file of one
        first = reader.new()
        if not first and not follow:
            show(f"{path} has no record yet", highlight=False, markup=False)
        for record in first[-n:]:
            _show(record, shown)
        while follow:
            sleep(POLL)
            for record in reader.new():
                _show(record, shown)
    except KeyboardInterrupt:
        return 0
    except (OSError, ValueError) as error:
        show_error(f"hookcb tail: {error}")
        return 1
    return 0


class RecordReader:
    """Reads the records that were added to a file since the last call of `new`.

    Args:
        path: the file; if it becomes shorter, it is read from its beginning.

    >>> from tempfile import mkdtemp
    >>> from hookcb import JSONLLogger
    >>> logger = JSONLLogger(mkdtemp() + "/run.jsonl")
    >>> reader = RecordReader(logger.path)
    >>> logger.log({"loss": 0.5}, step=1)
    >>> reader.new(), reader.new()
    ([{'step': 1, 'loss': 0.5}], [])
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._n_lines = path, 0, 0

    def new(self) -> list[dict[str, Any]]:
        """Records whose lines are complete and were not read yet.

        Raises:
            OSError, ValueError: If the file or a line cannot be read.
        """
        if self._path.stat().st_size < self._offset:
            self._offset = self._n_lines = 0
        with self._path.open("rb") as file:
            file.seek(self._offset)
            added = file.read()
        added = added[: added.rfind(b"\n") + 1]
        self._offset += len(added)
        records = []
        for line in added.splitlines():
            self._n_lines += 1
            try:
                records.append(parse_record(line.decode()))
            except (ValueError, AttributeError, KeyError, TypeError) as error:
                raise ValueError(f"line {self._n_lines} of {self._path} cannot be read") from error
        return records


def _show(record: dict[str, Any], shown: dict[str, str]) -> None:
    """Shows a record; `shown` has the last text of each name."""
    step = record["step"]
    numbers = [
        f"{name} {x:.4g}" for name, x in record.items() if isinstance(x, float | int) and name != "step"
    ]
    others = [name for name, x in record.items() if isinstance(x, dict)]
    if numbers:
        _print(f"step {step}  {join_names(numbers, MAX_NUMBERS)}".replace(", ", "  "))
    if others:
        _print(f"step {step}  histograms of {join_names(others, MAX_NUMBERS)}")
    for name, text in record.items():
        if isinstance(text, str) and shown.get(name) != text:
            shown[name] = text
            _print(f"step {step}  {name}:\n{text}")


def _print(line: str) -> None:
    show(line, soft_wrap=True, highlight=False, markup=False, emoji=False)
