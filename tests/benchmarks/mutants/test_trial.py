"""A mutant is tried in a copy, with nothing left running, and only tests that pass without it count."""

import subprocess
import time
from pathlib import Path

import pytest
from mutant import possible
from trial import Trials

SOURCE = b"""def is_small(n) -> bool:
    return n < 3


def count(n):
    while n > 0:
        n -= 1
    return n
"""
TESTS = """import subprocess

from hookcb.a import count, is_small


def test_small():
    assert is_small(2)


def test_fails_anyway():
    raise AssertionError


def test_count():
    with open({pid!r}, "w") as file:
        file.write(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
    assert count(2) == 0
"""
TEST = "tests/test_a.py::test_{}"


@pytest.fixture
def project(tmp_path):
    """A repository with a package, tests, and an ignored file."""
    root = tmp_path / "project"
    files = {"hookcb/__init__.py": "", "hookcb/a.py": SOURCE.decode(), "tests/__init__.py": ""}
    files |= {"tests/test_a.py": TESTS.format(pid=str(tmp_path / "pid")), ".gitignore": "big\n", "big": ""}
    for file, text in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    subprocess.run(["git", "init", "--quiet", root], check=True)
    return root


def run(project, after, *tests, limit=60):
    (place,) = (p for p in possible("a.py", SOURCE) if p.mutant.after == after)
    trials = Trials(project, project.parent / "copies", 1, limit)
    assert not list(project.parent.glob("copies/**/big"))
    return trials.run(place, SOURCE, [TEST.format(test) for test in tests])


def test_a_mutant_that_no_test_executes_is_alive(project):
    found = run(project, "n += 1")
    assert (found.result, found.n_tests, found.n_run) == ("alive", 0, 0)


@pytest.mark.slow
def test_a_mutant_is_dead_or_alive_and_a_test_that_fails_without_it_does_not_count(project):
    found = run(project, "return not n < 3", "fails_anyway", "small", "count")
    assert (found.result, found.test) == ("dead", TEST.format("small"))
    assert (found.n_run, found.not_counted) == (1, (TEST.format("fails_anyway"),))
    found = run(project, "return n <= 3", "small")
    assert (found.result, found.n_run, found.test) == ("alive", 1, "")
    assert (project / "hookcb/a.py").read_bytes() == SOURCE


@pytest.mark.slow
def test_a_mutant_that_hangs_is_told_with_its_test_and_leaves_no_process(project):
    found = run(project, "n += 1", "small", "count", limit=5)
    assert (found.result, found.n_run, found.test) == ("time over", 2, TEST.format("count"))
    stat = Path("/proc", (project.parent / "pid").read_text(), "stat")
    for _ in range(100):  # until its parent of now has waited for it
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the process that the test has started still runs")
