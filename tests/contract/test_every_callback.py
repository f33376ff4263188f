"""Every public callback keeps the contract, and the check of it can fail."""

import random
from functools import partial

import pytest
import torch

import hookcb
from hookcb import Callback, check_callback

PUBLIC = [
    thing
    for name in hookcb.__all__
    if isinstance(thing := getattr(hookcb, name), type)
    and issubclass(thing, Callback)
    and thing.__name__ == name  # some have a second name
]


def mean(m, i, o):
    return o.mean()


ARGUMENTS = {
    "HookCallback": {"hook": mean},
    "Compile": {"backend": "eager"},
    "Freeze": {"where": "0"},
    "Log": {"logger": "log.jsonl"},
    "MaxTime": {"seconds": 60},
    "MemoryStats": {"every": 1},
    "ProfilerCallback": {"wait": 0, "warmup": 1, "active": 1, "repeat": 0},
    "Schedule": {"factory": partial(torch.optim.lr_scheduler.StepLR, step_size=3)},
}
# what these are for; the others leave weights and random numbers as they are
ALTERING = {"MixedPrecision", "GradientAccumulation", "GradientClip", "Freeze", "EarlyStopping"}
ALTERING |= {"Schedule", "OneCycle", "WarmupCosine", "ReduceLROnPlateau"}


def test_there_are_callbacks_to_check():
    assert len(PUBLIC) >= 20


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)
def test_a_public_callback_keeps_the_contract(cls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_callback(lambda: cls(**ARGUMENTS.get(cls.__name__, {})), alters_training=cls.__name__ in ALTERING)


class LeavesHooks(Callback):
    def before_fit(self):
        self.model[0].register_forward_hook(mean_none)


def mean_none(m, i, o):
    return None


class LeavesHooksOnError(Callback):
    def before_fit(self):
        self.handle = self.model[0].register_forward_hook(mean_none)

    def after_epoch(self):
        self.handle.remove()


class UsesRandomNumbers(Callback):
    def after_batch(self):
        torch.rand(1)


class UsesPythonsRandomNumbers(Callback):
    def after_batch(self):
        random.random()


class ChangesWeights(Callback):
    def after_step(self):
        with torch.no_grad():
            next(self.model.parameters()).mul_(0.999)


class ChangesGradMode(Callback):
    def after_fit(self):
        torch.set_grad_enabled(False)


class KeepsTheModel(Callback):
    def before_fit(self):
        self.net = self.model


class SwallowsTheLearner(Callback):
    def before_fit(self):
        self.mine = self.learn


class FitsOnce(Callback):
    fitted = False

    def before_fit(self):
        assert not self.fitted
        self.fitted = True


class CannotPickle(Callback):
    def before_fit(self):
        self.function = lambda: None


class CannotBeShown(Callback):
    def __repr__(self):
        return str(1 / 0)


class EndsTheFit(Callback):
    def after_batch(self):
        raise hookcb.CancelFitException


@pytest.mark.parametrize(
    ("cls", "complaint"),
    [
        (LeavesHooks, "hooks on the model"),
        (LeavesHooksOnError, "hooks on the model"),
        (UsesRandomNumbers, "random state of torch"),
        (UsesPythonsRandomNumbers, "random state of Python"),
        (ChangesWeights, "weights"),
        (ChangesGradMode, "grad mode"),
        (KeepsTheModel, "alive"),
        (SwallowsTheLearner, "alive"),
        (FitsOnce, "fitted"),
        (CannotPickle, "pickle"),
        (CannotBeShown, "check_made fails: ZeroDivisionError"),
        (EndsTheFit, "in another way"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_check_finds_what_a_bad_callback_does(cls, complaint):
    try:
        with pytest.raises(AssertionError, match=complaint):
            check_callback(cls)
    finally:
        torch.set_grad_enabled(True)


def test_a_callback_that_is_meant_to_change_the_weights_can_be_checked_too():
    check_callback(ChangesWeights, alters_training=True)
