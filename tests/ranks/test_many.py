"""Ranks and Votes with many ranks, as threads."""

import pytest

from tests.ranks.support import launched, shared


@pytest.fixture(params=[8, 64, pytest.param(256, marks=pytest.mark.slow)])
def threads(request, tmp_path_factory):
    def make(folder):
        return launched("threads_worker.py", folder, request.param, world=1)[0]

    found = shared(tmp_path_factory, f"threads-{request.param}", make)
    assert str(request.param) in found, found["log"][-2000:]
    ranks = found[str(request.param)]
    assert [rank.get("error") for rank in ranks] == [None] * request.param
    return ranks


def test_numbers_and_objects_are_merged(threads):
    for rank in threads:
        assert [name for name, is_right in rank["merged"].items() if not is_right] == []


def test_what_differs_is_said_on_all_ranks(threads):
    assert {rank["differ"] for rank in threads} == {threads[0]["differ"]}
    assert threads[0]["differ"].startswith("all ranks need the same colour, but ranks 0, 1, 2, 3")
    assert threads[0]["differ"].endswith("have red; rank 5 has blue")


def test_all_ranks_decide_the_same_one_batch_after_the_first_who_asked(threads):
    for decisions in zip(*(rank["decided"] for rank in threads), strict=True):
        assert all(decision == decisions[0] for decision in decisions)
        batch, cancel, _, asked, levels = decisions[0]
        assert batch == asked + 1
        assert cancel in levels


def test_a_signal_of_one_rank_is_known_to_all(threads):
    assert [decision[2] for decision in threads[0]["decided"]] == [0, 15, 0, 15, 0, 15]


def test_a_cancel_outside_of_batches_acts_at_once_on_all(threads):
    assert all(rank["outside"] == ["CancelEpochException"] for rank in threads)
