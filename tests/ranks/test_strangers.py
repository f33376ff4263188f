"""What strangers do with several ranks: it works as in a plain loop, or is an error that says what to do."""

import pytest

from tests.ranks.support import data, launched, shared

pytestmark = pytest.mark.slow  # a launch of two ranks

NUMBERS = ["uneven_stop", "uneven_without_length", "uneven_lr_find", "uneven_validation"]
NUMBERS += [
    "preds_without_sampler",
    "batch_sampler",
    "other_groups",
    "copies",
    "files",
    "checked_on_main_only",
]
ERRORS = {
    "other_rate": "the same learning rate, but rank 0 has 0.1; rank 1 has 0.2",
    "other_optimizer": "the same optimizer, but rank 0 has SGD; rank 1 has Adam",
    "other_loss": "the same loss function, but rank 0 has cross_entropy; rank 1 has multi_margin_loss",
    "other_layer": "the same layer 1, but rank 0 has ReLU; rank 1 has Tanh",
    "other_option": "the same GradientAccumulation(n=…), but rank 0 has 2; rank 1 has 4",
    "other_metrics": "the same metrics, but rank 0 has ['accuracy']; rank 1 has []",
    "no_validation": "the same validation loader, but rank 0 has one; rank 1 has none",
    "checkpoint_of_some": "the same shared folder for checkpoints, but rank 0 has /",
    "checkpoint_unwritable": "the same shared folder for checkpoints, but rank 0 has /",
    "diagnose_on_some": "the same callbacks, but rank 0 has ['Recorder', 'Metrics', 'EarlyStopping']; rank 1",
}
LAST = ["dataset_in_a_worker", "fit_and_validate", "again_after_a_failure", "validate_on_main_inside"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    names = ",".join([*NUMBERS, *ERRORS, *LAST])
    return shared(
        tmp_path_factory, "strangers", lambda folder: launched("strangers_worker.py", folder, names)
    )


def outcomes(ranks, name):
    assert all(name in rank for rank in ranks), ranks[0]["log"][-3000:]
    return [rank[name] for rank in ranks]


def of_all(ranks, name):
    found = outcomes(ranks, name)
    assert all("result" in outcome for outcome in found), found
    assert found[0]["result"] == found[1]["result"]
    return found[0]["result"]


def targets():
    return data(51, 1).tensors[1].tolist()


def test_uneven_ranks_stop_at_the_shortest_with_the_same_rates(ranks):
    found = of_all(ranks, "uneven_stop")
    assert found["n"] == 12
    assert found["lrs"][-1] < 1e-5


def test_loaders_without_a_length_stop_at_the_shortest_and_rank_0_tells_it(ranks):
    found = [outcome["result"] for outcome in outcomes(ranks, "uneven_without_length")]
    assert found == [{"n": 12, "told": True}, {"n": 12, "told": False}]


def test_lr_find_stops_uneven_epochs_at_the_shortest(ranks):
    assert of_all(ranks, "uneven_lr_find")["n"] == 20


@pytest.mark.parametrize("name", ["uneven_validation", "batch_sampler"])
def test_a_validation_is_of_all_samples_each_once(ranks, name):
    found = of_all(ranks, name)
    assert abs(found["difference"]) < 1e-6
    assert found["targets"] == targets()


def test_predictions_of_ranks_with_the_same_samples_are_given_once(ranks):
    assert of_all(ranks, "preds_without_sampler") == targets()


def test_other_groups_of_a_rank_do_not_matter(ranks):
    assert of_all(ranks, "other_groups")


def test_a_copy_of_a_learner_trains_as_it_does(ranks):
    found = of_all(ranks, "copies")
    assert found[0] == found[1]


def test_weights_are_read_with_and_without_the_wrapper(ranks):
    assert len(set(of_all(ranks, "files"))) == 1


def test_one_rank_can_check_the_model_alone(ranks):
    assert of_all(ranks, "checked_on_main_only")


@pytest.mark.parametrize("name", ERRORS)
def test_what_differs_is_an_error_before_training_that_says_who_has_what(ranks, name):
    for outcome in outcomes(ranks, name):
        assert outcome.get("error") == "RankError", outcome
        assert "all ranks need " + ERRORS[name] in outcome["text"]


def test_a_folder_that_ranks_do_not_share_or_cannot_write_to_is_named(ranks):
    for outcome in outcomes(ranks, "checkpoint_of_some"):
        assert outcome["text"].endswith("of-1, which rank 0 does not see")
    for outcome in outcomes(ranks, "checkpoint_unwritable"):
        assert "; rank 1 has /" in outcome["text"]
        assert "below, but NotADirectoryError: " in outcome["text"]


def test_after_an_error_all_ranks_can_train_again(ranks):
    found = [outcome["result"] for outcome in outcomes(ranks, "again_after_a_failure")]
    assert "rank 1 raised ValueError in Raises.before_epoch, epoch 0: mine" in found[0]["text"]
    assert found[0]["weights"] == found[1]["weights"]


def test_the_end_of_a_long_error_is_told(ranks):
    text = outcomes(ranks, "dataset_in_a_worker")[0]["text"]
    assert text.startswith("rank 1 raised ValueError")
    assert "very broken" in text


def test_a_validation_of_one_rank_inside_a_fit_is_an_error(ranks):
    text = outcomes(ranks, "validate_on_main_inside")[0]["text"]
    assert text.startswith("learn.validate at after_epoch, epoch 0")
    assert text.endswith("must be called on all ranks, but rank 1 did not call it")


def test_ranks_that_call_something_else_are_told_what(ranks):
    texts = [outcome["text"] for outcome in outcomes(ranks, "fit_and_validate")]
    assert all("learn.fit" in text and "learn.validate" in text for text in texts)
