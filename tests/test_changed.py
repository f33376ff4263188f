"""`make test-changed` runs the tests of the rooms that a change touches, and of those above."""

import re

from docs.changed import floors, noticing
from tests.test_floors import FLOORS


def chosen(*files):
    """What is chosen beside the files in `tests/` itself, which always are."""
    paths = [path.removeprefix("tests/") for path in noticing(files)]
    assert "test_floors.py" in paths or paths == ["tests"]
    return [path for path in paths if not re.fullmatch(r"test_\w+\.py", path)]


def test_floors_are_those_that_imports_are_checked_by():
    assert floors() == {room: i for i, rooms in enumerate(FLOORS, 1) for room in rooms}


def test_a_room_is_tested_with_those_above_it():
    assert chosen("hookcb/cli/main.py") == ["cli"]
    above = ["cli", "contract", "loops", "ranks", "report", "scenarios"]
    assert chosen("hookcb/report/data.py", "README.md") == above
    assert {"core", "records", "activations", "diagnosis", "ranks"} <= {*chosen("hookcb/core/loop.py")}


def test_tests_that_have_changed_are_run_and_those_that_use_a_changed_helper():
    assert chosen("tests/core/test_loop.py") == ["core/test_loop.py"]
    assert chosen("tests/hooks/support.py", "benchmarks/planted/data.py") == ["benchmarks", "hooks"]
    assert chosen("tests/support.py") == ["tests"]
    assert chosen("docs/index.md") == []
