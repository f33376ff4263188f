"""Faults that are planted on ranks are found, named and come first; controls are healthy."""

import json
import sys
from importlib import import_module

import pytest

from tests.ranks.support import ROOT, launched

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.slow
def test_three_faults_are_found_and_a_control_is_healthy(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    planted_ranks = import_module("planted_ranks")

    def launch(world, jobs):  # without torchrun, which takes seconds
        tmp_path.joinpath("jobs").write_text(json.dumps(jobs))
        launched(planted_ranks.__file__, tmp_path, "--work", world=world, timeout=90)
        return planted_ranks.found_in(tmp_path, world, len(jobs))

    monkeypatch.setattr(planted_ranks, "launch", launch)
    cases = ["inputs ×1e4 on a rank", "a rank whose data repeat", "set_epoch is hidden", "nothing planted"]
    options = ["--world", "2", "--seeds", "0", "--models", "mlp", "--only", *cases]
    monkeypatch.setattr(sys, "argv", ["planted_ranks.py", *options])
    code, shown = planted_ranks.main(), capsys.readouterr().out
    assert code == 0, shown
    assert "faults: 3 trainings, found 3, rank named 3, first 3, with other alarms 0" in shown
    assert "controls: 1 trainings, with any alarms 0" in shown
