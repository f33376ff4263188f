"""Buffers of replicas in two processes."""

import pytest

from tests.diagnosis.faults.ranks.support import replicas


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return replicas(tmp_path_factory)


@pytest.mark.parametrize("what", ["equal buffers", "sent buffers", "a cache", "a buffer more"])
def test_buffers_that_are_alike_or_sent_or_not_saved_are_fine(ranks, what):
    assert [r[what] for r in ranks] == [[], []]


def test_a_buffer_that_differs_names_its_rank(ranks):
    assert ranks[0]["a buffer"] == ranks[1]["a buffer"]
    assert ranks[0]["a buffer"] == [["replica.buffers", "scale", 1.0, "warning", [1]]]


@pytest.mark.parametrize(
    ("what", "value", "severity"),
    [
        ("near statistics", 0.1, "info"),
        ("a far mean", 0.6, "warning"),
        ("a far variance", 1.1, "warning"),
    ],
)
def test_statistics_of_batch_norm_are_a_note_unless_they_are_far_apart(ranks, what, value, severity):
    assert ranks[0][what] == ranks[1][what] == [["replica.buffers", "norm", value, severity, []]]


def test_a_single_channel_makes_no_warning(ranks):
    assert [severity for _, _, _, severity, _ in ranks[0]["one channel"]] in ([], ["info"])
