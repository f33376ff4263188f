"""What the documentation shows is true."""

import doctest
import importlib
import inspect
import pkgutil
import re
import tomllib
import warnings
from pathlib import Path

import pytest

import hookcb
from hookcb.cli.parser import make_parser

ROOT = Path(__file__).parent.parent
NOT_HERE = ("hookcb.__main__", "hookcb.adapters.lightning", "hookcb.adapters.transformers")  # need packages
MODULES = [m.name for m in pkgutil.walk_packages(hookcb.__path__, "hookcb.") if m.name not in NOT_HERE]
WITH_EXAMPLES = [name for name in MODULES if ">>>" in inspect.getsource(importlib.import_module(name))]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_in_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_every_public_class_has_an_example():
    plain = (hookcb.Event, hookcb.Loop)  # an enumeration, and a base that does nothing by itself
    for name in hookcb.__all__:
        thing = getattr(hookcb, name)
        if (
            isinstance(thing, type) and not issubclass(thing, (BaseException, *plain))
        ) or thing is hookcb.Learner:
            assert ">>>" in thing.__doc__, f"{name} has no example"


GUIDE = [
    "learner",
    "diagnosis",
    "report",
    "loops",
    "training",
    "callbacks",
    "hooks",
    "activations",
    "gradients",
]
HOW_TO = ["nan", "flat", "layer", "slow", "memory"]
PORTING = ["fastai", "lightning", "keras"]
WITH_OUTPUT = ["docs/tutorial.md", "docs/porting/index.md", *(f"docs/howto/{name}.md" for name in HOW_TO)]
NUMBER = re.compile(r"[-\d.e]*\d[-\d.e]*")


def blocks(page):
    """Language and text of each block of a page in Markdown."""
    return re.findall(
        r"^```(python|text)\n(.*?)```", (ROOT / page).read_text("utf-8"), flags=re.DOTALL | re.M
    )


@pytest.mark.parametrize(
    "pages",
    [
        ["README.md"],
        [f"docs/guide/{name}.md" for name in [*GUIDE, "time_and_memory"]],
        *([f"docs/porting/{name}.md"] for name in PORTING),
    ],
    ids=["readme", "guide", *PORTING],
)
def test_the_python_of_pages_runs(pages, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for page in pages:
        found = [text for kind, text in blocks(page) if kind == "python"]
        assert found
        for text in found:
            exec(compile(text, page, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_OUTPUT)
def test_a_page_prints_what_it_shows(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    names, said, n_shown = {}, [], 0
    with warnings.catch_warnings(action="ignore"):  # of trainings that are sick
        for kind, text in blocks(page):
            if kind == "python":
                exec(compile(text, "train.py", "exec"), names)
                said = alike(capsys.readouterr().out)
            else:
                n_shown += 1
                shown = alike(text.partition("…")[0]) if "…" in text else alike(text)
                assert [line for line in shown[:3] if line not in said] == []
    assert n_shown


def alike(text):
    """Lines of a text, with a mark in place of each number, which differ from machine to machine."""
    return [NUMBER.sub("#", line) for line in text.splitlines() if line.strip()]


FOLDER = re.compile(r"""Checkpoint\(["']([^"']+)["']""")


def test_no_two_pages_write_checkpoints_to_the_same_folder():
    """Else one page resumes what a reader has trained with another."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    of_pages = {page.name: set(FOLDER.findall(page.read_text("utf-8"))) for page in pages}
    del of_pages["index.md"]  # of porting, which shows the message of an error
    folders = [folder for found in of_pages.values() for folder in found]
    assert len(folders) > 2
    assert sorted(folders) == sorted(set(folders))


def test_the_site_leaves_out_python_and_its_cache():
    excluded = re.search(r"^exclude_docs: \|\n((?:  .+\n)+)", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert {"*.py", "__pycache__/"} <= set(excluded[1].split())


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert ROOT / project["tool"]["hatch"]["version"]["path"] == Path(hookcb.__file__)
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert newest in (hookcb.__version__, "Unreleased")
    assert f"\nversion: {hookcb.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_page_of_commands_names_each():
    (commands,) = (action for action in make_parser()._actions if action.dest == "command")
    page = (ROOT / "docs" / "guide" / "commands.md").read_text("utf-8")
    assert [name for name in commands.choices if f"`hookcb {name}" not in page] == []
