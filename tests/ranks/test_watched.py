"""Loops of one's own on several ranks: a stop that one rank requests ends all of them after the same step."""

import pytest

from tests.ranks.support import launched, shared

EVENTS = "before_batch", "after_pred", "after_loss", "after_backward", "before_step", "after_step"


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    def launch(folder):
        return launched("watch_worker.py", folder, world=request.param)

    return shared(tmp_path_factory, f"watched-by-{request.param}", launch)


def each(ranks, name):
    assert all(name in rank for rank in ranks), [rank.get("log", "")[-2000:] for rank in ranks]
    found = [rank[name] for rank in ranks]
    assert all("result" in outcome for outcome in found), found
    return [outcome["result"] for outcome in found]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("event", EVENTS)
def test_a_stop_of_one_rank_ends_all_after_the_same_step(ranks, event, accumulate):
    (n, weights), *others = each(ranks, f"{event}, {accumulate}")
    assert all(other == [n, weights] for other in others)
    assert n % accumulate == 0
    assert 8 < n <= 8 + 2 * accumulate


def test_if_several_ask_the_first_counts(ranks):
    first, *others = each(ranks, "both ask")
    assert all(other == first for other in others)
    assert first[0] < 10


def test_a_request_that_others_would_not_notice_has_no_effect_and_is_told(ranks):
    (n, told), *others = each(ranks, "only one watches")
    assert n == 60
    assert len(told) == 1
    assert "rank 1" in told[0] or "ranks 1" in told[0]
    assert others == [[60, []]] * len(others)


def test_without_a_request_none_stops(ranks):
    assert {n for n, _ in each(ranks, "never")} == {60}


def test_a_diagnosed_script_ends_on_all_ranks_after_the_steps_that_were_asked_for(ranks):
    (code, n, weights, shown), *others = each(ranks, "steps")
    assert (code, n) == (0, 9)
    assert all(other == [0, 9, weights, ""] for other in others)
    assert "HEALTHY  as far as checked" in shown
    assert "Note: 2 ranks" in shown or len(others) > 1


def test_if_the_minutes_of_a_rank_are_over_all_end_after_the_same_step(ranks):
    (_, n, weights, _), *others = each(ranks, "minutes")
    assert 5 < n < 12
    assert all(other == [0, n, weights, ""] for other in others)
