"""Tells what a wheel or sdist lacks, and what does not belong into it."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def release(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield import_module("release")
    del sys.modules["release"]


def test_a_whole_wheel_is_accepted_and_each_fault_is_named(release):
    own = release.own_files()
    assert "hookcb/py.typed" in own
    whole = [*own, "hookcb-0.2.0.dist-info/licenses/LICENSE", "hookcb-0.2.0.dist-info/METADATA"]
    assert release.wrong_in_wheel(whole, own) == []
    wrong = release.wrong_in_wheel([*whole[:-2], "tests/support.py", "docs/checks.py"], own)
    assert "the wheel has tests/support.py, which is not part of the package" in wrong
    assert "the wheel has docs/checks.py, which is not part of the package" in wrong
    assert wrong[-1] == "the wheel lacks LICENSE"
    without = set(own) - {"hookcb/py.typed"}
    assert release.wrong_in_wheel([*without, *whole[-2:]], without) == ["the wheel lacks hookcb/py.typed"]


def test_an_sdist_has_all_folders_and_nothing_hidden(release):
    files = [f"{folder}/file" for folder in release.SOURCES]
    files += ["LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "Makefile", "PKG-INFO", ".gitignore"]
    assert release.wrong_in_sdist(files) == []
    assert release.wrong_in_sdist([*files[1:], ".env"]) == ["the sdist lacks tests", "the sdist has .env"]


def test_a_command_that_fails_ends_the_release(release, capsys):
    with pytest.raises(SystemExit, match="install failed with exit code 3"):
        release.timed("install", [sys.executable, "-c", "import sys; print('no disk'); sys.exit(3)"])
    assert "no disk" in capsys.readouterr().out
