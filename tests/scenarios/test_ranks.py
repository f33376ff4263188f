"""Hooks and readings of gradients in two processes."""

from pathlib import Path

import pytest
import torch

from tests.support import run_ranks

pytestmark = pytest.mark.slow  # a launch of two ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    files = run_ranks(Path(__file__).with_name("ranks_worker.py"), folder)
    return [torch.load(f, weights_only=False) for f in files]


def part(ranks, name):
    for results in ranks:
        if isinstance(results.get(name), str):
            pytest.fail(results[name])
    return [results[name] for results in ranks]


def test_gathered_outputs_are_those_of_all_ranks_along_the_first_dimension(ranks):
    for r in part(ranks, "gathered"):
        for got in (r["hooks"], r["again"]):
            assert [tuple(o.shape) for o in got] == [(5, 3), (5, 3)]
            assert all(torch.allclose(o, e) for o, e in zip(got, r["expected"], strict=True))


def test_all_ranks_gather_the_same(ranks):
    a, b = part(ranks, "gathered")
    assert all(torch.equal(x, y) for x, y in zip(a["hooks"], b["hooks"], strict=True))
    assert torch.equal(a["zero_d"], b["zero_d"])


def test_nested_results_are_gathered_item_by_item(ranks):
    for r in part(ranks, "gathered"):
        o, d, *_ = r["nested"]
        assert torch.allclose(o, r["expected"][0])
        assert d["n"].shape == (5, 2)


def test_single_numbers_of_the_ranks_are_stacked(ranks):
    for r in part(ranks, "gathered"):
        assert r["zero_d"].shape == (2,)
        assert torch.allclose(r["zero_d"].sum(), r["expected"][0].sum())


def test_gradients_and_other_dtypes_are_gathered(ranks):
    for r in part(ranks, "gathered"):
        assert torch.allclose(r["grad"], 1 - r["expected"][1] ** 2, atol=1e-6)
        assert r["bfloat16"].dtype is torch.bfloat16
        assert r["bfloat16"].shape == (5, 3)


def test_a_hook_that_never_fired_gathers_nothing(ranks):
    for r in part(ranks, "gathered"):
        assert r["before_any_call"] is None or set(r["before_any_call"]) == {None}


def test_without_gather_each_rank_has_its_own(ranks):
    a, b = part(ranks, "gathered")
    assert (a["own"].shape, b["own"].shape) == ((2, 3), (3, 3))


def test_distributed_tensors_are_seen_as_they_are(ranks):
    for r in part(ranks, "with_dtensors"):
        assert r == {"is_dtensor": True, "out": True, "grad": True, "both": True}


def test_a_distributed_data_parallel_model_is_watched(ranks):
    a, b = part(ranks, "under_ddp")
    for r in (a, b):
        assert [n.removeprefix("module.") for n in r["forward"]] == ["0", "2"]
        assert [n.removeprefix("module.") for n in r["back"]] == ["0", "2"]
        assert r["left"] == 0
    assert all(torch.equal(x, y) for x, y in zip(a["weights"], b["weights"], strict=True))


def test_of_the_gradient_of_a_dtensor_the_whole_is_read(ranks):
    assert part(ranks, "gradients_of_dtensors") == [True, True]
