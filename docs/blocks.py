"""Code blocks of the pages: finds them, runs them, and writes below them what they print.

`python docs/blocks.py PAGE...` writes; `tests/test_docs.py` fails if a page shows anything else.
"""

import ast
import io
import linecache
import os
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from hookcb.cli.main import main

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
}
WIDTH = 100  # columns of what is shown
SICK = "ERROR|WARNING|loss is nan"  # begins a warning of a training that a page makes sick
# packages of `make test`; `make interop` has more
HERE = {"hookcb", "sklearn", "torch", *sys.stdlib_module_names}
SCRIPT = "# torchrun "  # begins a block that is a script of its own, with the command that runs it
CHEAP = ("compare", "explain")  # commands that train nothing
NUMBER = re.compile(r"[-\d.e]*\d[-\d.e]*(?: ?(?:[nµm]?s|[kMG]?B|bytes)\b)?")
DRAWN = re.compile("[\u2500-\u259f]+")  # borders and bars


class Block(NamedTuple):
    """Code or text between fences."""

    language: str
    text: str

    def packages(self) -> set[str]:
        """Packages that Python code imports, besides those of `make test`."""
        nodes = [*ast.walk(ast.parse(self.text))] if self.language == "python" else []
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        return {name.removeprefix("hookcb.adapters.").partition(".")[0] for name in names} - HERE

    def commands(self) -> list[list[str]]:
        """Words of each command."""
        lines = self.text.splitlines() if self.language == "console" else []
        return [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]


def blocks(page: str) -> list[Block]:
    """All blocks of a page."""
    return [Block(*found) for found in re.findall(r"^```([^\n]*)\n(.*?)^```$", PAGES[page], re.DOTALL | re.M)]


def before(page: str) -> list[Block]:
    """Blocks of the page that "Snippets go on from" names, if any."""
    found = re.search(r"[Ss]nippets go on from\s\[.+?\]\((.+?)\)", PAGES[page])
    path = found and os.path.normpath(Path(page).parent / found[1])
    return blocks(Path(path).as_posix()) if path else []


def printed(page: str, *, with_others: bool = False) -> list[tuple[str, str]]:
    """Runs a page's Python as one script, train.py, and commands that are cheap or have text below.

    Args:
        page: path of the page, from the root.
        with_others: whether to run the blocks that need packages of others, too.

    Returns:
        Each text below code, as the page has it, with what the code has printed.
    """
    own = [*before(page), *(block for block in blocks(page) if with_others or not block.packages())]
    code = [b for b in own if b.language == "python" and not b.text.startswith(SCRIPT)]
    names: dict[str, Any] = {"__name__": "__main__"}
    found, n_lines = [], 0
    with empty_folder() as folder:
        (folder / "train.py").write_text("".join(block.text for block in code), "utf-8")
        for block, below in pairwise([*own, Block("", "")]):
            with redirect_stdout(io.StringIO()) as said:
                if block in code:
                    exec(compile("\n" * n_lines + block.text, "train.py", "exec"), names)
                    n_lines += block.text.count("\n")
                for program, *args in block.commands():
                    if program == "hookcb" and (args[0] in CHEAP or below.language == "text"):
                        assert main(args) == 0, args
            if below.language == "text" and block.language in ("python", "console"):
                lines = (line.rstrip() for line in said.getvalue().splitlines())
                found.append((below.text, "".join(f"{line}\n" for line in lines)))
    return found


@contextmanager
def empty_folder() -> Iterator[Path]:
    """An empty working directory, a terminal of the pages' width, a seed, and no warnings of sickness."""
    linecache.clearcache()  # which may have another train.py
    torch.manual_seed(0)  # not all pages do
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        mock.patch.dict(os.environ, COLUMNS=str(WIDTH)),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", SICK, UserWarning)
        yield Path(folder)


def is_alike(shown: str, said: str) -> bool:
    """Whether what is shown was said, but for numbers, borders and bars; "…" stands for anything."""
    parts = (re.escape(_plain(part)) for part in shown.split("…"))
    return re.fullmatch(".*".join(parts), _plain(said)) is not None


def _plain(text: str) -> str:
    return " ".join(NUMBER.sub("#", DRAWN.sub(" ", text)).split())


def write(pages: Sequence[str]) -> None:
    """Writes what their code prints into pages; by default, all pages."""
    torch.set_num_threads(1)  # for small layers
    for page in pages or PAGES:
        text = PAGES[page]
        for shown, said in printed(page):
            if "…" not in shown:  # what is left out is the author's choice
                text = text.replace(f"```text\n{shown}```", f"```text\n{said}```")
        (ROOT / page).write_text(text, "utf-8")


if __name__ == "__main__":
    write(sys.argv[1:])
