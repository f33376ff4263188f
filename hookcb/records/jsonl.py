"""Files with a line of JSON for each record, as `JSONLLogger` writes them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookcb.core.lines import LineFile

NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
START = b'{"step": '


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Reads a file of `JSONLLogger`: a dict for each record, `{"step": 50, "loss": 0.25}`.

    The last line is left out if it is incomplete. A resumed fit writes the steps since its checkpoint a
    second time.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is another kind of file, or a line cannot be read; the message names the line.
    """
    rows: list[dict[str, Any]] = []
    file = LineFile(Path(path), START)
    for number, line in file.read():
        try:
            row = json.loads(line)
            texts = row.pop("texts", {})
            row = _decoded(row)
            rows.append({"step": row.pop("step"), **row, **texts})
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise file.broken(number) from error
    return rows


def encoded(value: Any) -> Any:
    """Numbers in containers as JSON has them: those that are not finite become texts."""
    if isinstance(value, Mapping):
        return {name: encoded(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(x) for x in value]
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _decoded(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_decoded(x) for x in value]
    return NONFINITE[value] if isinstance(value, str) else value
