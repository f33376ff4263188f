"""Spikes of two ranks are told once, with the ranks that saw them; tokens of both count together."""

import pytest

from tests.ranks.support import launched, shared

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return shared(
        tmp_path_factory, "spikes", lambda folder: launched("spikes_worker.py", folder, timeout=120)
    )


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("one_rank_has_the_batch_in_ddp", [1]),
        ("one_rank_has_the_batch_in_a_learner", [1]),
        ("one_rank_has_the_batch_in_fsdp2", [1]),
        ("all_ranks_share_the_batch_in_tensor_parallelism", []),  # which train as one
    ],
)
def test_the_rank_with_the_damaged_batch_is_named(ranks, name, on):
    assert "result" in ranks[0].get(name, {}), (ranks[0].get(name), ranks[0].get("log", "")[-2000:])
    (spike,) = [found for found in ranks[0][name]["result"] if found[1] <= 60 <= found[1] + 1]
    severity, step, of, message = spike
    assert (severity, step) == ("info", 60)
    assert of == on
    assert "this batch" in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one_rank_has_other_data_in_ddp", "the inputs of the batches of rank 1 from step 60 on are unlike"),
        (
            "one_rank_has_other_data_in_fsdp2",
            "the inputs of the batches of rank 1 from step 60 on are unlike",
        ),
        ("one_rank_has_other_labels_in_a_learner", "it is in the data of rank 1, or in what else is its own"),
    ],
)
def test_the_rank_whose_data_change_for_good_is_named_and_no_weights(ranks, name, words):
    assert "result" in ranks[0].get(name, {}), (ranks[0].get(name), ranks[0].get("log", "")[-2000:])
    assert ranks[0][name]["result"] == ranks[1][name]["result"]
    ((_, step, of, message),) = ranks[0][name]["result"]
    assert (step, of) == (60, [1])
    assert words in message


def test_experts_that_another_rank_uses_are_not_dead(ranks):
    (found,) = [x for x in ranks[0]["each_rank_uses_two_of_five_experts"]["result"] if x[0] == "moe.dead"]
    _, layer, of, message = found
    assert layer in ("", "module")
    assert of == []
    assert "1 of the 5 experts" in message
    assert message.endswith("(limit 0): expert 4.")
