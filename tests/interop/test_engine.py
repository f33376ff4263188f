"""An Accelerator as the engine: two processes train as one does, and one trains as without it."""

import warnings

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState

from hookcb import Callback, Distributed, GradientAccumulation, MixedPrecision
from tests.interop.engine_worker import accelerator, accumulated_alone, counted, dtypes, engine
from tests.ranks.support import launched, shared
from tests.training.distributed_worker import learner, quiet_fit, reference, rows, weights

CASES = ["ddp", "fsdp2", "accumulated", "accumulated_fsdp2", "frozen", "bf16", "beside"]
CASES += ["resumed", "saved", "lr_find", "raises"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    worker = "../interop/engine_worker.py"
    return shared(
        tmp_path_factory, "engine", lambda folder: launched(worker, folder, ",".join(CASES), timeout=120)
    )


@pytest.fixture(autouse=True)
def leave_no_settings():
    yield
    AcceleratorState._reset_state()
    GradientState._reset_state()


def of_all(ranks, name):
    """The result of a case, which must be that of both ranks."""
    found = [rank.get(name, rank) for rank in ranks]
    assert all("result" in outcome for outcome in found), found
    assert found[0]["result"] == found[1]["result"]
    return found[0]["result"]


def assert_close(found, wanted):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-6, rtol=0)


def assert_same_training(found, wanted):
    assert_close(found["rows"], wanted["rows"])
    for mine, theirs in zip(found["weights"], wanted["weights"], strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_train_as_one_with_their_batches(ranks, name):
    found, alone = of_all(ranks, name), reference()
    assert_same_training(found, alone)
    assert_close(found["preds"], alone["preds"])
    assert_close(found["validated"], found["rows"][-1][1:])
    assert (found["same_targets"], found["n_preds_other"], found["world"]) == (True, 51, 2)


def test_the_model_is_unwrapped_and_not_kept(ranks):
    found = of_all(ranks, "ddp")
    assert found["inside"] == ["DistributedDataParallel"]
    assert (found["is_own"], found["same"], found["kept"]) == (True, True, 0)


def test_shards_stay(ranks):
    assert of_all(ranks, "fsdp2")["kinds"] == ["DTensor"] * 4


@pytest.mark.parametrize("name", ["accumulated", "accumulated_fsdp2"])
def test_its_accumulation_is_that_of_one_process(ranks, name):
    found, alone = of_all(ranks, name), accumulated_alone()
    assert found["steps"] == alone["steps"] == [3, 5, 3, 5]
    assert_same_training(found, alone)


def test_the_model_is_wrapped_once_its_parameters_are_frozen(ranks):
    assert of_all(ranks, "frozen") == [True, True, False, False]


def test_its_precision_counts_as_long_as_it_trains(ranks):
    found = of_all(ranks, "bf16")
    assert found["inside"] == ["torch.bfloat16", "torch.float32"]
    assert found["outside"] == ["torch.float32", "torch.float32"]


def test_callbacks_see_and_change_gradients_as_without_it(ranks):
    with_engine, without = of_all(ranks, "beside")
    assert with_engine == without
    assert len(with_engine[2]) == 12  # norms of gradients, all of which were clipped
    assert min(with_engine[2]) > 1e-3


def test_a_training_resumes_within_a_group_of_batches(ranks):
    found = of_all(ranks, "resumed")
    assert found["names"] == ["epoch-0001", "epoch-0002-batch-000003"]  # ranks agree one batch later
    assert found["same"]
    assert found["same_losses"]


def test_saved_weights_are_read_with_it_and_without(ranks):
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert of_all(ranks, "saved") == {"names": names, "alone": True, "ddp": True, "fsdp2": True}


def test_lr_find_is_that_of_distributed_data_parallel(ranks):
    without, with_engine = of_all(ranks, "lr_find")
    assert with_engine == without
    assert len(without) == 10


def test_an_exception_undoes_it_on_all(ranks):
    first, second = (rank["raises"]["result"] for rank in ranks)
    assert [first["restored"], second["restored"]] == [True, True]
    assert first["text"].startswith("RankError: rank 1 raised ValueError in Fails.after_train")
    assert second["text"] == "ValueError: planted"


# ---- alone


def test_a_process_alone_trains_as_without_it():
    plain, own = quiet_fit(learner(shuffle=True), 2), quiet_fit(learner([engine()], shuffle=True), 2)
    assert rows(plain) == rows(own)
    assert weights(plain.model) == weights(own.model)
    assert list(plain.validate()) == list(own.validate())
    assert torch.equal(plain.get_preds()[0], own.get_preds()[0])
    assert vars(own.model).keys() == vars(plain.model).keys()
    assert not torch.distributed.is_initialized()


def test_layers_may_thaw_in_the_middle_of_an_epoch_of_one_process():
    found = []
    for cbs in ([], [engine()]):
        thaws = Callback(before_batch=lambda cb: cb.learn.model.requires_grad_())
        learn = learner([*cbs, thaws])
        learn.model[0].requires_grad_(False)
        found.append(weights(quiet_fit(learn, 1).model))
    assert found[0] == found[1]


def test_its_accumulation_alone_is_gradient_accumulation():
    learn = learner([engine(gradient_accumulation_steps=4)])
    assert counted(learn) == counted(learner([GradientAccumulation(4)]))
    assert not any(isinstance(cb, GradientAccumulation) for cb in learn.cbs)


def test_its_precision_alone_counts_as_long_as_it_trains():
    learn = learner([engine(mixed_precision="bf16")])
    assert dtypes(learn) == ["torch.bfloat16", "torch.float32"]
    assert learn.model[0](torch.zeros(1, 4)).dtype is torch.float32
    assert "forward" not in vars(learn.model)


def test_its_own_backward_is_called():
    given, calls = accelerator(), []
    backward = given.backward
    given.backward = lambda loss: (calls.append(given.gradient_accumulation_steps), backward(loss))
    quiet_fit(learner([Distributed(engine=given)]), 1)
    assert calls == [1] * 12


# ---- what it does not do


@pytest.mark.parametrize(
    ("cb", "text"),
    [
        (MixedPrecision(), "leave it out, and give Accelerator(mixed_precision='bf16')"),
        (GradientAccumulation(), "leave it out, and give Accelerator(gradient_accumulation_steps=…)"),
    ],
)
def test_callbacks_that_do_the_same_are_refused(cb, text):
    learn = learner([engine()])
    with pytest.raises(ValueError, match="cannot be used beside engine=") as caught:
        quiet_fit(learn, 1, cbs=cb)
    assert text in str(caught.value)
    quiet_fit(learn, 1)  # nothing is left of it


def test_another_device_is_refused():
    learn = learner([engine()])
    learn.device = torch.device("meta")
    with pytest.raises(
        ValueError, match="the Learner has device='meta', but the Accelerator trains on 'cpu'"
    ):
        quiet_fit(learn, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dynamo_backend": "eager"}, "leave it out, and add Compile()"),
        ({"dataloader_config": DataLoaderConfiguration(split_batches=True)}, "the batch size of one"),
    ],
)
def test_settings_that_the_learner_has_are_refused(options, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = accelerator(**options)
    with pytest.raises(ValueError, match="which cannot be used as engine") as caught:
        Distributed(engine=given)
    assert text in str(caught.value)


def test_a_class_is_not_an_engine():
    with pytest.raises(TypeError, match=r"as in engine=Accelerator\(\), got <class"):
        Distributed(engine=Accelerator)
