"""A training that is killed twenty times, whenever it may be, ends as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.training.checkpoint.support import differing

ROOT = Path(__file__).parents[2]
EVERY, N_KILLS = 3, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.scenarios.kill_worker", folder, str(N_KILLS)]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="module")
def report(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def lives(report):
    """Those of the training that was killed, in their order."""
    return report["lives"]


def test_it_was_killed_each_time_and_at_last_came_to_its_end(report, lives):
    assert report["whole"] == 0
    assert [life["exit"] for life in lives] == [-signal.SIGKILL] * N_KILLS + [0]


def test_each_life_goes_on_at_most_every_batches_behind_the_last(lives):
    done = 0  # batches that some life has reported as done
    for before, life in pairwise(lives):
        done = max([done, *(batch + 1 for batch in before["done"])])
        if life["begins"]:
            assert done - EVERY <= life["begins"][0] <= done


def test_the_batches_of_a_life_follow_each_other(lives):
    for life in lives:
        assert (
            life["begins"] == list(range(life["begins"][0], life["begins"][-1] + 1))
            if life["begins"]
            else True
        )


def test_no_part_of_a_file_ever_has_the_name_of_a_whole_one(lives):
    assert [life["unreadable"] for life in lives] == [[]] * len(lives)


def test_nothing_is_left_of_files_that_were_never_whole(lives):
    assert [name for name in lives[-1]["files"] if name.endswith(".partial")] == []
    assert len([name for name in lives[-1]["files"] if name.endswith(".pt")]) == 3


def test_it_ends_to_the_bit_as_the_uninterrupted_one(folder):
    whole, killed = (torch.load(folder / run / "results", weights_only=True) for run in ("whole", "run"))
    assert differing(whole, killed) == []
