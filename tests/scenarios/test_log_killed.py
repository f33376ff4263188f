"""A training that is killed leaves everything that was logged so far."""

import signal
import time

import pytest

from hookcb.loggers import read_csv, read_jsonl
from tests.scenarios.log_kill_worker import train
from tests.support import start

N_BEFORE = 40  # batches before it is killed


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a training that was killed, and the steps of which it had said that they were logged."""
    folder = tmp_path_factory.mktemp("killed")
    said = folder / "said"
    process = start("-m", "tests.scenarios.log_kill_worker", folder, log=said)
    while not said.exists() or said.read_text().count("\n") < N_BEFORE:
        assert process.is_alive(), said.read_text()
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return folder, [int(line) for line in said.read_text().splitlines()]


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
