"""What number is watched, and when it is better, for EarlyStopping and ReduceLROnPlateau alike."""

import copy
import math
import pickle

import pytest
import torch

from hookcb import Callback, EarlyStopping, ReduceLROnPlateau
from hookcb.training.monitor import improves, monitored, resolve_mode
from tests.support import CANCELS, in_turn, make_learner, same, spy, weights
from tests.training.support import (
    NESTED_AT,
    Unsized,
    Wide,
    batches_of,
    equal,
    momentum,
    quiet,
    rates,
    scripted,
    seeded,
    validating,
)


def test_modes_follow_from_names():
    assert [resolve_mode(m) for m in ("valid_loss", "error_rate", "accuracy")] == ["min", "min", "max"]
    assert resolve_mode("perplexity", "min") == "min"


def test_nan_never_improves_and_the_first_number_does():
    assert not improves(math.nan, None, "min")
    assert not improves(math.nan, 1.0, "max")
    assert improves(1.0, None, "min")
    assert improves(1.0, math.nan, "max")
    assert not improves(0.9, 1.0, "min", 0.1)
    assert improves(0.89, 1.0, "min", 0.1)


def test_a_value_in_a_tensor_is_read_as_a_number():
    learn = make_learner()
    learn.row = {"valid_loss": torch.tensor(2.0)}
    assert monitored(learn, "valid_loss") == 2.0


MAKES = [lambda **k: EarlyStopping(patience=2, **k), lambda **k: ReduceLROnPlateau(patience=1, **k)]


def accuracy(pred, y):
    return (pred - y).abs().mean()


def error_rate(pred, y):
    return (pred - y).abs().mean()


@pytest.mark.parametrize(
    ("column", "falls"), [("valid_loss", True), ("error_rate", True), ("accuracy", False)]
)
def test_the_mode_follows_from_the_name(column, falls):
    """A number that falls all the time is an improvement of a loss or an error only."""
    learn = quiet(batches_of([2]), batches_of([2]), metrics=[accuracy, error_rate], lr=1e-9)

    def put(cb):
        cb.learn.row[column] = 1.0 / (1 + cb.epoch)

    learn.fit(5, cbs=[EarlyStopping(column), Callback(name="put", after_epoch=put)])
    assert len(learn.recorder.rows) == (5 if falls else 2)


@in_turn("make", MAKES)
@in_turn("level", ["train", "epoch", "validate"])
def test_an_epoch_without_the_number_ends_no_fit(make, level):
    plan = {(f"before_{level}", k): CANCELS[level]() for k in (0, 2)}
    learn, log = quiet(batches_of([3, 2]), batches_of([2])), []
    learn.fit(4, cbs=[make(), spy(log, "a", plan)])
    assert log.count(("a", "after_epoch")) >= 3


@pytest.mark.parametrize("make", MAKES)
def test_a_validation_inside_is_no_epoch(make):
    def run(*cbs):
        seeded()
        learn = quiet(Unsized(batches_of([3, 2])), batches_of([2]), Wide(), momentum, lr=0.1)
        watch, seen = rates(learn)
        learn.fit(6, cbs=[make(), watch, *cbs])
        return seen, weights(learn.model)

    expected, plain = run()
    for event in NESTED_AT[::2]:
        seen, trained = run(validating(event))
        assert seen == expected, event
        assert same(trained, plain), event


@pytest.mark.parametrize("make", MAKES)
def test_state_is_plain_and_a_stopper_goes_on_where_it_was(make):
    values = [1.0, 2.0, 0.9, 2.0, 2.0, 0.1, 0.1]

    def run(*cbs):
        learn = quiet(batches_of([2]))
        watch, seen = rates(learn)
        cb = make(monitor="score", mode="min", name="tested")
        learn.fit(7, cbs=[cb, scripted(values), watch, *cbs])
        return seen, len(learn.recorder.rows)

    def reload(cb):
        state = pickle.loads(pickle.dumps(cb.learn.tested.state_dict()))
        assert equal(state, cb.learn.tested.state_dict())
        fresh = copy.deepcopy(state)
        cb.learn.tested.load_state_dict(fresh)

    again = Callback(name="again", after_epoch=reload)
    again.order = 1000
    assert run(again) == run()
