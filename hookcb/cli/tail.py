"""`hookcb tail`: the last records in a file of a JSONLLogger, and those that follow."""

import time
from pathlib import Path
from typing import Any

from hookcb.cli import INTERRUPTED
from hookcb.core.console import show, show_error
from hookcb.records.jsonl import read_jsonl

PAUSE = 0.5  # seconds between two looks


def tail(path: Path, n: int = 10, follow: bool = True) -> int:
    """Shows the last `n` records of a file, and each new one until Ctrl-C.

    Returns:
        Exit code: 0, 130 after Ctrl-C, or 1 if the file cannot be read.
    """
    n_shown, size = 0, -1
    try:
        while True:
            before, size = size, path.stat().st_size
            if size == before:
                time.sleep(PAUSE)
                continue
            rows = read_jsonl(path)
            n_shown = 0 if len(rows) < n_shown else n_shown  # it has been written anew
            for row in rows[n_shown or max(0, len(rows) - n) :]:
                show(_line(row), soft_wrap=True, highlight=False, markup=False)
            n_shown = len(rows)
            if not follow:
                return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ValueError) as error:
        missing = f"there is no file {str(path)!r}; JSONLLogger({str(path)!r}) writes it"
        show_error(f"hookcb tail: {missing if isinstance(error, FileNotFoundError) else error}")
        return 1


def _line(row: dict[str, Any]) -> str:
    values = {name: value for name, value in row.items() if name != "step"}
    numbers = [f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, float | int)]
    texts = [f"\n{value}" for value in values.values() if isinstance(value, str)]
    return "  ".join([f"step {row['step']:,}", *numbers]) + "".join(texts)
