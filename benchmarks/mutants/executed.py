"""Lines of the package that each test executes, recorded once, and the tests of a mutant."""

import ast
import hashlib
import json
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from measuring import RECORD
from mutant import Place, assigned
from trial import run_pytest, scratch_copy

FIRST = 50  # tests that come in the order of their size alone; the others by file, whose fixtures they share
QUERY = """
    select path, context, numbits from line_bits
    join context on context.id = context_id join file on file.id = file_id
"""
# tests that start processes set PYTHONPATH
STARTUP = "import sys\n\nsys.path.append({!r})\nimport measuring\n\nmeasuring.install()\n"
Line = tuple[str, int]  # of a file


def sources(root: Path) -> dict[str, bytes]:
    """The files of the package by their path in it."""
    files = sorted((root / "hookcb").rglob("*.py"))
    return {path.relative_to(root / "hookcb").as_posix(): path.read_bytes() for path in files}


def digest(root: Path) -> str:
    """Which package and tests these are."""
    found = hashlib.sha256()
    for path in sorted(path for folder in ("hookcb", "tests") for path in (root / folder).rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def record(root: Path, to: Path, tests: Iterable[str], jobs: int) -> int:
    """Run tests in a copy of the repository, and keep which lines of hookcb each executes.

    Returns:
        Exit code: 0, or that of pytest if it could not run. What a failed test has executed is kept, too.
    """
    try:
        from coverage import Coverage
    except ImportError:
        raise ImportError("needs coverage; run: pip install -e '.[mutants]'") from None
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        copy, data = scratch_copy(root, Path(folder)), Path(folder, "data")
        about = f"{copy}/hookcb/", digest(copy)
        data.mkdir()
        (data / "coveragerc").write_text("[run]\ncore = ctrace\n")
        (copy / "sitecustomize.py").write_text(STARTUP.format(str(Path(__file__).parent)))
        code = run_pytest(copy, [*tests, f"-n{jobs}"], {RECORD: str(data)})
        found = Coverage(data / "lines", config_file=False)
        found.combine([str(data)], strict=True)
        found.save()
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(data / "lines", to)
        uses = [json.loads(line) for path in data.glob("*.uses") for line in path.read_text().splitlines()]
        with closing(sqlite3.connect(to)) as db, db:
            db.execute("create table about (root text, digest text)")
            db.execute("insert into about values (?, ?)", about)
            db.execute("create table uses (fixture text, test text)")
            db.executemany("insert into uses values (?, ?)", uses)
    return code if code and code > pytest.ExitCode.TESTS_FAILED else 0


class Executed:
    """What `record` has kept; its tables are those of coverage, which documents them."""

    def __init__(self, path: Path, root: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}; run `python benchmarks/mutants record` first")
        self._lines: dict[str, list[tuple[str, int]]] = defaultdict(list)  # tests and bits by file
        self._sizes: dict[str, int] = defaultdict(int)  # lines that a test executes
        self._users: dict[str, set[str]] = defaultdict(set)  # tests of a shared fixture
        self._readers = readers(sources(root))
        with closing(sqlite3.connect(path)) as db:
            ((copy, self.sources),) = db.execute("select root, digest from about")
            if self.sources != digest(root):
                raise ValueError(f"{path} is of other sources; run `python benchmarks/mutants record` again")
            for fixture, test in db.execute("select distinct fixture, test from uses"):
                self._users[fixture].add(test)
            for file, test, numbits in db.execute(QUERY):
                bits = int.from_bytes(numbits, "little")
                self._lines[file.removeprefix(copy)].append((test, bits))
                for user in self._users.get(test, {test}):
                    self._sizes[user] += bits.bit_count()

    def tests(self, place: Place) -> list[str]:
        """The tests of a mutant, those that execute the fewest lines first."""
        lines = {(place.mutant.file, line) for line in place.lines}
        if place.constants:
            lines = {line for name in place.constants for line in self._readers.get(name, ())}
        by_file: dict[str, int] = defaultdict(int)
        for file, line in lines:
            by_file[file] |= 1 << line
        found = {test for file, mask in by_file.items() for test, bits in self._lines[file] if bits & mask}
        tests = {user for test in found - {""} for user in self._users.get(test, {test})}
        ordered = sorted(tests, key=lambda test: (self._sizes[test], test))
        files = [test.split("::")[0] for test in ordered]
        first = {file: i for i, file in reversed([*enumerate(files)])}
        return ordered[:FIRST] + sorted(ordered[FIRST:], key=lambda test: first[test.split("::")[0]])


def readers(files: Mapping[str, bytes]) -> dict[str, set[Line]]:
    """Lines in functions that read a constant, by its name; a default is read by the whole function."""
    found: dict[str, set[Line]] = defaultdict(set)
    aliases: dict[str, set[str]] = defaultdict(set)
    for file, source in files.items():
        for stmt in _outside(ast.parse(source).body):
            if isinstance(stmt, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = {(file, line) for line in range(stmt.body[0].lineno, (stmt.end_lineno or 0) + 1)}
                for name, _ in _read(stmt.args, *stmt.decorator_list):
                    found[name] |= lines
                for name, line in _read(*stmt.body):
                    found[name].add((file, line))
            elif isinstance(stmt, ast.Assign | ast.AnnAssign) and stmt.value is not None:
                for name, _ in _read(stmt.value):
                    aliases[name].update(assigned(stmt))
    for name, others in aliases.items():
        found[name] |= {line for other in others for line in found.get(other, ())}
    return found


def _outside(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements outside functions, of classes too."""
    for stmt in body:
        yield stmt
        if not isinstance(stmt, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _outside(getattr(stmt, "body", []))


def _read(*nodes: ast.AST) -> Iterator[Line]:
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno
