"""A training that is killed again and again, whenever it may be, ends as if nothing had happened."""

import json
import signal
from itertools import pairwise

import pytest
import torch

from tests.scenarios.kill_worker import main
from tests.training.checkpoint.support import differing

EVERY = 3


@pytest.fixture(scope="module", params=[2, pytest.param(20, marks=pytest.mark.slow)])
def n_kills(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, n_kills):
    folder = tmp_path_factory.mktemp("killed")
    main(folder, n_kills)
    return folder


@pytest.fixture(scope="module")
def report(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def lives(report):
    """Those of the training that was killed, in their order."""
    return report["lives"]


def test_it_was_killed_each_time_and_at_last_came_to_its_end(report, lives, n_kills):
    assert report["whole"] == 0
    assert [life["exit"] for life in lives] == [-signal.SIGKILL] * n_kills + [0]


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
