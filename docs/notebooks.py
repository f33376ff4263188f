"""Puts the outputs of executed notebooks into nbs, where GitHub shows them; `make outputs` does both.

What differs from run to run is left out: times, counts of executions, folders of this machine, and what
libraries say on stderr. Pictures have few colors, and are a third as large.
"""

import base64
import hashlib
import io
import json
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_output
from PIL import Image

ROOT = Path(__file__).parents[1]
COLORS = 128  # of a picture
COLORED = re.compile(r"\x1b\[[\d;]*m")  # in a terminal
FOLDER = re.compile(r"(?<=/tmp/)\w+/|" + re.escape(f"{ROOT}/"))  # of this machine


def digest(notebook: Any) -> str:
    """Digest of the code and its outputs, by which a test sees that one was changed without the other."""
    cells = [(cell.source, cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()


def refresh(path: Path, executed: Path) -> None:
    """Writes the outputs of an executed notebook into the one in nbs.

    Raises:
        ValueError: If the notebook has changed since.
    """
    notebook, ran = (nbformat.read(file, as_version=4) for file in (path, executed))
    if [cell.source for cell in notebook.cells] != [cell.source for cell in ran.cells]:
        raise ValueError(f"{path.name} has changed since it was executed; run make outputs")
    for cell, done in zip(notebook.cells, ran.cells, strict=True):
        if cell.cell_type == "code":
            cell.metadata, cell.execution_count, cell.outputs = {}, None, [*_lasting(done.outputs)]
    notebook.metadata["hookcb"] = {"digest": digest(notebook)}
    nbformat.write(notebook, path)


def _lasting(outputs: list[Any]) -> Iterator[Any]:
    """Outputs as git has them."""
    kept = (output for output in outputs if output.get("name") != "stderr")
    for kind, group in groupby(kept, lambda output: output.output_type):
        if kind == "stream":  # in as many parts as the kernel happened to send
            yield new_output(kind, text=_plain("".join(output.text for output in group)))
            continue
        for output in group:
            data = {
                form: _small(shown) if form == "image/png" else _plain(shown)
                for form, shown in output.data.items()
                if "<iframe" not in shown  # the page of a run, which GitHub does not show
            }
            yield new_output(kind, data)


def _plain(text: str) -> str:
    return FOLDER.sub("…/", COLORED.sub("", text))


def _small(png: str) -> str:
    file = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        refresh(ROOT / "nbs" / Path(name).name, Path(name))
