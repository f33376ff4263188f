"""On two ranks memory is compared, one rank is profiled, and what is shown is shown once."""

import pytest

from hookcb import ProfilerCallback
from hookcb.profiling.memory.readings import RankPeak
from tests.profiling.support import facts_of_ranks
from tests.support import make_learner

pytestmark = pytest.mark.slow  # a launch of two ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return facts_of_ranks(tmp_path_factory)


# ---- MemoryStats


def test_the_rank_with_the_highest_peak_is_known_to_all(ranks):
    for rank, one in enumerate(ranks):
        found = one["memory"]
        assert (found["rank"], found["peak"], found["usual"]) == (1, 256, 128)
        assert found["own"] == (128, 256)[rank]
        assert "highest peak: 256 bytes on rank 1" in found["report"]


def test_a_peak_is_compared_with_that_of_the_others():
    assert RankPeak.of([3.0, 9.0, 5.0, 4.0]) == RankPeak(1, 9, 4.0)


# ---- ProfilerCallback


def test_rank_0_is_profiled_or_those_that_are_given(ranks):
    main, other = (one["profiler"] for one in ranks)
    assert main["main"] == other["other"] == {"steps": [1], "layers": ["", "0", "1", "2"]}
    assert other["main"] == {"error": "nothing was profiled on rank 1; ranks is (0,)"}
    assert main["other"] == {"error": "nothing was profiled on rank 0; ranks is (1,)"}
    assert main["both"]["steps"] == other["both"]["steps"] == [1, 3]


def test_a_trace_is_named_by_its_rank(ranks):
    both = ["both-2.json.gz", "both-2.rank1.json.gz", "both.json.gz", "both.rank1.json.gz"]
    assert ranks[0]["profiler"]["files"] == [*both, "main.json", "other.rank1.json"]


@pytest.mark.parametrize("ranks", [0, "0", [], [-1], [0.5], None, [True]])
def test_ranks_that_cannot_be_are_refused(ranks):
    with pytest.raises((TypeError, ValueError), match="ranks"):
        ProfilerCallback(ranks=ranks)


def test_one_process_is_rank_0():
    learn = make_learner()
    with learn.no_logging():
        learn.fit(1, cbs=ProfilerCallback(0, 1, 1, ranks=(1,)))
    with pytest.raises(RuntimeError, match=r"nothing was profiled on rank 0; ranks is \(1,\)"):
        learn.profiler.report()


# ---- what is shown


def test_what_all_ranks_say_is_said_once_and_what_one_says_has_its_number(ranks):
    main, other = (one["shown"] for one in ranks)
    assert main["told"] == ["of all", "rank 0: of one"]
    assert other["told"] == ["rank 1: of one"]
    assert (main["during"].count("shown"), other["during"]) == (1, "")
    assert main["after"] == other["after"] == "after\n"  # outside of a fit each rank is on its own
