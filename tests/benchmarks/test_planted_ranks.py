"""Faults that are planted on ranks are found, named and come first; controls are healthy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*args, timeout):
    command = [sys.executable, str(ROOT / "benchmarks" / "planted_ranks.py"), *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)


def test_three_faults_are_found_and_a_control_is_healthy():
    cases = ["inputs ×1e4 on a rank", "a rank whose data repeat", "set_epoch is hidden", "nothing planted"]
    done = run("--world", "2", "--seeds", "0", "--models", "mlp", "--only", *cases, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "faults: 3 trainings, found 3, rank named 3, first 3, with other alarms 0" in done.stdout
    assert "controls: 1 trainings, with any alarms 0" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("world", ["2", "4"])
def test_all_faults_are_found_and_no_control_is_sick(world):
    done = run("--world", world, "--seeds", "0", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
