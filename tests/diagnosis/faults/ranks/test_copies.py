"""Buffers and parameters of replicas in two processes."""

from types import SimpleNamespace

import pytest
from torch import nn

from hookcb.core.alone import ALONE
from hookcb.diagnosis.faults.ranks.copies import DivergedReplicas
from hookcb.diagnosis.run import Run, Skipped
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


@pytest.mark.parametrize("what", ["alike", "low precision", "buffers differ", "no replica", "left out"])
def test_replicas_with_the_same_parameters_are_fine(ranks, what):
    assert [r[what] for r in ranks] == [[], []]


@pytest.mark.parametrize(
    "what", ["rank 1 differs", "rank 0 differs", "a bit", "in another order", "rank 1 is NaN"]
)
def test_a_parameter_that_differs_on_one_rank_is_told_on_all_ranks_alike(ranks, what):
    assert ranks[0][what] == ranks[1][what]
    ((code, step, value, param, text),) = ranks[0][what]
    assert (code, step, value, param) == ("replica.diverged", 7, 1.0, "2.weight")
    assert text.startswith("Parameter 2.weight differs on rank 1 from that of rank 0")


def test_rates_that_differ_are_told(ranks):
    assert ranks[0]["rates differ"] == ranks[1]["rates differ"]
    ((code, _, value, param, text),) = ranks[0]["rates differ"]
    assert (code, value, param) == ("replica.diverged", 1.0, "")
    assert text.startswith("The learning rate differs on rank 1 from that of rank 0")


def test_replicas_that_went_to_nan_together_have_not_diverged(ranks):
    assert [r["all are NaN"] for r in ranks] == [[], []]


def test_without_other_processes_there_is_nothing_to_compare():
    fault, run = DivergedReplicas(), Run(loop=SimpleNamespace(model=nn.Linear(3, 2), ranks=ALONE))
    fault.on_epoch(run)
    (result,) = fault.findings(run)
    assert result == Skipped("too little was seen of the replicas at the end of an epoch")
