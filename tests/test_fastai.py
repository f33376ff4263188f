"""`from hookcb.fastai import *` gives the names of fastai, with its arguments."""

import inspect
import operator

import pytest
import torch

import hookcb
from hookcb import fastai
from hookcb.loops.ported import PUBLIC
from hookcb.testing import check_callback
from tests.support import fit, in_turn, make_learner
from tests.training.support import batches_of, quiet, scripted

# __all__ of callback.hook in fastai 2.8, and names of its other modules
HOOK = [
    "Hook",
    "hook_output",
    "Hooks",
    "hook_outputs",
    "dummy_eval",
    "model_sizes",
    "num_features_model",
    "has_params",
    "HookCallback",
    "total_params",
    "layer_info",
    "module_summary",
    "ActivationStats",
]
OTHERS = [
    "Callback",
    "CancelBackwardException",
    "CancelBatchException",
    "CancelEpochException",
    "CancelFitException",
    "CancelStepException",
    "CancelTrainException",
    "CancelValidException",
    "TerminateOnNaNCallback",
    "EarlyStoppingCallback",
    "SaveModelCallback",
    "ReduceLROnPlateau",
    "GradientAccumulation",
    "GradientClip",
    "MixedPrecision",
    "ChannelsLast",
    "CSVLogger",
    "Learner",
    "Recorder",
    "accuracy",
    "set_seed",
]
WITH_ITS_ARGUMENTS = {
    "EarlyStoppingCallback": "monitor='valid_loss', comp=None, min_delta=0.0, patience=1",
    "SaveModelCallback": "monitor='valid_loss', comp=None, min_delta=0.0, fname='model', every_epoch=False",
    "ReduceLROnPlateau": "monitor='valid_loss', comp=None, min_delta=0.0, patience=1, factor=10.0",
    "GradientAccumulation": "n_acc=32",
    "GradientClip": "max_norm=None, norm_type=2.0",
    "MixedPrecision": "amp_mode='fp16'",
}


def test_a_star_import_gives_all_names():
    found = {}
    exec("from hookcb.fastai import *", found)
    del found["__builtins__"]
    assert sorted(found) == sorted(HOOK + OTHERS) == sorted(fastai.__all__)


def test_they_are_hookcbs_own_unless_their_arguments_differ():
    differ = {name for name in fastai.__all__ if getattr(fastai, name) is not getattr(hookcb, name)}
    assert differ == {"ReduceLROnPlateau", "GradientAccumulation", "MixedPrecision"}
    assert all(issubclass(getattr(fastai, name), getattr(hookcb, name)) for name in differ)
    assert issubclass(hookcb.EarlyStoppingCallback, hookcb.EarlyStopping)
    assert hookcb.TerminateOnNaNCallback is hookcb.TerminateOnNaN


@in_turn("name", WITH_ITS_ARGUMENTS)
def test_arguments_are_those_of_fastai(name):
    params = inspect.signature(getattr(fastai, name)).parameters.values()
    told = ", ".join(str(param.replace(annotation=param.empty)) for param in params)
    assert f"{told}, ".startswith(f"{WITH_ITS_ARGUMENTS[name]}, ")


@pytest.mark.parametrize("cls", [fastai.ReduceLROnPlateau, fastai.GradientAccumulation])
def test_they_keep_the_contract_of_callbacks(cls, monkeypatch):
    monkeypatch.setattr("hookcb.testing.Event", [hookcb.Event.BEFORE_STEP])  # at which fits are ended
    check_callback(cls, alters_training=True)


def test_patience_counts_and_factor_divides_as_in_fastai():
    learn = quiet(batches_of([2]))
    plateau = fastai.ReduceLROnPlateau("score", patience=2, factor=4.0, min_lr=0.02)
    learn.fit(6, 0.1, cbs=[plateau, scripted([1.0, 0.5, 0.5, 0.5, 0.5, 0.5], "score")])
    assert learn.recorder.lrs == pytest.approx([0.1, 0.1, 0.1, 0.025, 0.025, 0.02])
    for wrong in ({"factor": 0.1}, {"patience": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fastai.ReduceLROnPlateau(**wrong)


@in_turn(("comp", "mode"), [(operator.gt, "max"), (operator.lt, "min"), (None, "max"), ("min", "min")])
def test_what_is_better_is_told_by_a_comparison(comp, mode):
    for cls in (fastai.EarlyStoppingCallback, fastai.ReduceLROnPlateau):
        assert cls("score", comp).mode == cls("score", comp=comp).mode == cls("score", mode=comp).mode == mode


def test_early_stopping_takes_the_other_arguments_too():
    learn = quiet(batches_of([2]))
    stop = fastai.EarlyStoppingCallback("score", operator.gt, patience=2, check_finite=True, name="mine")
    learn.fit(6, 0.1, cbs=[stop, scripted([1.0, 2.0, 1.0, 0.5, 3.0, 3.0], "score")])
    assert (len(learn.recorder.rows), learn.mine.best_epoch) == (4, 1)
    with pytest.raises(TypeError, match="no argument 'reset_on_fit'"):
        fastai.EarlyStoppingCallback(reset_on_fit=False)


def test_samples_are_accumulated_not_batches():
    learn, steps = make_learner(), []
    size = len(learn.dls.train[0][0])
    count = hookcb.Callback(after_step=lambda cb: steps.append(cb.iter))
    fit(learn, 1, cbs=[fastai.GradientAccumulation(2 * size), count])
    assert steps == [1, 2]  # the last group is as long as the epoch allows


def test_half_precision_is_fp16_unless_told():
    assert fastai.MixedPrecision().dtype == torch.float16
    assert fastai.MixedPrecision("bf16").dtype == torch.bfloat16
    learn = make_learner().to_bf16()
    assert not [cb for cb in learn.to_fp32().cbs if isinstance(cb, hookcb.MixedPrecision)]


@in_turn("name", ["MixUp", "TrackerCallback", "event", "ModelCheckpoint"])
def test_a_name_that_is_not_here_says_ours(name):
    with pytest.raises(ImportError, match=f"hookcb has no {name}; it has ") as told:
        exec(f"from hookcb.fastai import {name}", {})
    assert PUBLIC[name] in str(told.value)
    with pytest.raises(AttributeError, match=f"fastai' has no attribute '{name}'; hookcb has "):
        getattr(fastai, name)
    assert not hasattr(fastai, name)


def test_other_names_are_wrong_as_ever():
    assert not hasattr(fastai, "nothing_like_it")
    with pytest.raises(ImportError, match="cannot import name 'nothing_like_it'"):
        exec("from hookcb.fastai import nothing_like_it", {})
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        exec("import hookcb.fastai.callback", {})
