"""Loops of one's own on several ranks: one verdict, by notes in the store, without a collective."""

import pytest

from tests.ranks.support import launched, shared

MAX_SECONDS = 12.0  # to close: those that it may wait, and those of a verdict; the group would wait for 15


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return shared(
        tmp_path_factory, "posted", lambda folder: launched("posted_worker.py", folder, timeout=240)
    )


def each(ranks, name):
    assert all(name in rank for rank in ranks), [rank.get("log", "")[-2000:] for rank in ranks]
    found = [rank[name] for rank in ranks]
    assert all("result" in outcome for outcome in found), found
    return [outcome["result"] for outcome in found]


def same(results):
    """What ranks have in common, of which the first alone has shown it."""
    one, *others = results
    for other in others:
        assert [other[key] for key in ("head", "looked", "found", "of")] == [
            one[key] for key in ("head", "looked", "found", "of")
        ]
        assert other["shown"] == ""
    assert one["head"] in one["shown"].replace("\n", " ")
    assert all(result["seconds"] < MAX_SECONDS for result in results)
    return one


def test_a_healthy_training_has_one_verdict_of_all_ranks(ranks):
    one = same(each(ranks, "healthy"))
    assert one["head"].startswith("HEALTHY  as far as checked")
    assert one["looked"][2] == "2 ranks"


@pytest.mark.parametrize(
    ("name", "code"),
    [("class", "label.single_class"), ("nan", "input.nonfinite"), ("scale", "input.scale")],
)
def test_a_fault_on_rank_1_is_shown_by_rank_0_and_names_it(ranks, name, code):
    one = same(each(ranks, name))
    assert one["found"][0] == [code, [1]]
    assert f"on rank 1 of 2 ({code}; " in one["head"]


def test_a_model_that_one_rank_trains_alone_leaves_the_verdict_of_all(ranks):
    one = same(each(ranks, "others beside"))
    assert one["found"][0] == ["input.scale", [1]]


def test_what_another_rank_has_found_is_told_while_it_trains(ranks):
    main, other = each(ranks, "live")
    assert other["told"] == []
    assert ["on rank 1 of 2" in text for text in main["told"]] == [True]


def test_a_fault_of_one_rank_stops_all_after_the_same_step(ranks):
    main, other = each(ranks, "stop")
    assert main["n"] == other["n"] < 30
    assert main["digest"] == other["digest"]


def test_a_rank_that_is_late_is_said_and_not_waited_for(ranks):
    main, other = each(ranks, "rank 1 is late")
    assert main["head"].startswith("HEALTHY  of rank 0 only")
    assert main["looked"][2] == "rank 1 had not ended, or is gone; it last posted after 20 batches"
    assert other["looked"][2] == "of rank 1 only; rank 0 had judged before this rank had ended"
    assert other["head"].startswith("HEALTHY  of rank 1 only")
    assert "of rank 1 only" in other["shown"]
    assert max(main["seconds"], other["seconds"]) < MAX_SECONDS


def test_if_rank_0_is_late_the_others_show_their_own(ranks):
    main, other = each(ranks, "rank 0 is late")
    assert other["looked"][2] == "of rank 1 only; rank 0 had not ended"
    assert "of rank 1 only" in other["shown"]
    assert main["of"] == ""  # it reads what rank 1 has posted
    assert max(main["seconds"], other["seconds"]) < MAX_SECONDS


def test_a_model_that_is_freed_ends_the_watch_with_the_verdict_of_all(ranks):
    for found in each(ranks, "freed"):
        assert not found["fitting"]
        assert found["of"] == ""


def test_ranks_that_train_other_models_are_not_judged_together(ranks):
    main, other = each(ranks, "another model")
    assert main["looked"][2] == "rank 1 trains a Other, and not a Sequential: it is not judged here"
    assert (main["of"], other["of"]) == ("rank 0", "rank 1")


def test_a_rank_without_hookcb_is_said(ranks):
    main, other = each(ranks, "absent")
    assert "rank 1 posted nothing: it does not run hookcb" in main["looked"][2]
    assert main["of"] == "rank 0"
    assert main["seconds"] < MAX_SECONDS
    assert "head" not in other


@pytest.mark.parametrize("fault", ["None", "scaled", "nan"])
def test_a_watched_loop_has_the_collectives_that_it_has_alone(ranks, fault):
    for (alone, weights), (watched, same_weights) in each(ranks, f"trace, {fault}"):
        assert len(alone) > 40
        assert watched == alone
        assert same_weights == weights


def test_a_rank_that_is_killed_is_said(tmp_path):
    main, other = launched("posted_worker.py", tmp_path, "killed", only=1)
    assert other["exit"] == -9
    assert main["looked"][2] == "rank 1 had not ended, or is gone; it last posted after 20 batches"
    assert main["of"] == "rank 0"
    assert main["seconds"] < 2 * MAX_SECONDS


def test_a_rank_that_fails_is_said_with_its_error(tmp_path):
    main, other = launched("posted_worker.py", tmp_path, "fails")
    assert main["looked"][2] == "rank 1 was ended by ValueError: mine, after 30 batches"
    assert (main["ended"], other["ended"]) == ("RuntimeError", "ValueError")
    assert "of rank 1 only; rank 0 had not ended" in other["looked"]


def test_if_the_store_is_gone_each_rank_says_what_it_knows(tmp_path):
    main, other = launched("posted_worker.py", tmp_path, "left")
    assert main["of"] in ("", "rank 0")
    assert other["of"] in ("", "rank 1")
    assert max(main["seconds"], other["seconds"]) < MAX_SECONDS
