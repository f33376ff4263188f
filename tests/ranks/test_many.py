"""Ranks and Votes with many ranks, as threads; and what they cost 1,024 ranks."""

import pytest

from tests.ranks.support import launched, shared


@pytest.fixture(params=[8, 64, pytest.param(256, marks=pytest.mark.slow)])
def threads(request, tmp_path_factory):
    def make(folder):
        return launched("threads_worker.py", folder, request.param, world=1)[0]

    found = shared(tmp_path_factory, f"threads-{request.param}", make)
    assert str(request.param) in found, found["log"][-2000:]
    ranks = found[str(request.param)]
    assert [rank.get("error") for rank in ranks] == [None] * request.param
    return ranks


def test_numbers_and_objects_are_merged(threads):
    for rank in threads:
        assert [name for name, is_right in rank["merged"].items() if not is_right] == []


def test_what_differs_is_said_on_all_ranks(threads):
    assert {rank["differ"] for rank in threads} == {threads[0]["differ"]}
    assert threads[0]["differ"].startswith("all ranks need the same colour, but ranks 0, 1, 2, 3")
    assert threads[0]["differ"].endswith("have red; rank 5 has blue")


def test_all_ranks_decide_the_same_one_batch_after_the_first_who_asked(threads):
    for decisions in zip(*(rank["decided"] for rank in threads), strict=True):
        assert all(decision == decisions[0] for decision in decisions)
        batch, cancel, _, asked, levels = decisions[0]
        assert batch == asked + 1
        assert cancel in levels


def test_a_signal_of_one_rank_is_known_to_all(threads):
    assert [decision[2] for decision in threads[0]["decided"]] == [0, 15, 0, 15, 0, 15]


def test_a_cancel_outside_of_batches_acts_at_once_on_all(threads):
    assert all(rank["outside"] == ["CancelEpochException"] for rank in threads)


# ---- the cost of 1,024 ranks, in 2 epochs of 6 batches, on a group whose other ranks do not exist

VOTE = 40  # bytes
FREE = {"ChannelsLast", "DetectAnomaly", "GradientClip", "HookCallback", "Log"}
FREE |= {"Progress", "ReduceLROnPlateau", "SamplingCallback", "Schedule"}


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    def make(folder):
        return launched("fake_worker.py", folder, 1024, world=1)[0]

    found = shared(tmp_path_factory, "costs", make)
    assert "ddp" in found, found["log"][-2000:]
    return found


def own(cost):
    """Collectives outside of the model's group, which are those of hookcb."""
    return [op for op in cost["ops"] if not op.endswith(" 0")]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_step_costs_a_vote(costs, how):
    ops = own(costs[how]["none"])
    n_votes = sum("float32[10]" in op for op in ops)
    assert 12 <= n_votes <= 12 + 2 * 7  # in each step, and at the events of each epoch
    assert len(ops) - n_votes <= 4 + 2 * 8  # before the fit, and in each epoch
    assert not any("uint8" in op for op in ops)  # no object is sent


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_most_callbacks_communicate_nothing(costs, how):
    none, found = costs[how]["none"], costs[how]
    assert {name for name in FREE if found[name]["ops"] != none["ops"]} == set()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_schedule_over_all_steps_agrees_on_their_number_once(costs, how):
    none = costs[how]["none"]
    for name in ("OneCycle", "WarmupCosine"):
        assert costs[how][name]["n"] - none["n"] == 1
        assert costs[how][name]["bytes"] - none["bytes"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_callback_that_may_cancel_a_batch_costs_one_more_vote_in_each(costs, how):
    none, found = costs[how]["none"], costs[how]["TerminateOnNaN"]
    assert found["n"] - none["n"] == 12
    assert found["bytes"] - none["bytes"] == 12 * VOTE


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_activations_cost_two_reductions_a_record_and_a_fit_four_more(costs, how):
    none, found = costs[how]["none"], costs[how]["ActivationStats"]
    assert found["n"] - none["n"] == 2 * 12 + 4
    assert found["bytes"] - none["bytes"] < 12 * 2 * (8 + 2 + 1) * 8 * 2  # of two layers


@pytest.mark.slow
def test_accumulation_reduces_gradients_once_a_group(costs):
    def n_reduced(cost):
        return sum("float32[58] 0" in op for op in cost["ops"])

    assert n_reduced(costs["ddp"]["none"]) == 12
    assert n_reduced(costs["ddp"]["GradientAccumulation"]) == 6
