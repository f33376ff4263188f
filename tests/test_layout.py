"""Each test has one home: `tests/<room>/test_<file>.py` is about `hookcb/<room>/<file>.py`."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NO_ONE_FILE = {
    "scenarios",
    "contract",
    "interop",
    "pages",
    "ranks",
}  # about more than a file
HELPER = re.compile(r"(support|conftest|__init__|\w+_worker)\.py")


def misplaced(root):
    """The files in `root/tests` that are not where they belong, with what to do."""
    found = []
    for path in sorted((root / "tests").rglob("*.py")):
        file = path.relative_to(root / "tests")
        room = file.parts[0]
        if HELPER.fullmatch(file.name) or room in ("interop", "pages"):
            continue
        if not file.name.startswith("test_"):
            found.append(f"tests/{file} has no tests: helpers are in support.py, conftest.py or *_worker.py")
            continue
        mirrored = file.with_name(file.name.removeprefix("test_"))
        source = mirrored if room == "benchmarks" else "hookcb" / mirrored
        if len(file.parts) > 1 and room not in NO_ONE_FILE and not (root / source).exists():
            found.append(
                f"tests/{file} mirrors no file, there is no {source}: "
                "name it after the file that it is about, or move it to tests/scenarios"
            )
    return found


def test_each_test_is_beside_what_it_is_about():
    assert misplaced(ROOT) == []


@pytest.fixture
def planted(tmp_path):
    """A project whose tests are where they belong."""
    for file in (
        "hookcb/core/loop.py",
        "hookcb/profiling/steps/timer.py",
        "benchmarks/planted/score.py",
        "tests/__init__.py",
        "tests/conftest.py",
        "tests/test_docs.py",
        "tests/core/support.py",
        "tests/core/test_loop.py",
        "tests/profiling/steps/test_timer.py",
        "tests/benchmarks/planted/test_score.py",
        "tests/scenarios/test_threads.py",
        "tests/scenarios/kill_worker.py",
        "tests/interop/trainers.py",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert misplaced(tmp_path) == []
    return tmp_path


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("core/test_loop_contract.py", "there is no hookcb/core/loop_contract.py"),
        ("profiling/test_timer.py", "there is no hookcb/profiling/timer.py"),
        ("core/test_threads.py", "or move it to tests/scenarios"),
        ("benchmarks/test_score.py", "there is no benchmarks/score.py"),
        ("core/models.py", "helpers are in support.py"),
        ("scenarios/models.py", "helpers are in support.py"),
    ],
)
def test_a_planted_file_elsewhere_is_named_with_what_to_do(planted, file, told):
    (planted / "tests" / file).touch()
    (found,) = misplaced(planted)
    assert found.startswith(f"tests/{file} ")
    assert told in found


def test_a_test_whose_file_was_moved_is_named(planted):
    (planted / "hookcb/core/loop.py").rename(planted / "hookcb/core/loops.py")
    assert misplaced(planted)[0].startswith("tests/core/test_loop.py mirrors no file")
