"""The list of mutants says which are to be carried over by hand, and which are gone with their code."""

import argparse
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

MAIN = Path(__file__).parents[3] / "benchmarks/mutants/__main__.py"
LOST = {"file": "core/none.py", "kind": "return", "before": "return 1", "after": "return None"}


@pytest.fixture
def main(monkeypatch):
    spec = importlib.util.spec_from_file_location("mutants_main", MAIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "Executed", lambda path, root: SimpleNamespace(sources="now"))
    monkeypatch.setattr(module, "Trials", lambda *args: None)
    monkeypatch.setattr(module, "sources", lambda root: {"core/some.py": b"def wake():\n    return 2\n"})
    return module


def run(main, path, *mutants):
    path.write_text(json.dumps({"mutants": [{**LOST, "occurrence": 0, **mutant} for mutant in mutants]}))
    args = argparse.Namespace(list=path, record=None, only="*", label="after", jobs=1, limit=1.0)
    return main.run_all(args), json.loads(path.read_text())["mutants"]


GONE = {"function": "sleep", "gone": "nothing sleeps", "runs": {"before": {"result": "alive"}}}


def test_a_mutant_whose_code_is_gone_is_in_no_later_run_and_one_that_is_not_found_is_carried_over_by_hand(
    main, tmp_path, capsys
):
    code, (gone, lost) = run(main, tmp_path / "list.json", GONE, {"function": "wake", "runs": {}})
    assert code == 1
    assert gone["runs"] == GONE["runs"]
    assert "gone, in no later run: core/none.py sleep, nothing sleeps" in capsys.readouterr().out
    assert lost["runs"]["after"] == {"result": "to be carried over by hand"}
