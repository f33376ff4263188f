"""Prints the tests that no promise of docs/promises.md names, and no rule of it keeps.

`python docs/promises.py tests/core/test_loop.py tests/hooks`: those of these files, by default all.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"


@dataclass(frozen=True)
class Promise:
    """A promise of the page: a sentence, where it is made, and the tests that fail if it breaks."""

    sentence: str
    made_in: str
    tests: tuple[str, ...]


def promises() -> list[Promise]:
    """All promises of the page that have tests."""
    pattern = r"^- (.+) · (.+)\n((?:    - `tests/.+\n)+)"
    found = re.findall(pattern, PAGE.read_text("utf-8"), re.MULTILINE)
    return [Promise(sentence, where, tuple(re.findall("- (.+)", tests))) for sentence, where, tests in found]


def codes() -> list[str]:
    """Codes of all faults, as docs/checks.md has them."""
    return re.findall(r"^### `(.+)`$", (ROOT / "docs" / "checks.md").read_text("utf-8"), re.MULTILINE)


def files_by_fault() -> dict[str, list[Path]]:
    """Files in tests/diagnosis that have the code of a fault in quotes, by code."""
    texts = {file: file.read_text("utf-8") for file in sorted((ROOT / "tests/diagnosis").rglob("test_*.py"))}
    return {code: [file for file, text in texts.items() if f'"{code}"' in text] for code in codes()}


@cache
def tests_in(file: Path) -> dict[str, str]:
    """Source of each test of a file by its name, with its decorators and the mark of the file."""
    text = file.read_text("utf-8")
    body = ast.parse(text).body
    marks = [ast.unparse(node) for node in body if isinstance(node, ast.Assign)]
    of_file = [mark for mark in marks if mark.startswith("pytestmark")]
    return {
        node.name: "\n".join([*of_file, *map(ast.unparse, node.decorator_list), ast.unparse(node)])
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def told(test: str) -> str:
    """A test as the page tells it: `file::name` in backticks, and where it runs, if not in `make test`.

    Raises:
        KeyError: If the file has no such test.
    """
    name, _, function = test.partition("::")
    source = tests_in(ROOT / name)[function]
    decorators = source.partition("\ndef ")[0].splitlines()
    folder = name.split("/")[1]
    where = [f"`make {folder}`"] if folder in ("interop", "pages") else []
    where += ["slow"] if any(re.search(r"= .*slow|^pytest\.mark\.slow$", x) for x in decorators) else []
    where += ["on a GPU"] if any(re.search(r"= .*cuda|^pytest\.mark\.cuda$", x) for x in decorators) else []
    return f"`{test}`" + (f", {', '.join(where)}" if where else "")


def unnamed(paths: Sequence[Path]) -> Iterator[str]:
    """Tests in files and folders that no promise names, but for files that the rule for faults keeps."""
    named = {test.split("`")[1] for promise in promises() for test in promise.tests}
    kept = {file for files in files_by_fault().values() for file in files}
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    for file in sorted({file.resolve() for file in files} - kept):
        name = file.relative_to(ROOT).as_posix()
        yield from (test for test in (f"{name}::{x}" for x in tests_in(file)) if test not in named)


if __name__ == "__main__":
    print("\n".join(unnamed([Path(path) for path in sys.argv[1:]] or [ROOT / "tests"])))
