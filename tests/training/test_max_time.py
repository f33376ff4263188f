"""MaxTime ends a fit after the batch in which the time is up."""

import datetime
import math
from datetime import timedelta

import pytest

from hookcb import Callback, MaxTime
from tests.support import (
    fit,
    in_turn,
    make_batches,
    make_learner,
    make_model,
    same,
    train_by_hand,
    weights,
)
from tests.training.support import batches_of, quiet

RAGGED = [4, 4, 2]


class Clock:
    """A clock that a callback sets forward."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def ticking(self, event, seconds=1.0):
        def tick(cb):
            self.now += seconds

        return Callback(name="tick", **{event: tick})


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hookcb.training.max_time.time", clock)
    return clock


@pytest.mark.parametrize("seconds", [3.5, timedelta(seconds=3.5)])
def test_the_fit_ends_after_the_batch_in_which_the_time_is_up(clock, seconds):
    learn = make_learner(cbs=[MaxTime(seconds), clock.ticking("after_step")])
    for _ in range(2):
        fit(learn, 5)
        assert len(learn.recorder.losses) == 4
        assert len(learn.recorder.rows) == 1
        assert learn.max_time.stopped_at == 4.0
    model = make_model()
    for _ in range(2):
        train_by_hand(model, [*make_batches(3), make_batches(3)[0]])
    assert same(weights(learn.model), weights(model))


def test_a_long_validation_is_finished_and_ends_the_fit_with_the_row_complete(clock):
    learn = make_learner(cbs=[MaxTime(5), clock.ticking("after_validate", 10)])
    fit(learn, 5)
    assert len(learn.recorder.losses) == 3
    assert "valid_loss" in learn.recorder.rows[0]
    assert learn.max_time.stopped_at == 10
    fit(learn, 1)
    assert learn.max_time.stopped_at is None  # there was nothing left to end


def test_time_counts_in_a_fit_only(clock):
    learn = make_learner(cbs=[MaxTime(0.5), clock.ticking("after_step")])
    learn.one_batch()
    learn.validate()
    fit(learn, 3)
    assert len(learn.recorder.losses) == 1


@in_turn(
    ("seconds", "error"), [(0, ValueError), (-1.0, ValueError), (math.nan, ValueError), ("1h", TypeError)]
)
def test_an_invalid_time_is_refused(seconds, error):
    with pytest.raises(error, match="seconds must be a number above 0"):
        MaxTime(seconds)


@in_turn("seconds", [3600, 3600.0, datetime.timedelta(hours=1), math.inf])
def test_time_that_is_not_up_changes_nothing(seconds):
    plain, learn = (quiet(batches_of(RAGGED), batches_of([2])) for _ in range(2))
    plain.fit(2)
    learn.fit(2, cbs=MaxTime(seconds))
    assert same(weights(learn.model), weights(plain.model))
    assert learn.max_time.stopped_at is None
