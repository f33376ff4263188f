"""What the documentation shows is true."""

import doctest
import importlib
import inspect
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

import hookcb

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


def test_the_python_in_the_readme_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_the_version_is_the_same_everywhere():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]  # read from the file that the next line names
    path = ROOT / settings["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{hookcb.__version__}"' in path.read_text()
    assert f"\nversion: {hookcb.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"[{hookcb.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
