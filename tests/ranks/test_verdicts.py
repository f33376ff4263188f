"""Diagnose on several ranks: one verdict, which names the ranks, and which is printed once."""

import pytest

from tests.ranks.support import launched, shared


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return shared(
        tmp_path_factory, "verdicts", lambda folder: launched("verdict_worker.py", folder, timeout=180)
    )


def each(ranks, name):
    assert all(name in rank for rank in ranks), [rank.get("log", "")[-2000:] for rank in ranks]
    found = [rank[name] for rank in ranks]
    assert all("result" in outcome for outcome in found), found
    return [outcome["result"] for outcome in found]


def verdict(ranks, name):
    """What a case gave on rank 0; the verdict must be the same on all, and be printed there alone."""
    results = each(ranks, name)
    assert len({result["verdict"] for result in results}) == 1
    assert [result["printed"] for result in results] == [True, False]
    assert not any(result["warnings"] for result in results[1:])
    return results[0]


def test_a_healthy_training_is_healthy_on_all_ranks_and_bit_identical(two):
    result = verdict(two, "healthy")
    assert result["headline"].startswith("HEALTHY")
    assert "2 ranks" in result["looked"]
    assert each(two, "without") == [x["weights"] for x in each(two, "healthy")]


def test_what_stays_of_a_fit_is_of_all_ranks(two):
    for result in each(two, "healthy"):
        one, other = result["of_ranks"]
        every = -(-len(result["loss"]) // 100)
        means = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
        assert result["loss"][::every] == means
        assert one != other


def test_inputs_on_a_bad_scale_name_their_rank_first(two):
    result = verdict(two, "inputs_of_one_rank")
    assert result["findings"][0] == ["input.scale", "", [1], ""]
    assert "on rank 1 of 2 (input.scale; " in result["headline"]
    assert len(result["warnings"]) == 1


def test_a_rank_that_learns_nothing_is_named(two):
    result = verdict(two, "labels_of_one_rank")
    assert ["loss.trivial", "", [1], ""] in result["findings"]


def test_nan_in_the_batch_of_a_rank_is_its_input(two):
    result = verdict(two, "nan_in_the_batch_of_one_rank")
    assert result["findings"][0] == ["input.nonfinite", "", [1], ""]
    assert {code for code, *_ in result["findings"]} <= {"input.nonfinite", "nonfinite.first"}
    assert all(cause or code == "input.nonfinite" for code, _, _, cause in result["findings"])


def test_nan_in_a_layer_of_a_rank_stops_all_in_the_same_batch(two):
    result = verdict(two, "nan_in_a_layer_of_one_rank_stops_all")
    assert result["findings"][0] == ["nonfinite.first", "1", [1], ""]
    assert {x["n"] for x in each(two, "nan_in_a_layer_of_one_rank_stops_all")} == {result["n"]}
    assert 6 < result["n"] < 15


def test_ranks_with_the_same_batches_are_told(two):
    result = verdict(two, "the_same_batches")
    assert result["findings"][0] == ["data.duplicated", "", [], ""]
    assert "ranks 0, 1" in result["verdict"]


def test_a_parameter_that_moves_on_one_rank_is_named(two):
    assert verdict(two, "replicas_that_diverge")["findings"] == [["replica.diverged", "2", [1], ""]]


def test_a_function_is_called_with_the_verdict_on_main_alone(two):
    assert each(two, "a_function_is_called_on_main") == [["sick"], []]


def test_a_sharded_training_is_healthy_and_says_what_was_not_checked(two):
    a, b = each(two, "sharded")
    assert a["verdict"] == b["verdict"]
    assert a["status"] == "healthy"
    assert any("sharded" in line for line in a["coverage"])


def test_one_rank_may_ask_within_a_fit(two):
    assert each(two, "asked_by_one_rank_in_a_fit") == ["healthy", None]


def test_one_rank_may_watch(two):
    (coverage, nothing) = each(two, "watched_by_one_rank")
    assert nothing is None
    assert any(line.startswith("rank 1 posted nothing: it does not run hookcb") for line in coverage)


def test_an_error_that_was_told_and_is_over_is_in_the_verdict_of_all_ranks(two):
    result = verdict(two, "healed_in_a_fit")
    assert len(result["warnings"]) == 1
    assert result["headline"].startswith("SUSPECT  The loss rises and stays high, recovered by ")


def test_it_is_in_the_verdict_of_all_ranks_that_watch_a_loop(two):
    for headline in each(two, "healed_in_own_loops"):
        assert headline.startswith("SUSPECT  The loss rises and stays high, recovered by ")


def test_after_an_error_each_rank_tells_what_it_has_seen(two):
    a, b = each(two, "an_error_on_one_rank")
    assert (a["error"], b["error"]) == ("RankError", "ValueError")
    assert "rank 1 raised ValueError" in a["text"]
    assert any("only what rank 0 has seen" in line for line in a["looked"])
    assert any("as rank 1 raised ValueError" in line for line in a["looked"])
