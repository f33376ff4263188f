"""Every public callback keeps the contract, and the check of it can fail."""

import math
import random
from functools import partial
from unittest import mock

import pytest
import torch

import hookcb
from hookcb import Callback, check_callback
from tests.support import EVENTS

PUBLIC = [
    thing
    for name in hookcb.__all__
    if isinstance(thing := getattr(hookcb, name), type)
    and issubclass(thing, Callback)
    and thing.__name__ == name  # some have a second name
]


def mean(m, i, o):
    return o.mean()


def backward_mean(m, gi, go):
    return go[0].mean()


def input_mean(m, i):
    return i[0].mean()


ARGUMENTS = {  # for each of these sets of them the contract is looked at
    "GradientHealth": [{}, {"every": 2, "activations": True, "on_nonfinite": "skip"}],
    "HookCallback": [
        {"hook": mean},
        {"hook": mean, "every": 2, "include_paramless": True, "always_call": True},
        {"hook": backward_mean, "is_forward": False, "include_paramless": True, "every": 2, "detach": False},
        {"hook": input_mean, "pre": True},
    ],
    "Checkpoint": [{}, {"every": 2}],
    "Compile": [{"backend": "eager"}],
    "EMA": [{}, {"decay": 0.5, "validate": False}],
    "Freeze": [{"where": "0"}],
    "GradientAccumulation": [{}, {"n": 1}],
    "GradientClip": [{}, {"value": 0.1}, {"max_norm": math.inf}],
    "Log": [{"logger": "log.jsonl"}],
    "MaxTime": [{"seconds": 60}],
    "MemoryStats": [{"every": 1}],
    "MixedPrecision": [{}, {"dtype": "fp16"}],
    "ProfilerCallback": [{"wait": 0, "warmup": 1, "active": 1, "repeat": 0}],
    "SaveModelCallback": [{}, {"every_epoch": True}],
    "Schedule": [
        {"factory": partial(torch.optim.lr_scheduler.StepLR, step_size=3)},
        {"factory": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5), "per": "epoch"},
    ],
}
# what these are for; the others leave weights and random numbers as they are
ALTERING = {
    "MixedPrecision",
    "GradientAccumulation",
    "GradientClip",
    "Freeze",
    "EarlyStopping",
    "EarlyStoppingCallback",
    "SaveModelCallback",
}
ALTERING |= {"Schedule", "OneCycle", "WarmupCosine", "ReduceLROnPlateau"}
IDLE = [{"n": 1}, {"max_norm": math.inf}, {"every_epoch": True}]  # so do those, with these arguments
FEW = ["before_step", "after_validate"]  # of which a public callback gets one
N_PARTS = 8  # likewise, of all events: each event ends fits of half a dozen callbacks


def each_callback(is_first):
    """Parametrizes a test by the callbacks, with the first of their arguments or with the others."""
    return pytest.mark.parametrize(
        ("cls", "options"),
        [
            pytest.param(cls, options, id="-".join([cls.__name__, *options]))
            for cls in PUBLIC
            for i, options in enumerate(ARGUMENTS.get(cls.__name__, [{}]))
            if is_first == (i == 0 or options in IDLE)
        ],
    )


def end_fits_at(events, monkeypatch):
    """Has `check_callback` end fits at these events only, not at each."""
    monkeypatch.setattr(hookcb.testing, "Event", [hookcb.Event(event) for event in events])


@pytest.fixture
def few_endings(monkeypatch):
    end_fits_at(FEW, monkeypatch)


def check(cls, options):
    altering = cls.__name__ in ALTERING and options not in IDLE
    with mock.patch("os.fsync"):  # takes most of the time, and nothing is to be learnt of it
        check_callback(lambda: cls(**options), alters_training=altering)


def test_there_are_callbacks_to_check():
    assert len(PUBLIC) >= 20
    assert {cls.__name__ for cls in PUBLIC} >= {*ARGUMENTS, *ALTERING}


@each_callback(is_first=True)
def test_a_public_callback_keeps_the_contract(cls, options, tmp_path, monkeypatch):
    end_fits_at([FEW[PUBLIC.index(cls) % 2]], monkeypatch)
    monkeypatch.chdir(tmp_path)
    check(cls, options)


@pytest.mark.slow
@each_callback(is_first=False)
def test_a_public_callback_keeps_the_contract_with_other_arguments(
    cls, options, tmp_path, monkeypatch, few_endings
):
    monkeypatch.chdir(tmp_path)
    check(cls, options)


@pytest.mark.slow
@each_callback(is_first=True)
def test_a_public_callback_keeps_the_contract_at_other_events(cls, options, tmp_path, monkeypatch):
    end_fits_at(EVENTS[PUBLIC.index(cls) % N_PARTS :: N_PARTS], monkeypatch)
    monkeypatch.chdir(tmp_path)
    check(cls, options)


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
        (CannotPickle, "check_copies fails.*local object"),
        (CannotBeShown, "check_made fails: ZeroDivisionError"),
        (EndsTheFit, "ends differently"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_check_finds_what_a_bad_callback_does(cls, complaint, few_endings):
    try:
        with pytest.raises(AssertionError, match=complaint):
            check_callback(cls)
    finally:
        torch.set_grad_enabled(True)


def test_a_callback_that_is_meant_to_change_the_weights_can_be_checked_too(few_endings):
    check_callback(ChangesWeights, alters_training=True)
