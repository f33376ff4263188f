"""Loggers that write files by whole lines: CSVLogger and JSONLLogger."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from hookcb.core.arguments import hinted
from hookcb.core.lines import LineFile
from hookcb.core.whole import rank_file
from hookcb.records.jsonl import START, encoded
from hookcb.records.recording import Histogram

HEADER = b"step,name,value\n"


class LineLogger:
    """Logger that continues a file by whole lines.

    Attributes:
        path: the file, as an absolute path.
        start, header: see `LineFile`.
    """

    start: bytes
    header = b""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._file = LineFile(self.path, self.start, self.header)
        self._file.check()

    def of_rank(self, rank: int) -> Self:
        """Logger for another rank, `run.rank3.csv`."""
        return type(self)(rank_file(self.path, rank))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"


class CSVLogger(LineLogger):
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

    start = header = HEADER

    @hinted
    def __init__(self, path: str | Path = "history.csv") -> None:
        super().__init__(path)

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
        self._file.append(text.getvalue())


class JSONLLogger(LineLogger):
    """Writes each record as a line of JSON, `{"step": 50, "loss": 0.25}`; readable even after a crash.

    When `log` returns, the operating system has the record, so it survives if the process is killed. An
    existing file is continued. NaN and infinities are written as the strings "NaN", "Infinity" and
    "-Infinity", as JSON has no numbers for them; `read_jsonl` converts them back.

    Args:
        path: path of the file; its folder is created if it is missing.

    Raises:
        ValueError: If the path is a folder, or a file that a `JSONLLogger` did not write.

    >>> from tempfile import mkdtemp
    >>> from hookcb.loggers import JSONLLogger, read_jsonl
    >>> logger = JSONLLogger(mkdtemp() + "/run.jsonl")
    >>> logger.log({"loss": 0.25, "lr": 0.1}, step=0)
    >>> logger.log({"loss": float("inf")}, step=1)
    >>> logger.path.read_text().splitlines()[1]
    '{"step": 1, "loss": "Infinity"}'
    >>> read_jsonl(logger.path)
    [{'step': 0, 'loss': 0.25, 'lr': 0.1}, {'step': 1, 'loss': inf}]
    """

    start = START

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Appends a line.

        Raises:
            ValueError: If a value is named "step".
            OSError: If the file cannot be written.
        """
        self._add(step, {name: float(value) for name, value in values.items()})

    def log_histograms(self, hists: Mapping[str, Histogram], /, step: int) -> None:
        """Appends a line of histograms, each an object with the fields of `Histogram`."""
        self._add(step, {name: asdict(hist) for name, hist in hists.items()})

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Appends a line with a text, `{"step": 50, "texts": {"verdict": "…"}}`."""
        self._file.append(json.dumps({"step": int(step), "texts": {name: text}}) + "\n")

    def _add(self, step: int, values: Mapping[str, Any]) -> None:
        if "step" in values:
            raise ValueError("a value is named 'step', as the step itself is; give it another name")
        self._file.append(json.dumps({"step": int(step), **encoded(values)}) + "\n")


def read_csv(path: str | Path) -> list[dict[str, Any]]:
    """Reads a file of `CSVLogger`: a dict for each number, `{"step": 50, "name": "loss", "value": 0.25}`.

    The last line is left out if it is incomplete. A resumed fit writes the steps since its checkpoint a
    second time.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is another kind of file, or a line cannot be read; the message names the line.
    """
    rows, file = [], LineFile(Path(path), HEADER, HEADER)
    for number, line in file.read():
        try:
            ((step, name, value),) = csv.reader([line])
            rows.append({"step": int(step), "name": name, "value": float(value)})
        except (csv.Error, ValueError) as error:
            raise file.broken(number) from error
    return rows
