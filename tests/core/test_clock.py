"""The time of a training is split among its phases, its callbacks and garbage collection."""

import gc
from contextlib import contextmanager

import pytest

from hookcb import Callback
from hookcb.core.clock import TimeSplit, follow_garbage, leave_garbage
from tests.support import Clock, fit, make_learner


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hookcb.core.clock.perf_counter", clock)
    return clock


@pytest.fixture
def split(clock):
    split = TimeSplit(lambda cb: cb.name, n_warm_up=0)
    yield split
    split.close()


def run(split, learn, *cbs):
    learn.follow_phases(split)
    fit(learn, 1, cbs=list(cbs))
    learn.leave_phases(split)


def slept(split):
    return {name: round(x / 1000) for name, x in split.seconds.items() if x > 1}


def every_event(*events):
    """A callback that acts at all events of a batch, so that the clock sees them, and does nothing."""
    names = ("before_train", "before_batch", "after_pred", "after_loss", "before_backward", "after_backward")
    more = ("before_step", "after_step", "after_batch", "before_validate", "after_validate", *events)
    return Callback(name="marks", **dict.fromkeys((*names, *more), lambda cb: None))


@pytest.mark.parametrize("event", ["before_batch", "after_pred", "before_step", "after_batch"])
def test_a_callback_has_its_own_time_at_each_event(split, clock, event):
    slow = Callback(name="slow", **{event: lambda cb: clock.sleep()})
    run(split, make_learner(4, 0), every_event(), slow)
    assert slept(split) == {"slow": 4}
    assert split.n == 4


def test_each_phase_has_its_own_time(split, clock):
    learn = make_learner(4, 0)
    loss_func, step = learn.loss_func, learn.step
    learn.loss_func = lambda *args: (clock.sleep(), loss_func(*args))[1]
    learn.step = lambda: (clock.sleep(2000), step())[1]
    learn.model.register_forward_hook(lambda *args: clock.sleep(3000))
    run(split, learn, every_event())
    assert slept(split) == {"loss": 4, "optimizer": 8, "forward": 12}


def test_a_validation_counts_as_a_whole(split, clock):
    slow = Callback(name="slow", after_pred=lambda cb: cb.training or clock.sleep())
    learn = make_learner(4, 2)
    learn.follow_phases(split)
    fit(learn, 2, cbs=[every_event(), slow])
    assert slept(split) == {"validation": 2}  # that after the last batch is in none


def test_inspected_batches_are_left_out(split, clock):
    def begin(cb):
        split.leaves_out = cb.iter % 2 == 0
        clock.sleep()

    run(split, make_learner(4, 0), every_event(), Callback(name="slow", before_batch=begin))
    assert (slept(split), split.n) == ({"slow": 2}, 2)


@contextmanager
def slow_collections(clock):
    """Full garbage collections take a while; entered after a split was made, which is told of both ends."""

    def during(stage, info):
        if stage == "start" and info["generation"] == 2:
            clock.sleep()

    gc.callbacks.append(during)
    try:
        yield
    finally:
        gc.callbacks.remove(during)


def test_a_full_garbage_collection_has_its_own_time(split, clock):
    collect = Callback(name="slow", after_pred=lambda cb: gc.collect())
    with slow_collections(clock):
        run(split, make_learner(3, 0), every_event(), collect)
    assert slept(split) == {"garbage collection": 3}
    n = len(gc.callbacks)
    split.close()
    assert len(gc.callbacks) == n - 1


def test_a_garbage_collection_in_a_fetch_is_no_wait_for_data(split, clock):
    with slow_collections(clock):
        gc.collect()
        split.begin()
        clock.sleep(500)
        gc.collect()
        split.end()
    assert split.take_fetched() == pytest.approx(500, abs=1)


def test_followers_of_garbage_share_one_listener(clock):
    before, told = list(gc.callbacks), ([], [])
    tells = [lambda *x, own=own: own.append(x) for own in told]
    for tell in tells:
        follow_garbage(tell)
        gc.collect(1)
    assert len(gc.callbacks) == len(before) + 1
    for tell in (*tells, *tells):
        leave_garbage(tell)
        gc.collect(0)
    assert gc.callbacks == before
    assert [[generation for generation, _ in own] for own in told] == [[1, 1], [1, 0]]
    assert all(0 < seconds < 1 for own in told for _, seconds in own)


def test_without_a_clock_no_batch_is_timed(clock):
    fit(make_learner(4, 0), 1, cbs=every_event())
    few = clock.now
    fit(make_learner(40, 0), 1, cbs=every_event())
    assert clock.now == 2 * few  # what begins and ends a fit
