"""Blocks that are compiled one by one train on two ranks, and are seen if they run whole."""

import pytest

from tests.ranks.support import HAS_FSDP2, launched, shared

pytestmark = [
    pytest.mark.slow,
    # nor does it share a graph between blocks with hooks
    pytest.mark.skipif(not HAS_FSDP2, reason="torch 2.6 has no FSDP2 on CPUs"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return shared(tmp_path_factory, "compiled", lambda folder: launched("compiled_worker.py", folder))


def result(ranks, name):
    assert "result" in ranks[0].get(name, {}), (ranks[0].get(name), ranks[0].get("log", "")[-2000:])
    return ranks[0][name]["result"]


def test_sharded_blocks_share_one_graph_and_are_seen(ranks):
    n_graphs, layers, attention, _ = result(ranks, "fsdp2")
    assert n_graphs == 1
    assert len(layers) == 3 * len(attention) == 27
    assert attention == [str(i) for i in range(9)]


def test_many_blocks_in_tensor_parallelism_train_and_what_is_not_seen_is_said(ranks):
    _, layers, _, gaps = result(ranks, "tensor_parallel")
    assert layers == []
    assert "attn.logits" in gaps
