"""Fits, validations and predictions of several ranks: the same decisions, the right numbers, and no hang."""

import pytest

from tests.ranks.support import TIMEOUT, launched, shared

CASES = [
    "fit_two_epochs",
    "set_epoch_of_batch_samplers_and_datasets",
    "numbers",
    "validation_of_few",
    "lr_find",
    "lr_find_that_diverges",
    "early_stopping",
    "best_model",
    "max_time",
    "nan_on_one_rank",
    "plateau",
    "declared_cancel",
    "cancel_of_all",
    "cancels_between_batches",
    "cancel_outside_of_batches",
    "streams",
    "uneven_lists",
    "uneven_in_join",
    "callbacks_that_differ",
    "epochs_that_differ",
    "empty_shard",
    "shown_once",
    "resumed",
    "resume_on_some",
    "checkpoint_on_main_only",
    "saved",
    "sigint",
    "sigterm",
    "fsdp2",
]
LAST = "validate_on_main_only"  # after which ranks have not come equally far
# of which several others have to hear, or in which some ranks have nothing
OF_FOUR = ["fit_two_epochs", "numbers", "validation_of_few", "max_time", "nan_on_one_rank", "declared_cancel"]
OF_FOUR += ["cancel_outside_of_batches", "callbacks_that_differ", "empty_shard", "shown_once", "resumed"]
OF_FOUR += ["fsdp2"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    names = ",".join([*CASES, "accumulation", LAST])
    return shared(tmp_path_factory, "cases", lambda folder: launched("cases_worker.py", folder, names))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    names = ",".join([*OF_FOUR, LAST])
    return shared(
        tmp_path_factory, "cases-of-4", lambda folder: launched("cases_worker.py", folder, names, world=4)
    )


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.slow)])
def ranks(request):
    return request.getfixturevalue(request.param)


def outcomes(ranks, name):
    """What the case gave on each rank."""
    assert all(name in rank for rank in ranks), ranks[0]["log"][-3000:]
    return [rank[name] for rank in ranks]


def each(ranks, name):
    found = outcomes(ranks, name)
    assert all("result" in outcome for outcome in found), found
    return [outcome["result"] for outcome in found]


def of_all(ranks, name):
    """The result of the case, which must be that of every rank."""
    found = each(ranks, name)
    assert all(result == found[0] for result in found), found
    return found[0]


def error_of_all(ranks, name):
    found = outcomes(ranks, name)
    assert [outcome.get("error") for outcome in found] == ["RankError"] * len(ranks), found
    assert len({outcome["text"] for outcome in found}) == 1
    return found[0]["text"]


def test_all_cases_were_run(ranks):
    assert ranks[0]["exit"] == 0, ranks[0]["log"][-3000:]


# ---- numbers


def test_ranks_have_the_same_weights_and_the_same_rows(ranks):
    a, *others = each(ranks, "fit_two_epochs")
    assert a["ranks"] == f"Ranks(rank=0, world={len(ranks)})"
    for b in others:
        assert (a["weights"], a["rows"]) == (b["weights"], b["rows"])


def test_each_epoch_has_another_order(ranks):
    for result in each(ranks, "fit_two_epochs"):
        first, second = result["orders"]
        assert first != second
        assert len(first) == len(second)


def test_whatever_shuffles_by_epoch_is_told_the_epoch(two):
    seen = of_all(two, "set_epoch_of_batch_samplers_and_datasets")
    assert seen == [["dataset", 0], ["dataset", 1], ["sampler", 0], ["sampler", 1]]


def test_loss_metrics_and_predictions_are_those_of_all_samples_in_their_order(ranks):
    found = of_all(ranks, "numbers")
    assert found["shape"] == [51, 2]
    assert found["same_preds"]
    assert found["same_targets"]
    assert abs(found["loss"]) < 1e-6
    assert abs(found["accuracy"]) < 1e-6


def test_a_rank_may_have_nothing_to_validate_on(ranks):
    found = of_all(ranks, "validation_of_few")
    assert found["shape"] == [1, 2]
    assert found["loss"] == found["rows"]


def test_accumulated_steps_are_those_of_one_process(two):
    found = of_all(two, "accumulation")
    assert found["apart"] < 1e-6
    assert found["reduced"] == [False, False, True, False, True]  # once a group


def test_lr_find_suggests_the_same_rate_on_all_ranks(two):
    assert of_all(two, "lr_find")["restored"]


def test_lr_find_stops_on_all_ranks_if_the_loss_of_one_explodes(two):
    assert of_all(two, "lr_find_that_diverges")["n"] < 60


def test_sharded_ranks_validate_and_stop_together(ranks):
    found = of_all(ranks, "fsdp2")
    assert found["n"] == 12
    assert found["same"]
    assert found["shape"] == [9]
    assert all(abs(apart) < 1e-5 for apart in found["losses"])


# ---- decisions


def test_early_stopping_ends_all_ranks_after_the_same_epoch(two):
    assert len(of_all(two, "early_stopping")["rows"]) == 3


def test_all_ranks_have_the_model_of_the_best_epoch(two):
    found = of_all(two, "best_model")
    assert found["weights"] == found["epochs"][1] != found["epochs"][2]


def test_the_first_clock_ends_all_ranks_in_the_same_batch(ranks):
    of_all(ranks, "max_time")


def test_nan_on_one_rank_ends_all_before_the_step(ranks):
    assert of_all(ranks, "nan_on_one_rank")["n"] == 3


def test_a_plateau_lowers_the_rate_of_all_ranks_at_once(two):
    found = of_all(two, "plateau")
    assert found["lrs"][-1] < found["lrs"][0]


def test_a_declared_cancel_of_one_rank_skips_the_batch_on_all(ranks):
    assert of_all(ranks, "declared_cancel")["n"] == 11


def test_a_cancel_of_all_ranks_needs_no_declaration(two):
    assert of_all(two, "cancel_of_all")["n"] == 9


def test_a_cancel_between_batches_acts_one_batch_later_on_all_ranks(two):
    assert of_all(two, "cancels_between_batches") == [5, 11, 11]


def test_a_cancel_outside_of_batches_acts_at_once_on_all_ranks(ranks):
    ended = of_all(ranks, "cancel_outside_of_batches")
    assert len(ended["rows"]) == 2
    assert ended["ended_by"] == "fit ended by Ends at epoch 1: one rank has seen enough"


# ---- data that differs


def test_loaders_without_a_length_end_together(two):
    assert of_all(two, "streams") == 10


def test_another_number_of_batches_is_an_error_before_training(two):
    text = error_of_all(two, "uneven_lists")
    assert "the same number of training batches, but rank 0 has 6; rank 1 has 5; use a Distr" in text


def test_in_join_of_ddp_ranks_may_have_another_number_of_batches(two):
    a, b = each(two, "uneven_in_join")
    assert (a["n"], b["n"]) == (6, 5)
    assert a["weights"] == b["weights"]


# ---- what is said once, and what must be said by all


def test_callbacks_that_differ_are_an_error_that_says_who_has_what(ranks):
    text = error_of_all(ranks, "callbacks_that_differ")
    assert "rank 0 has ['Recorder', 'Metrics'];" in text
    assert "'EarlyStopping']" in text


def test_a_checkpoint_on_one_rank_only_is_an_error(two):
    assert "'Checkpoint'" in error_of_all(two, "checkpoint_on_main_only")


def test_another_number_of_epochs_is_an_error(two):
    text = error_of_all(two, "epochs_that_differ")
    assert "the same number of epochs, but rank 0 has 1; rank 1 has 2" in text


def test_an_empty_shard_is_an_error_on_all_before_training(ranks):
    *others, empty = outcomes(ranks, "empty_shard")
    assert empty["error"] == "ValueError"
    for other in others:
        assert other["error"] == "RankError"
        assert f"rank {len(others)} raised ValueError" in other["text"]
        assert "the training loader has no batches" in other["text"]


def test_resuming_on_some_ranks_is_an_error(two):
    assert "the same resumed checkpoint" in error_of_all(two, "resume_on_some")


def test_the_table_is_printed_once_and_callbacks_that_only_show_may_be_on_some_ranks(ranks):
    main, *others = each(ranks, "shown_once")
    assert main["printed"] > 0
    assert all(other["printed"] == 0 for other in others)


def test_a_validation_on_one_rank_only_says_who_is_missing(ranks):
    main = outcomes(ranks, LAST)[0]
    missing = "rank 1" if len(ranks) == 2 else "ranks 1, 2, 3"
    assert main["error"] == "RankError"
    assert main["text"] == f"learn.validate must be called on all ranks, but {missing} did not call it"


# ---- files


def test_a_resumed_fit_ends_as_one_that_never_ended(ranks):
    found = each(ranks, "resumed")
    assert all(result["same_weights"] and result["same_losses"] for result in found)
    assert len({result["weights"] for result in found}) == 1
    assert found[0]["losses"] != found[1]["losses"]  # each rank has its own data and random numbers
    assert found[0]["files"][0] == "epoch-0001"


def test_weights_are_saved_once_and_may_be_saved_on_one_rank(two):
    found = each(two, "saved")
    assert found[0]["files"] == ["all.pt", "main.pt"]
    assert all(result["same"] for result in found)


@pytest.mark.parametrize(
    ("name", "ending"), [("sigint", "KeyboardInterrupt()"), ("sigterm", "SystemExit(143)")]
)
def test_a_signal_to_one_rank_ends_all_in_the_same_batch_with_a_file(two, name, ending):
    found = each(two, name)
    assert {result["ending"] for result in found} == {ending}
    assert {result["n"] for result in found} == {found[0]["n"]}
    assert found[0]["files"][-1].startswith("epoch-0002-batch-")


# ---- after which the group is of no use: each in its own processes


def test_ranks_end_at_once_if_one_raises_and_say_what_it_was(tmp_path):
    other, culprit = launched("cases_worker.py", tmp_path / "x", "raises")
    assert culprit["raises"]["error"] == "ValueError"
    assert other["raises"]["error"] == "RankError"
    assert other["raises"]["text"].startswith(
        "rank 1 raised ValueError in Raises.after_pred, epoch 0, batch 2"
    )
    assert "my error; rank 0 was in the backward, epoch 0, batch 2" in other["raises"]["text"]
    assert other["raises"]["seconds"] < TIMEOUT


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_say_what_it_was_also_if_the_one_that_raised_hosted_the_store(tmp_path, world):
    culprit, *others = launched("cases_worker.py", tmp_path / "x", "main_raises", world=world)
    assert culprit["main_raises"]["error"] == "ValueError"
    for other in others:
        assert other["main_raises"]["error"] == "RankError"
        assert other["main_raises"]["text"].startswith("rank 0 raised ValueError in Raises.after_pred")
        assert other["main_raises"]["seconds"] < TIMEOUT


def test_a_rank_that_raised_and_lingers_does_not_hold_the_others(tmp_path):
    other, _ = launched("cases_worker.py", tmp_path / "x", "raises_and_lingers", only=1)
    assert other["exit"] == 1, other["log"]
    assert "hookcb: rank 1 raised ValueError in Raises.after_pred" in other["log"]
    assert "rank 0 was in the backward, epoch 0, batch 2, and ends" in other["log"]


def test_an_undeclared_cancel_of_one_rank_is_an_error_on_all_that_names_the_callback(tmp_path):
    found = launched("cases_worker.py", tmp_path / "x", "undeclared_cancel")
    for rank in found:
        outcome = rank["undeclared_cancel"]
        assert outcome["error"] == "RankError"
        assert "CancelBatchException was raised in CancelsIn.after_loss by rank 1" in outcome["text"]
        assert "must declare may_cancel = {'batch'}" in outcome["text"]


@pytest.mark.slow  # as the code that it tests is that of the one above
def test_a_cancel_of_another_level_than_declared_is_an_error_on_all(tmp_path):
    found = launched("cases_worker.py", tmp_path / "x", "another_level_than_declared")
    for rank in found:
        assert rank["another_level_than_declared"]["error"] == "RankError"
        assert "CancelTrainException was raised" in rank["another_level_than_declared"]["text"]
