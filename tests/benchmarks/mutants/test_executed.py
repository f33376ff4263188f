"""Tests of a mutant: those that execute its lines, in their processes and shared fixtures too."""

import subprocess

import pytest
from executed import Executed, readers, record, sources
from mutant import possible

FILES = {
    "hookcb/__init__.py": "",
    "hookcb/a.py": "LIMIT = 3\nTWICE = LIMIT * 2\n\n\ndef large(n):\n    return n > TWICE\n\n\n"
    "def few(n=LIMIT):\n    x = n\n    return x + 1\n\n\ndef unseen(n):\n    return n > 1\n",
    "tests/__init__.py": "",
    "tests/test_a.py": """
import multiprocessing, subprocess, sys
import pytest
from hookcb.a import few, large

@pytest.fixture(scope="module")
def shared():
    return few()

def test_first(shared):
    assert shared == 4

def test_second(shared):
    assert shared == 4 and large(7)

def test_in_a_process():
    subprocess.run([sys.executable, "-c", "from hookcb.a import large; large(1)"], check=True)

def test_in_a_fork():
    process = multiprocessing.get_context("fork").Process(target=large, args=(1,))
    process.start()
    process.join()
""",
}


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    for file, text in FILES.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


def test_a_constant_is_read_where_its_name_is_and_by_what_is_made_of_it(project):
    found = readers(sources(project))
    assert found["TWICE"] == {("a.py", 6)}
    assert found["LIMIT"] == {("a.py", 6), ("a.py", 10), ("a.py", 11)}


@pytest.mark.slow
def test_a_mutant_has_the_tests_that_execute_its_lines(project, tmp_path):
    pytest.importorskip("coverage")
    subprocess.run(["git", "init", "--quiet", project], check=True)
    assert record(project, tmp_path / "kept", [], jobs=1) == 0
    executed = Executed(tmp_path / "kept", project)
    places = possible("a.py", (project / "hookcb/a.py").read_bytes())
    tests = {p.mutant.after: [t.partition("::test_")[2] for t in executed.tests(p)] for p in places}
    assert sorted(tests["return n >= TWICE"]) == ["in_a_fork", "in_a_process", "second"]
    assert tests["return x - 1"] == ["first", "second"]  # the one that executes fewer lines first
    assert sorted(tests["LIMIT = 6"]) == ["first", "in_a_fork", "in_a_process", "second"]
    assert tests["return n >= 1"] == []
    (project / "tests/test_a.py").write_text("")
    with pytest.raises(ValueError, match="is of other sources; run"):
        Executed(tmp_path / "kept", project)
