"""Faults that are planted on ranks are found, named and come first; controls are healthy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_three_faults_are_found_and_a_control_is_healthy():
    cases = ["inputs ×1e4 on a rank", "a rank whose data repeat", "set_epoch is hidden", "nothing planted"]
    command = [sys.executable, str(ROOT / "benchmarks" / "planted_ranks.py"), "--world", "2", "--seeds", "0"]
    command += ["--models", "mlp", "--only", *cases]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, timeout=90, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "faults: 3 trainings, found 3, rank named 3, first 3, with other alarms 0" in done.stdout
    assert "controls: 1 trainings, with any alarms 0" in done.stdout
