"""The rank that the others wait for is told by its own work; those who wait for it are not blamed."""

import math

import pytest
import torch
from torch import nn

from hookcb import StepTimer
from hookcb.core.alone import ALONE
from hookcb.processes.stragglers import BLOCK, RankTimes, waits_in_forward
from hookcb.profiling.steps.times import STEP_PHASES
from tests.profiling.support import facts_of_ranks
from tests.support import fit, make_learner


def block(*ranks, n=100):
    """A table of seconds by phase, as gathered: a step's, times `n` steps."""
    rows = [[seconds.get(phase, 0.0) * n for phase in STEP_PHASES] + [n] for seconds in ranks]
    return torch.tensor(rows, dtype=torch.float64)


def times(*blocks, waiting=("backward",), waits_for_main=False):
    n_ranks = len(blocks[0])
    hosts = [f"host{rank}" for rank in range(n_ranks)]
    found = RankTimes(0, hosts, STEP_PHASES, waiting, waits_for_main)
    for table in blocks:
        found.add(table)
    return found


FAST = {"forward": 0.001, "backward": 0.03}
SLOW = {"forward": 0.021, "backward": 0.01}


# ---- made-up numbers


def test_who_waits_in_the_backward_is_not_blamed_for_it():
    found = times(block(FAST, FAST, SLOW, FAST)).straggler
    assert (found.rank, found.host, found.phase) == (2, "host2", "forward")
    assert (found.seconds, found.usual) == pytest.approx((0.021, 0.001))
    assert (found.excess, found.extra) == pytest.approx((0.02, 0.02))
    assert found.share == pytest.approx(0.02 / 0.031)
    assert str(found).startswith("the others wait for rank 2 (host2): its own work takes 21 ms a step, 20 ms")


def test_waits_of_hookcb_are_no_work():
    waits = {"forward": 0.001, "backward": 0.01, "other": 0.02}
    assert times(block(waits, SLOW)).straggler.rank == 1


@pytest.mark.parametrize(("n_slow", "is_named"), [(1, False), (2, False), (3, True)])
def test_a_straggler_is_slowest_in_more_than_half_of_the_blocks(n_slow, is_named):
    slow, other = block(FAST, SLOW), block({"forward": 0.0012, "backward": 0.03}, FAST)
    found = times(*[slow] * n_slow, *[other] * (4 - n_slow))
    assert (found.straggler is not None) == is_named
    assert (found.slowest.rank, found.slowest.n_slowest, found.slowest.n_blocks) == (1, n_slow, 4)


@pytest.mark.parametrize(
    ("more", "step", "is_named"), [(0.003, 0.02, True), (0.001, 0.02, False), (0.0009, 0.001, False)]
)
def test_a_little_more_work_makes_no_straggler(more, step, is_named):
    usual, late = {"data": 0.001, "backward": step}, {"data": 0.001 + more, "backward": step - more}
    assert (times(block(usual, late)).straggler is not None) == is_named


def test_where_buffers_come_from_rank_0_the_others_wait_for_it_in_the_forward():
    late = {"data": 0.02, "forward": 0.001, "backward": 0.01}
    waiting = {"data": 0.0, "forward": 0.021, "backward": 0.01}
    table = block(late, waiting, waiting)
    found = times(table.clone(), waits_for_main=True).straggler
    assert (found.rank, found.phase) == (0, "data")
    assert found.usual == pytest.approx(0.001)


def test_blocks_count_by_their_steps():
    found = times(block(FAST, SLOW, n=100), block(FAST, FAST, n=300)).slowest
    assert found.seconds == pytest.approx(0.006)


def test_a_block_in_which_a_device_has_not_finished_a_step_is_left_out():
    table = block(FAST, SLOW)
    table[1] = 0.0
    found = times(table)
    assert (found.n_blocks, found.straggler, found.slowest) == (0, None, None)
    assert "ranks are compared after 10 steps" in found.lines()[0]
    assert str(found) == ""


def test_the_table_has_a_row_for_each_phase_that_is_compared():
    text = str(times(block(FAST, SLOW)))
    assert "work of 2 ranks without waiting, 100 steps" in text
    assert "forward" in text
    assert "own work" in text
    assert "backward" not in text
    assert "data" not in text  # nobody has spent time there


def test_numbers_without_a_meaning_do_no_harm():
    found = times(block({"data": math.nan}, {"data": math.inf}, {}))
    assert found.straggler is None or found.straggler.share
    assert found.lines()


# ---- who waits where


@pytest.mark.parametrize(
    ("layers", "expected"), [([], ""), ([nn.BatchNorm1d(2)], ""), ([nn.SyncBatchNorm(2)], "all")]
)
def test_a_model_says_who_waits_in_its_forward(layers, expected):
    assert waits_in_forward(ALONE, nn.Sequential(nn.Linear(2, 2), *layers)) == expected


# ---- one process


def test_one_process_has_no_straggler_and_the_report_no_ranks():
    learn = make_learner()
    fit(learn, cbs=StepTimer())
    assert learn.step_timer.straggler is None
    assert learn.step_timer.records.ranks is None
    assert "rank" not in str(learn.step_timer.report())
    assert {time.other for time in learn.step_timer.times} == {0.0}
    assert BLOCK == 100


# ---- two ranks, whose launch takes long


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return facts_of_ranks(tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "rank", "phase"),
    [
        ("forward", 1, "forward"),
        ("data", 1, "data"),
        ("callbacks", 1, "callbacks"),
        ("buffers_and_data_of_rank_0", 0, "data"),
        ("buffers_and_forward_of_rank_1", 1, "forward"),
        ("sharded_data", 1, "data"),
        ("votes", 1, "forward"),
        ("without_length", 1, "forward"),
    ],
)
def test_a_rank_that_lags_is_named_on_all_ranks(ranks, case, rank, phase):
    for one in ranks:
        found, where, excess, is_chronic = one[case]["straggler"]
        assert (found, where, is_chronic) == (rank, phase, True)
        assert excess > 0
        assert (one[case]["blocks"], one[case]["steps"]) == (3, 49)  # the first of an epoch does not count
        assert f"the others wait for rank {rank}" in " ".join(one[case]["report"].split())
    assert ranks[0][case]["straggler"] == ranks[1][case]["straggler"]


@pytest.mark.slow
def test_the_report_says_of_which_rank_it_is_and_where_ranks_wait(ranks):
    for rank, one in enumerate(ranks):
        report = " ".join(one["forward"]["report"].split())
        assert f"50 steps of training on rank {rank} of 2" in report
        assert "ranks wait for each other in backward and other" in report


@pytest.mark.slow
def test_ranks_gather_at_the_same_batches(ranks):
    a, b = (one["forward"]["ops"] for one in ranks)
    assert a == b
    assert sum("[2, 8]" in op for op in a) == 3


@pytest.mark.slow
def test_what_ranks_of_a_sharded_model_cannot_tell_is_said(ranks):
    found = ranks[0]["sharded_forward"]
    assert "forward" not in found["phases"]
    assert found["straggler"] is None
    report = " ".join(found["report"].split())
    assert "wait for each other in forward, backward and other: what a rank takes longer only there" in report


@pytest.mark.slow
def test_time_in_which_hookcb_waits_for_a_rank_is_not_that_of_data(ranks):
    assert ranks[0]["votes"]["data"] < 0.3
    assert ranks[0]["without_length"]["data"] < 0.3


@pytest.mark.slow
def test_a_timer_can_be_copied_while_it_gathers(ranks):
    assert [one["pickled_while_it_runs"] for one in ranks] == [{"n": 1, "again": 3}] * 2


@pytest.mark.slow
def test_a_few_steps_are_not_compared(ranks):
    assert [one["too_short"]["blocks"] for one in ranks] == [0, 0]
    assert "ranks are compared after 10 steps" in ranks[0]["too_short"]["report"]


@pytest.mark.slow
def test_after_an_error_of_one_rank_none_waits_for_the_others(ranks):
    assert ranks[1]["ends_early"]["error"] == "ValueError: of rank 1"
    assert ranks[0]["ends_early"]["error"].startswith("RankError: rank 1 raised ValueError")


@pytest.mark.slow
def test_a_diagnosis_finds_it_with_a_timer_of_its_own(ranks):
    for one in ranks:
        (message,) = one["diagnosis"]["messages"]
        assert message.startswith("The other ranks wait for rank 1 (host ")
        assert one["diagnosis"]["timer"] == "LedTimer"
