"""Sharded and replicated models in several processes: gradients, averages, NaN, names."""

from pathlib import Path

import pytest
import torch

from tests.support import run_ranks

pytestmark = pytest.mark.slow  # launches of two and of four ranks
WORKER = Path(__file__).with_name("shards_worker.py")
ACCURACY = 1e-6


def load(files):
    return [torch.load(f, weights_only=False) for f in files]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return load(run_ranks(WORKER, tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return [
        torch.load(f, weights_only=False) for f in run_ranks(WORKER, tmp_path_factory.mktemp("four"), n=4)
    ]


def part(ranks, name):
    for results in ranks:
        for result in results.values():
            if isinstance(result, str):
                pytest.fail(result)
    return [results[name] for results in ranks]


def assert_accurate(ranks, name):
    for errors in part(ranks, name):
        assert {stat: error for stat, error in errors.items() if error > ACCURACY} == {}


@pytest.mark.parametrize("name", ["fsdp_gradients", "tp_gradients", "sequence_parallel_gradients"])
def test_statistics_of_shards_are_those_of_whole_gradients(two, name):
    assert_accurate(two, name)


@pytest.mark.parametrize("name", ["gradients_of_four", "hybrid_gradients", "mixed_gradients"])
def test_replicas_count_once_and_empty_parts_count_nothing(four, name):
    assert_accurate(four, name)


def test_each_record_takes_two_reductions(two):
    for of_all, of_one in part(two, "reductions"):
        assert of_all - of_one == 2 * 7


def test_all_ranks_drop_a_step_with_a_bad_gradient_on_one(two):
    for skipped, first_bad, error in part(two, "bad_gradients"):
        assert skipped == 1
        assert first_bad == {"0.weight": (3, 1)}
        assert error.startswith(
            "the gradient of '0.weight' has 1 NaN or infinite element at epoch 0, batch 3"
        )


@pytest.mark.parametrize("name", ["watched_on_one", "watched_when_gathered"])
def test_a_watch_on_one_rank_communicates_nothing_and_says_whose_numbers_it_has(two, name):
    (n, shard, coverage, report, error, without_grad), (n_without, *_) = part(two, name)
    assert n == n_without
    assert shard == "the shard of rank 0"
    assert "numbers are those of the shard of rank 0" in " ".join(report.split())
    assert "numbers are those of rank 0 of 2, from its batches and its shards of the parameters" in coverage
    assert error < 1e-5
    assert without_grad == []


def test_a_watch_refuses_decisions_about_shards(two):
    for (error,) in part(two, "refused_to_watch"):
        assert error.startswith("with on_nonfinite='skip' all ranks of a sharded model must decide together")


def test_averages_of_shards_are_those_of_one_process(two):
    for found in part(two, "averaged"):
        assert max(found["trained"], found["averages"], found["loss"]) < 1e-6
        assert found["after"] == found["collectives"] == 0
        assert found["refusal"].endswith("in a block: with ema.applied(model):")


def test_half_precision_on_shards_skips_the_same_steps_as_one_process(two):
    for rows in part(two, "half_precision"):
        assert [row[:3] for row in rows] == [(0, 0, 0), (8, 8, 8), (0, 0, 0)]
        assert max(row[3] for row in rows) < 0.01


def test_a_forward_before_the_fit_changes_nothing(two):
    assert part(two, "forward_before_fit") == [0, 0]
    assert part(two, "only_the_root") == [2, 2]


@pytest.mark.parametrize("name", ["old_fsdp", "flat_fsdp"])
def test_flattened_parameters_are_read_whole(two, name):
    layers = ["0", "2", "4", "5", "6"]
    for found in part(two, name):
        flat = ["_flat_param", "0._flat_param"]
        expected = [f"{x}.{p}" for x in layers for p in ("weight", "bias")] if name == "old_fsdp" else flat
        assert found["names"] == expected
        assert found["layers"] == layers
        assert found["without_grad"] == []
        assert found["error"] < 1e-5
        assert found["loss"] < 1e-6


def test_names_have_no_wrappers(two):
    for params, layers in part(two, "wrapped_names"):
        assert layers == ["0", "2", "4", "5", "6"]
        assert params == [f"{x}.{p}" for x in layers for p in ("weight", "bias")]


@pytest.mark.parametrize("name", [f"traced_under_{kind}" for kind in ("ddp", "fsdp", "tp", "old_fsdp")])
def test_all_ranks_end_with_the_report_of_the_rank_that_made_the_nan(two, name):
    for rank, rows in enumerate(part(two, name)):
        assert [row[1] for row in rows] == [1, 1, 1]
        assert [row[2] for row in rows] == ["", "log", "SqrtBackward0"]
        assert [row[3] for row in rows] == [2, 2, 2]
        assert [row[4] for row in rows] == [int(rank == 0)] * 3
        batch, forward, backward = (row[0] for row in rows)
        assert batch == "loss is nan at epoch 0, batch 2 on rank 1: it is in the batch"
        assert "on rank 1: made in the forward of layer 3 (LogHere) by log at " in forward
        assert backward.startswith("gradient of 0.weight and ")
        assert "on rank 1: made in the backward of layer 3 (RootHere) by SqrtBackward0 at " in backward


def test_a_nan_on_one_rank_ends_all(two):
    reason = "loss is nan at epoch 0, batch 2"
    assert part(two, "ended") == [(2, None), (2, reason)]


def test_what_all_ranks_decide_goes_with_what_one_declares(two):
    assert part(two, "traced_and_skipped") == [(2, 1)] * 2


def test_the_rank_that_found_it_writes_the_bundle(two):
    assert part(two, "bundled") == [(1, "SqrtBackward0")] * 2


def test_an_overflow_of_a_scaler_is_no_finding(two):
    assert part(two, "overflowed") == [(None, 8)] * 2


def test_a_declared_cancel_skips_the_batch_on_all_ranks(two):
    for rank, rows in enumerate(part(two, "skipped_batches")):
        assert rows == [(2 * rank, 6, 0.0)] * 2
