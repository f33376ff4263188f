"""TerminateOnNaN ends a fit with the weights there were before a loss that is not finite."""

import math

import pytest
from torch import nn

from hookcb import TerminateOnNaN
from tests.support import (
    events,
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    same,
    spy,
    weights,
)
from tests.training.support import batches_of, momentum, quiet, train_plainly, validating

RAGGED = [4, 4, 2]


def bad_batches(value, i=2):
    batches = make_batches(4)
    batches[i][1][0] = value
    return batches


def test_a_bad_loss_in_the_validation_ends_nothing():
    learn = make_learner(cbs=TerminateOnNaN())
    learn.dls = learn.dls._replace(valid=bad_batches(math.nan))
    fit(learn, 2)
    assert len(learn.recorder.rows) == 2


def test_one_bad_batch_by_itself_makes_no_step():
    learn = make_learner(cbs=TerminateOnNaN())
    before = weights(learn.model)
    with pytest.warns(UserWarning, match="loss is nan"):
        learn.one_batch(bad_batches(math.nan)[2])
    assert same(weights(learn.model), before)


@in_turn("bad", [math.nan, math.inf, -math.inf])
@in_turn("nth", [0, 1, 5])
def test_a_loss_that_is_not_finite_ends_the_fit_with_the_weights_before_it(bad, nth):
    calls = []

    def loss_func(pred, y):
        calls.append(1)
        loss = nn.functional.mse_loss(pred, y)
        return loss * bad if len(calls) == nth + 1 else loss

    model, log = make_model(), []
    train_plainly(model, (batches_of(RAGGED) * 2)[:nth], 1, momentum(model.parameters(), 0.1))
    learn = quiet(batches_of(RAGGED), None, opt=momentum, loss_func=loss_func)
    with pytest.warns(UserWarning, match=rf"loss is {bad} at epoch {nth // 3}, batch {nth % 3}") as warned:
        learn.fit(3, cbs=[TerminateOnNaN(), spy(log, "a")])
    assert len(warned) == 1
    assert same(weights(learn.model), weights(model))
    assert learn.terminate_on_nan.reason == f"loss is {bad} at epoch {nth // 3}, batch {nth % 3}"
    assert len(learn.recorder.rows) == nth // 3
    assert events(log)[-2:] == ["after_cancel_fit", "after_fit"]
    assert len(learn.recorder.losses) == nth
    learn.fit(1, cbs=learn.terminate_on_nan)
    assert not learn.terminate_on_nan.reason


def test_nor_does_one_in_a_validation_inside():
    valid = [(x * math.nan, y) for x, y in batches_of([2])]
    learn = quiet(batches_of(RAGGED), valid)
    learn.fit(2, cbs=[TerminateOnNaN(), validating("after_pred")])
    assert len(learn.recorder.rows) == 2
