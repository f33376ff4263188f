"""CSVLogger: a file with a line for each number."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookcb.core.lines import LineFile
from hookcb.core.whole import rank_file

HEADER = b"step,name,value\n"


class CSVLogger:
    """Writes each number as a line `step,name,value`, so that names may come and go.

    When `log` returns, the operating system has the lines, so they survive if the process is killed. An
    existing file is continued. NaN and infinities are `nan`, `inf` and `-inf`, as Python, pandas and
    spreadsheets read them.

    Args:
        path: path of the file; its folder is created if it is missing.

    Raises:
        ValueError: If the path is a folder, or a file that a `CSVLogger` did not write.

    >>> from tempfile import mkdtemp
    >>> from hookcb.loggers import CSVLogger, read_csv
    >>> logger = CSVLogger(mkdtemp() + "/run.csv")
    >>> logger.log({"loss": 0.25, "lr": 0.1}, step=0)
    >>> logger.path.read_text().splitlines()
    ['step,name,value', '0,loss,0.25', '0,lr,0.1']
    >>> read_csv(logger.path)[1]
    {'step': 0, 'name': 'lr', 'value': 0.1}
    """

    def __init__(self, path: str | Path = "history.csv") -> None:
        self.path = Path(path).absolute()
        _file(self.path).check()

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Appends a line for each value.

        Raises:
            ValueError: If a name has a line break.
            OSError: If the file cannot be written.
        """
        if broken := [name for name in values if not {"\n", "\r", "\0"}.isdisjoint(name)]:
            raise ValueError(f"a value is named {broken[0]!r}; give it a name without line breaks or null")
        text = io.StringIO()
        rows = ((int(step), name, float(value)) for name, value in values.items())
        csv.writer(text, lineterminator="\n").writerows(rows)
        _file(self.path).append(text.getvalue())

    def of_rank(self, rank: int) -> "CSVLogger":
        """Logger for another rank, `run.rank3.csv`."""
        return CSVLogger(rank_file(self.path, rank))

    def __repr__(self) -> str:
        return f"CSVLogger({str(self.path)!r})"


def read_csv(path: str | Path) -> list[dict[str, Any]]:
    """Reads a file of `CSVLogger`: a dict for each number, `{"step": 50, "name": "loss", "value": 0.25}`.

    The last line is left out if it is incomplete. A resumed fit writes the steps since its checkpoint a
    second time.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is another kind of file, or a line cannot be read; the message names the line.
    """
    rows, file = [], _file(Path(path))
    for number, line in file.read():
        try:
            ((step, name, value),) = csv.reader([line])
            rows.append({"step": int(step), "name": name, "value": float(value)})
        except (csv.Error, ValueError) as error:
            raise file.broken(number) from error
    return rows


def _file(path: Path) -> LineFile:
    return LineFile(path, HEADER, HEADER)
