"""JSONLLogger: a file with a line of JSON for each record."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hookcb.core.whole import rank_file
from hookcb.loggers.base import Histogram
from hookcb.records.jsonl import encoded, json_lines


class JSONLLogger:
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

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        json_lines(self.path).check()

    def log(self, values: Mapping[str, float], /, step: int) -> None:
        """Appends a line.

        Raises:
            ValueError: If a value is named "step".
            OSError: If the file cannot be written.
        """
        self._append(step, {name: float(value) for name, value in values.items()})

    def log_histograms(self, hists: Mapping[str, Histogram], /, step: int) -> None:
        """Appends a line of histograms, each an object with the fields of `Histogram`."""
        self._append(step, {name: asdict(hist) for name, hist in hists.items()})

    def log_text(self, name: str, text: str, /, step: int) -> None:
        """Appends a line with a text, `{"step": 50, "texts": {"verdict": "…"}}`."""
        json_lines(self.path).append(json.dumps({"step": int(step), "texts": {name: text}}) + "\n")

    def of_rank(self, rank: int) -> "JSONLLogger":
        """Logger for another rank, `run.rank3.jsonl`."""
        return JSONLLogger(rank_file(self.path, rank))

    def _append(self, step: int, values: Mapping[str, Any]) -> None:
        if "step" in values:
            raise ValueError("a value is named 'step', as the step itself is; give it another name")
        line = json.dumps({"step": int(step), **encoded(values)})
        json_lines(self.path).append(line + "\n")

    def __repr__(self) -> str:
        return f"JSONLLogger({str(self.path)!r})"
