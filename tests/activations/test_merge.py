"""Statistics of outputs of several ranks: those of all their samples, the same on each, and no hang."""

import pytest

from tests.ranks.support import launched, shared

OF_FOUR = ["all_samples", "large_outputs", "odd_layers", "fsdp2_and_tensor_parallel"]
OF_TWO = ["arguments_that_differ", "own_schedule", "own_hooks", "cancels", "resumed"]
OF_TWO += ["fsdp2", "tensor_parallel", "tensor_parallel_dtensors", "sequence_parallel", "summands"]
OF_TWO += ["collectives", "changed_in_place", "fsdp1", "fsdp1_flat"]
LAST = "watched"  # on one rank only
WORKER = "activations_worker.py"


def make(names, world):
    def launch(folder):
        return launched(WORKER, folder, ",".join(names), world=world, timeout=90)

    return launch


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return shared(tmp_path_factory, "activations", make([*OF_TWO, LAST], 2))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return shared(tmp_path_factory, "activations-of-4", make(OF_FOUR, 4))


def each(ranks, name):
    """What the case gave on each rank."""
    assert all(name in rank for rank in ranks), ranks[0]["log"][-3000:]
    assert all("result" in rank[name] for rank in ranks), [rank[name] for rank in ranks]
    return [rank[name]["result"] for rank in ranks]


def of_all(ranks, name):
    """The result of the case, which must be that of every rank."""
    found = each(ranks, name)
    assert all(result == found[0] for result in found), found
    return found[0]


def agree(found):
    assert {result["digest"] for result in found} == {found[0]["digest"]}  # to the bit
    assert all(result["names"] == found[0]["names"] for result in found)


def exact(numbers, std=1e-9):
    mean, spread, *others, kurtosis = numbers
    return mean < 1e-12 and spread < std and all(x < 1e-12 for x in others) and kurtosis < 1e-6


# ---- data parallel


@pytest.mark.slow
def test_records_are_those_of_all_samples_even_far_from_zero(four):
    found = each(four, "all_samples")
    agree(found)
    assert all(exact(result["train"]) and result["counted"] and result["report"] for result in found)
    assert all(result["edges"] == found[0]["edges"] for result in found)


@pytest.mark.slow
def test_the_validation_is_merged_if_ranks_have_other_numbers_of_batches(four):
    found = each(four, "all_samples")
    assert all(exact(result["valid"]) for result in found)
    assert {result["n_valid"] for result in found} == {2 * len(four)}  # the last rank has the most


@pytest.mark.slow
def test_outputs_of_which_a_sample_is_kept_have_exact_moments(four):
    mean, std, low, high, size, counted = of_all(four, "large_outputs")
    assert mean < 1e-9
    assert std < 1e-9
    assert (low, high, size) == (0, 0, 0)
    assert counted == 4096 * len(four)


@pytest.mark.slow
def test_layers_that_only_some_ranks_call_are_recorded_on_all(four):
    found = each(four, "odd_layers")
    agree(found)
    for result in found:
        assert exact(result["extra"])
        assert exact(result["once"])
        assert exact(result["twice"])
        assert result["others"] == [True] * 3
        assert result["coverage"] == "3 of 3 layers seen in 4 batches"


@pytest.mark.slow
def test_nan_and_inf_of_any_rank_show_and_an_empty_output_adds_nothing(four):
    for result in each(four, "odd_layers"):
        assert result["nonfinite"] == [len(four) - 1, "inf"]


@pytest.mark.slow
def test_a_record_costs_two_collectives_and_a_fit_four_more(two):
    found = of_all(two, "collectives")
    none, every, second = found["n"]
    assert every - none == 2 * 12 + 4
    assert second - none == 2 * 6 + 4


@pytest.mark.slow
def test_arguments_that_differ_are_an_error_on_all_ranks(two):
    for rank in two:
        assert rank["arguments_that_differ"]["error"] == "RankError"
        assert (
            "all ranks need the same arguments of activation_stats" in rank["arguments_that_differ"]["text"]
        )
        assert "rank 0 has {'every': 1" in rank["arguments_that_differ"]["text"]


@pytest.mark.slow
def test_a_subclass_with_its_own_schedule_records_its_rank_and_says_so(two):
    for result in each(two, "own_schedule"):
        assert result["off"] < 1e-12
        assert result["report"]


@pytest.mark.slow
def test_hooks_of_users_are_of_their_rank(two):
    for result in each(two, "own_hooks"):
        assert result["mean"] == 0
        assert result["doubled"] < 1e-9


@pytest.mark.slow
def test_cancels_of_one_rank_leave_the_same_records_on_all(two):
    train, batch, epoch = of_all(two, "cancels")
    assert train[:2] == [7, 8]
    assert batch[:2] == [8, 8]
    assert epoch[0] == 8


@pytest.mark.slow
def test_a_resumed_fit_has_the_records_of_one_that_never_ended(two):
    found = of_all(two, "resumed")
    assert found["same"]
    assert found["loaded"]


# ---- parts of a layer


def is_as_one_process(found):
    assert found["coverage"] == "7 of 7 layers seen in 3 batches"
    assert found["types"] == ["Embedding", "LayerNorm", "Linear", "ReLU"]
    assert found["left_out"] == {}
    assert all(apart < 2e-6 for apart in found["apart"].values()), found["apart"]
    assert all(apart < 1e-3 for apart in found["counts"].values()), found["counts"]


@pytest.mark.slow
def test_shards_of_parameters_make_no_difference(two):
    is_as_one_process(of_all(two, "fsdp2"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tensor_parallel", "tensor_parallel_dtensors", "sequence_parallel"])
def test_slices_are_merged_and_copies_count_once(two, case):
    is_as_one_process(of_all(two, case))


@pytest.mark.slow
def test_summands_have_no_record_and_the_layer_is_not_seen(two):
    found = of_all(two, "summands")
    assert found["left_out"] == {"w2": "summands of the ranks"}
    first, silent, *_ = found["coverage"].splitlines()
    assert first == "6 of 7 layers seen in 3 batches"
    assert silent == "silent: w2: no statistics of its output: summands of the ranks"
    assert "w2" not in found["names"]


@pytest.mark.slow
def test_an_output_that_changed_before_it_had_arrived_has_no_record(two):
    found = of_all(two, "changed_in_place")
    assert found["n"] == 3
    assert found["left_out"] == {"w2": "changed in place before it had arrived"}
    assert found["names"] == ["emb", "norm", "w1", "act", "post", "head"]


@pytest.mark.slow
def test_slices_and_shards_together_are_merged(four):
    is_as_one_process(of_all(four, OF_FOUR[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fsdp1", "fsdp1_flat"])
def test_flattened_parameters_make_no_difference(two, case):
    is_as_one_process(of_all(two, case))


@pytest.mark.slow
def test_under_watch_a_slice_is_told_as_such(two):
    found, nothing = each(two, "watched")
    assert nothing == {}
    assert found["slices"] == ["act", "w1"]
    assert "slice: w1: of rank 0" in found["coverage"]
    assert "slice: act: probably of rank 0" in found["coverage"]
    assert "numbers are those of rank 0 of 2" in found["report"]
    assert "slices: w1, act" in found["report"]
