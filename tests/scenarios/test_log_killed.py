"""A training that is killed leaves everything that was logged so far."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hookcb.loggers import read_csv, read_jsonl
from tests.scenarios.log_kill_worker import train

ROOT = Path(__file__).parents[2]
N_BEFORE = 40  # batches before it is killed


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a training that was killed, and the steps of which it had said that they were logged."""
    folder = tmp_path_factory.mktemp("killed")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.scenarios.log_kill_worker", folder]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        told = [int(process.stdout.readline()) for _ in range(N_BEFORE)]
        process.send_signal(signal.SIGKILL)
        told += map(int, process.stdout)
    assert process.returncode == -signal.SIGKILL
    return folder, told


@pytest.fixture(scope="module")
def alone(killed):
    """What the same training logs here, by step and name, as far as the other came."""

    class Kept:
        def __init__(self):
            self.values = {}

        def log(self, values, step):
            self.values |= {(step, name): x for name, x in values.items()}

    kept = Kept()
    train(kept, n_batches=killed[1][-1] + 1)
    return {key: x for key, x in kept.values.items() if not key[1].startswith("epoch/")}


def test_it_was_killed_in_the_middle_of_the_training(killed):
    _, told = killed
    assert told == list(range(len(told)))
    assert N_BEFORE <= len(told) < 1_000_000


def test_every_record_that_was_logged_is_in_both_files(killed, alone):
    folder, told = killed
    rows = read_jsonl(folder / "log.jsonl")
    of_json = {(row["step"], name): x for row in rows for name, x in row.items() if name != "step"}
    of_csv = {(row["step"], row["name"]): row["value"] for row in read_csv(folder / "log.csv")}
    assert len(rows) - len(told) in (0, 1)  # killed between the two
    for found in (of_json, of_csv):
        there = {key: x for key, x in found.items() if key[0] <= told[-1]}
        assert len(there) == len(told) * len({name for _, name in alone})
        assert there == pytest.approx(alone, rel=1e-6, abs=1e-9, nan_ok=True)
