"""EarlyStopping and ReduceLROnPlateau watch a number as fastai's rule and torch's scheduler do."""

import copy
import math
import pickle
import random

import pytest
import torch

from hookcb import Callback, EarlyStopping, ReduceLROnPlateau
from tests.support import CANCELS, make_model, same, spy, weights
from tests.training.support import (
    NESTED_AT,
    Unsized,
    Wide,
    batches_of,
    equal,
    groups,
    momentum,
    quiet,
    rates,
    scripted,
    seeded,
    two_groups,
    validating,
)

nan, inf = math.nan, math.inf
CURVES = [
    [3.0, 2.0, 1.0, 1.0, 1.0, 1.0],
    [1.0, 2.0, 0.5, 2.0, 2.0, 0.4, 3.0],
    [nan, nan, 1.0, nan, 0.5, nan, nan],
    [1.0, nan, nan, nan],
    [inf, 2.0, inf, -inf, 1.0],
    [0.5, 0.45, 0.41, 0.36, 0.30, 0.1],
    *[[random.Random(seed).choice([0.1, 0.2, 0.3, 0.35, nan]) for _ in range(9)] for seed in range(3)],
]


def stopped_by_rule(values, mode, patience, min_delta):
    """fastai's EarlyStoppingCallback, with a NaN that never improves; gives what it comes to."""
    best, best_epoch, wait = None, None, 0
    for epoch, value in enumerate(values):
        gain = (-1 if mode == "min" else 1) * value
        if not math.isnan(gain) and (best is None or gain - min_delta > best):
            best, best_epoch, wait = gain, epoch, 0
        else:
            wait += 1
            if wait >= patience:
                break
    return epoch + 1, best_epoch


@pytest.mark.parametrize("values", CURVES)
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("patience", "min_delta"), [(1, 0.0), (2, 0.06), (3, 0.0)])
def test_early_stopping_ends_where_the_rule_says(values, mode, patience, min_delta):
    learn = quiet(batches_of([2]))
    cb = EarlyStopping("score", mode, min_delta, patience)
    for _ in range(2):  # a second fit starts anew
        learn.fit(len(values), cbs=[cb, scripted(values)])
        n, best_epoch = stopped_by_rule(values, mode, patience, min_delta)
        assert len(learn.recorder.rows) == n
        if best_epoch is not None:
            assert cb.best_epoch == best_epoch
            assert cb.best == values[best_epoch]
        if n < len(values):
            assert "score" in cb.reason


@pytest.mark.parametrize("values", CURVES)
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("patience", "min_delta"), [(0, 0.0), (1, 0.06), (2, 0.0)])
def test_a_plateau_reduces_the_rates_as_torchs_scheduler_does(values, mode, patience, min_delta):
    def by_torch():
        opt, expected = two_groups()(make_model()), []
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            opt, mode, 0.3, patience, threshold=min_delta, threshold_mode="abs", min_lr=0.004
        )
        for value in values:
            expected.append([group["lr"] for group in opt.param_groups])
            scheduler.step(value)
        return expected

    learn = quiet(batches_of([2]), model=(model := make_model()), opt=two_groups()(model))
    watch, seen = rates(learn)
    cb = ReduceLROnPlateau("score", mode, min_delta, patience, factor=0.3, min_lr=0.004)
    learn.fit(len(values), cbs=[cb, scripted(values), watch])
    assert seen == by_torch()
    assert groups(learn.opt) == groups(two_groups()(make_model()))


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


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("level", ["train", "epoch", "validate"])
def test_an_epoch_without_the_number_ends_no_fit(make, level):
    plan = {(f"before_{level}", k): CANCELS[level]() for k in (0, 2)}
    learn, log = quiet(batches_of([3, 2]), batches_of([2])), []
    learn.fit(4, cbs=[make(), spy(log, "a", plan)])
    assert log.count(("a", "after_epoch")) >= 3


@pytest.mark.parametrize("make", MAKES)
def test_a_validation_inside_is_no_epoch(make):
    def run(*cbs):
        seeded()
        learn = quiet(Unsized(batches_of([3, 2])), batches_of([2]), Wide(), momentum, lr=0.5)
        watch, seen = rates(learn)
        learn.fit(6, cbs=[make(), watch, *cbs])
        return seen, weights(learn.model)

    expected, plain = run()
    for event in NESTED_AT:
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
