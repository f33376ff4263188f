"""Imports point to lower floors only, and no files of a room import each other in a circle."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hookcb

PACKAGE = Path(hookcb.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
MAX_SPARE = 100  # lines that a room may be below its number before the number has to follow
FLOORS = [
    {"core"},
    {"records"},
    {"hooks"},
    {"processes"},
    {"activations", "nans", "profiling", "training"},
    {"gradients"},
    {"diagnosis", "loggers"},
    {"report"},
    {"loops"},
    {"adapters", "fastai.py", "testing.py"},
    {"cli"},
    {"public.py", "pytest_plugin.py"},
    {"__init__.py", "__main__.py"},
]


def imports(package):
    """By file of `package`, relative to it, the files it imports, inside functions and for typing too."""
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}

    def file_of(name):
        path = "/".join(name.split(".")[1:])
        return next(
            (file for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if file in files), None
        )

    found = {}
    for file, path in files.items():
        found[file] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file} imports relatively; write from {package.name}.… import …"
                members = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if file_of(name) else node.module for name in members]
            else:
                continue
            found[file] |= {file_of(name) for name in names if name.split(".")[0] == package.name} - {None}
    return found


def room(file):
    return file.split("/")[0]


def arrows_upward(found):
    """The imports that do not go to a lower floor or stay in the room, and the rooms that have no floor."""
    rank = {name: i for i, names in enumerate(FLOORS) for name in names}
    homeless = [f"{file} is on no floor" for file in found if room(file) not in rank]
    return homeless + [
        f"{file} imports {other}"
        for file, others in found.items()
        for other in others
        if {room(file), room(other)} <= rank.keys()
        and room(file) != room(other)
        and rank[room(file)] <= rank[room(other)]
    ]


def circle(found):
    """Files that import each other in a circle, or None."""
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        return " ← ".join(error.args[1])
    return None


@pytest.fixture(scope="module")
def ours():
    return imports(PACKAGE)


def test_imports_point_to_lower_floors(ours):
    assert arrows_upward(ours) == []


def test_no_files_import_each_other_in_a_circle(ours):
    assert circle(ours) is None


@pytest.fixture
def planted(tmp_path):
    """A package of two rooms whose imports are fine, and a function that adds a line to a file of it."""
    package = tmp_path / "hookcb"
    for file, code in {
        "__init__.py": "from hookcb.loops.learner import Learner",
        "core/__init__.py": "",
        "core/loop.py": "from hookcb.core import events",
        "core/events.py": "import enum",
        "loops/learner.py": "from hookcb.core.loop import Loop",
    }.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(code)

    def add(file, code):
        path = package / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{path.read_text()}\n{code}\n" if path.exists() else code)
        return imports(package)

    return add


@pytest.mark.parametrize(
    "code",
    [
        "from hookcb.loops.learner import Learner",
        "from hookcb.loops import learner",
        "import hookcb.loops.learner",
        "def f():\n    from hookcb.loops.learner import Learner",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hookcb.loops.learner import Learner",
        "import hookcb",
        "from hookcb import Learner",
    ],
)
def test_a_planted_arrow_upward_is_found(planted, code):
    assert arrows_upward(planted("core/events.py", "")) == []
    found = planted("core/events.py", code)
    at = "__init__.py" if code.endswith(("import hookcb", "hookcb import Learner")) else "loops/learner.py"
    assert arrows_upward(found) == [f"core/events.py imports {at}"]


def test_a_planted_circle_is_found(planted):
    assert circle(planted("core/events.py", "")) is None
    found = circle(planted("core/events.py", "from hookcb.core.loop import Loop"))
    assert set(found.split(" ← ")) == {"core/loop.py", "core/events.py"}


def test_a_room_needs_a_floor(planted):
    assert arrows_upward(planted("cellar.py", "import enum")) == ["cellar.py is on no floor"]


def test_rooms_on_one_floor_do_not_import_each_other(planted):
    planted("testing.py", "")
    found = planted("adapters/base.py", "from hookcb.testing import check_callback")
    assert arrows_upward(found) == ["adapters/base.py imports testing.py"]


# ---- lines


def n_lines(room):
    """Number of lines of Python of a room, a folder or a file."""
    files = room.rglob("*.py") if room.is_dir() else [room]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def numbers(page):
    """Rooms and their numbers of lines in the table of rooms of `page`."""
    found = re.findall(r"^\| \d+ \| `([^`]+)` \| ([\d,]+) \|", page, re.MULTILINE)
    return [(name, int(number.replace(",", ""))) for name, number in found]


def wrong_numbers(page, package):
    """What is wrong with the numbers of lines in the table of rooms of `page`."""
    for name, most in numbers(page):
        n = n_lines(package / name)
        if n > most:
            yield (
                f"{name} has {n:,} lines, more than the {most:,} of the table in docs/architecture.md; what "
                f"can go? If nothing, put {n:,} there, and the reason in docs/decisions/"
            )
        elif n < most - MAX_SPARE:
            yield f"{name} has shrunk to {n:,} lines; put that in the table in place of {most:,}"


def test_no_room_has_more_lines_than_the_table_allows():
    page = PAGE.read_text(encoding="utf-8")
    assert {room for rooms in FLOORS for room in rooms} == {name.strip("/") for name, _ in numbers(page)}
    assert list(wrong_numbers(page, PACKAGE)) == []


def test_tests_grow_no_faster_than_the_package():
    n_tests, n_package = n_lines(Path(__file__).parent), n_lines(PACKAGE)
    assert n_tests <= 1.42 * n_package, "see docs/decisions/lines_of_tests.md"


def test_a_room_that_has_grown_or_shrunk_is_told(tmp_path):
    (tmp_path / "core" / "deep").mkdir(parents=True)
    (tmp_path / "core" / "a.py").write_text("a\n" * 200)
    (tmp_path / "core" / "deep" / "b.py").write_text("b\n" * 5)
    (tmp_path / "public.py").write_text("c\n")
    row = "| 1 | `core/` | {} | what all need |\n| 2 | `public.py` | 1 | names |\n"
    assert list(wrong_numbers(row.format(205), tmp_path)) == []
    assert list(wrong_numbers(row.format(305), tmp_path)) == []
    assert "more than the 204" in "".join(wrong_numbers(row.format(204), tmp_path))
    assert "put that in the table in place of 1,306" in "".join(wrong_numbers(row.format("1,306"), tmp_path))
