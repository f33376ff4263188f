"""A spike of the loss on two ranks is told once, with the ranks that saw it."""

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
