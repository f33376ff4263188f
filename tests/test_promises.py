"""The page of promises names tests that are there, and each fault is kept by its rule."""

import re
from pathlib import Path

import pytest

import hookcb
from docs import promises as docs
from docs.promises import Promise, files_by_fault, promises, told, unnamed
from hookcb.diagnosis.fault import FAULTS
from tests.test_architecture import missing_links, read
from tests.test_contributing import NOT_PLANTED, PLANTED

ROOT = Path(__file__).parent.parent
PAGE = "docs/promises.md"


def wrong_tests(promise):
    """Tests of a promise that are not there, or that do not run where the page says."""
    for said in promise.tests:
        test = said.split("`")[1]
        try:
            right = told(test)
        except (KeyError, OSError):
            yield f"there is no {test}"
        else:
            if said != right:
                yield f"{said} should be {right}"


def test_each_test_that_the_page_names_is_there_and_runs_where_it_says():
    assert [wrong for promise in promises() for wrong in wrong_tests(promise)] == []


def test_a_test_that_has_gone_or_is_slow_now_is_told():
    file = "tests/loops/test_names.py::test_"
    gone = f"`{file}gone`"
    slow = f"`{file}a_type_checker_knows_each_public_name_and_finds_misspelled_ones`"
    found = list(wrong_tests(Promise("it works", "", (gone, slow, "`tests/nowhere.py::test_it`"))))
    assert found == [
        f"there is no {file}gone",
        f"{slow} should be {slow}, slow",
        "there is no tests/nowhere.py::test_it",
    ]


def test_each_promise_of_the_page_is_read():
    lines = read(PAGE).partition("\n## ")[2].partition("\n## Faults")[0].splitlines()
    sentences = [promise.sentence for promise in promises()]
    assert len(sentences) == sum(line.startswith("- ") for line in lines) > 100
    assert len(set(sentences)) == len(sentences)
    tests = [test for promise in promises() for test in promise.tests]
    assert tests == [line.removeprefix("    - ") for line in lines if line.startswith(" ")]


def test_promises_of_the_readme_have_a_quick_test():
    slow = [
        x for x in promises() if "README" in x.made_in and all(test.endswith(", slow") for test in x.tests)
    ]
    assert slow == []


def test_links_and_names_of_the_page_are_there():
    text = read(PAGE)
    assert missing_links(PAGE, text) == []
    names = {name for promise in promises() for name in re.findall(r"`hookcb\.(\w+)`", promise.made_in)}
    assert names <= set(hookcb.__all__)
    paths = re.findall(r"`([\w./]+/[\w./]*)(?:::(\w+))?`", text.partition("## Faults")[2])
    assert [path for path, _ in paths if not (ROOT / path).exists()] == []
    assert [name for path, name in paths if name and f"def {name}(" not in read(path)] == []


def test_each_public_name_has_a_promise():
    text = " ".join(f"{promise.sentence} {promise.made_in}" for promise in promises())
    assert [name for name in hookcb.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_each_page_that_promises_something_is_linked():
    pages = [
        f"docs/{folder}/{path.name}"
        for folder in ("guide", "howto")
        for path in (ROOT / "docs" / folder).glob("*.md")
    ]
    linked = set(re.findall(r"\]\(([\w/]+\.md)\)", read(PAGE)))
    assert [page for page in pages if page.removeprefix("docs/") not in linked | {"howto/index.md"}] == []


def test_each_fault_has_a_test_and_a_planted_program():
    tested = files_by_fault()
    assert tested.keys() == FAULTS.keys()
    assert [code for code, files in tested.items() if not files] == [], "name it in a test of tests/diagnosis"
    assert FAULTS.keys() <= PLANTED | NOT_PLANTED.keys()


def test_tests_that_no_promise_names_are_printed(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "checks.md").write_text("### `grad.stale`\n", "utf-8")
    page = tmp_path / "docs" / "promises.md"
    page.write_text("- It works · here\n    - `tests/core/test_a.py::test_it`, slow\n", "utf-8")
    for name, body in {
        "core/test_a.py": "def test_it(): ...\n\ndef test_other(): ...\n",
        "diagnosis/test_b.py": "def test_of_a_fault():\n    'grad.stale'\n",
        "diagnosis/test_c.py": "def test_c(): ...\n",
    }.items():
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(body.replace("'", '"'), "utf-8")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "PAGE", page)
    assert list(unnamed([tmp_path / "tests"])) == [
        "tests/core/test_a.py::test_other",
        "tests/diagnosis/test_c.py::test_c",
    ]
    assert list(unnamed([tmp_path / "tests/core/test_a.py"])) == ["tests/core/test_a.py::test_other"]
    with pytest.raises(KeyError):
        told("tests/core/test_a.py::test_gone")
