"""Two processes train as one does that has their batches; alone, nothing changes."""

import pytest
import torch
from torch import nn

from hookcb import Distributed, watch
from tests.ranks.support import launched, shared
from tests.support import in_turn
from tests.training.distributed_worker import learner, quiet_fit, reference, rows, weights

CASES = ["ddp", "ddp_in_fit", "fsdp2", "fsdp2_on_mesh", "tensor_parallel", "prepared_ddp"]
CASES += ["seeds_that_differ", "shuffled", "frozen", "lr_find", "not_divided", "optimizer_object"]
CASES += ["prepared_wrongly", "batch_norm", "saved", "raises_in_fit", "thawed_in_training"]
CASES += ["frozen_on_one"]
# after which ranks have not come equally far
LAST = ["fails_while_wrapping", "validate_on_main_only", "summary_on_main_only"]
WORKER = "../training/distributed_worker.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return shared(
        tmp_path_factory, "distributed", lambda folder: launched(WORKER, folder, ",".join([*CASES, *LAST]))
    )


@pytest.fixture(scope="module")
def alone():
    return reference()


def of_all(ranks, name):
    """The result of a case, which must be that of both ranks."""
    found = [rank.get(name, rank) for rank in ranks]
    assert all("result" in outcome for outcome in found), found
    assert found[0]["result"] == found[1]["result"]
    return found[0]["result"]


def assert_close(found, wanted, atol=1e-6):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp2_on_mesh", "prepared_ddp"])
def test_two_processes_train_as_one_with_their_batches(ranks, alone, name):
    found = of_all(ranks, name)
    assert_close(found["rows"], alone["rows"])
    for mine, theirs in zip(found["weights"], alone["weights"], strict=True):
        assert_close(mine, theirs)
    assert_close(found["preds"], alone["preds"])


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "prepared_ddp"])
def test_uses_outside_of_a_fit_have_all_samples_once(ranks, name):
    found = of_all(ranks, name)
    assert found["same_targets"]
    assert_close(found["validated"], found["rows"][-1][1:])
    assert_close(found["validated_other"], found["rows"][-1][1:])
    assert found["n_preds_other"] == 51
    assert found["is_own"]
    assert found["world"] == 2


def test_processes_of_tensor_parallelism_get_the_same_samples(ranks):
    found, learn = of_all(ranks, "tensor_parallel"), quiet_fit(learner(), 2)
    assert found["calls"] == [2]
    assert_close(found["rows"], rows(learn))
    for mine, theirs in zip(found["weights"], weights(learn.model), strict=True):
        assert_close(mine, theirs)


def test_it_can_be_given_to_a_fit(ranks):
    assert of_all(ranks, "ddp_in_fit") == {key: of_all(ranks, "ddp")[key] for key in ("rows", "weights")}


def test_all_begin_with_the_weights_of_rank_0(ranks):
    of_all(ranks, "seeds_that_differ")


def test_training_is_shuffled_by_epoch_and_divided(ranks):
    first, second = (rank["shuffled"]["result"]["orders"] for rank in ranks)
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(48))
    assert first[0] != first[1]
    assert ranks[0]["shuffled"]["result"]["own"] == "RandomSampler"


def test_the_model_is_wrapped_once_its_parameters_are_frozen(ranks):
    assert of_all(ranks, "frozen")["same"]


def test_layers_that_thaw_in_the_middle_of_an_epoch_are_an_error(ranks):
    for rank in ranks:
        assert rank["thawed_in_training"]["error"] == "RuntimeError"
        assert "do it in before_fit or before_epoch" in rank["thawed_in_training"]["text"]


def test_all_ranks_freeze_the_same_layers(ranks):
    for rank in ranks:
        text = "rank 0 has 0.weight, 0.bias; rank 1 has 2.weight, 2.bias"
        assert rank["frozen_on_one"]["text"] == f"all ranks need the same frozen parameters, but {text}"


def test_a_rank_without_samples_to_validate_keeps_the_others_going(ranks):
    found = of_all(ranks, "batch_norm")
    assert_close(found["validated"], found["rows"][-1][1:])


def test_lr_find_is_that_of_all_and_leaves_nothing(ranks):
    found = of_all(ranks, "lr_find")
    assert (found["same"], found["model"], len(found["losses"])) == (True, "Sequential", 20)


def test_loaders_that_are_not_divided_are_named_once(ranks):
    first, second = (rank["not_divided"]["result"] for rank in ranks)
    assert (len(first), second) == (1, [])
    assert "training loader, as it has the sampler WeightedRandomSampler" in first[0]
    assert "validation loader, as it is a list" in first[0]


def test_an_optimizer_of_the_whole_model_cannot_train_shards(ranks):
    for rank in ranks:
        assert rank["optimizer_object"]["error"] == "TypeError"
        assert "give its class, or a function, opt_func=SGD" in rank["optimizer_object"]["text"]


def test_what_prepare_must_make_is_said(ranks):
    assert "it returned Sequential" in ranks[0]["prepared_wrongly"]["text"]


def test_an_exception_undoes_it_on_all(ranks):
    first, second = (rank["raises_in_fit"]["result"] for rank in ranks)
    assert [first["restored"], second["restored"]] == [True, True]
    assert first["text"].startswith("RankError: rank 1 raised ValueError in Fails.after_train")
    assert second["text"] == "ValueError: planted"


def test_the_group_is_closed_at_the_end(ranks):
    assert [rank["exit"] for rank in ranks] == [0, 0], ranks[0]["log"][-2000:]
    assert "destroy_process_group" not in ranks[0]["log"]


def test_saved_weights_are_read_in_any_mode(ranks):
    found = of_all(ranks, "saved")
    assert found.pop("names") == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert len(found) == 6
    assert max(found.values()) < 1e-6, found


def test_no_process_waits_for_one_that_fails_or_does_not_come(ranks):
    first, second = (rank["fails_while_wrapping"] for rank in ranks)
    assert (first["error"], second["error"]) == ("RankError", "ValueError")
    assert "rank 1 raised ValueError wrapping the model: planted" in first["text"]
    for name in ("summary", "validate"):
        text = f"learn.{name} must be called on all ranks, but rank 1 did not call it"
        assert ranks[0][f"{name}_on_main_only"]["text"] == text


# ---- alone


@pytest.mark.parametrize("options", [{}, {"mode": "fsdp2"}, {"prepare": print, "mesh": {"tp": 2}}])
def test_a_process_alone_trains_as_without_it(options):
    plain, own = (
        quiet_fit(learner(shuffle=True), 2),
        quiet_fit(learner([Distributed(**options)], shuffle=True), 2),
    )
    assert rows(plain) == rows(own)
    assert weights(plain.model) == weights(own.model)
    assert list(plain.validate()) == list(own.validate())
    assert not torch.distributed.is_initialized()


# ---- arguments


@in_turn(
    ("error", "text", "mode", "options"),
    [
        (ValueError, "mode must be 'ddp' or 'fsdp2', got 'fsdp'", "fsdp", {}),
        (ValueError, "shard needs 'fsdp2'", "ddp", {"shard": nn.Linear}),
        (ValueError, "mesh needs 'fsdp2' or prepare=", "ddp", {"mesh": {"dp": 2}}),
        (ValueError, "mesh must have sizes by name", "fsdp2", {"mesh": {"dp": 0}}),
        (TypeError, "mesh must be a DeviceMesh", "fsdp2", {"mesh": 2}),
        (TypeError, "prepare must be a function", "ddp", {"prepare": 3}),
        (ValueError, "mode='fsdp2' is not used if there is prepare=", "fsdp2", {"prepare": print}),
        (ValueError, "static_graph is not used", "ddp", {"prepare": print, "static_graph": True}),
        (TypeError, "did you mean 'find_unused_parameters'", "ddp", {"find_unused_params": True}),
        (TypeError, "did you mean 'reshard_after_forward'", "fsdp2", {"reshard_after_fwd": True}),
    ],
)
def test_wrong_arguments_say_what_is_possible(error, text, mode, options):
    with pytest.raises(error, match=text):
        Distributed(mode, **options)


def test_a_watch_refuses_it():
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="wrap the model before you watch it"):
        watch(model, opt, Distributed())
