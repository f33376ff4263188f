"""TerminateOnNaN, DetectAnomaly, MaxTime and EarlyStopping end a fit where they should, and only there."""

import copy
import math
import threading
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F

from hookcb import (
    Callback,
    CancelEpochException,
    CancelTrainException,
    DetectAnomaly,
    EarlyStopping,
    MaxTime,
    MixedPrecision,
    TerminateOnNaN,
    watch,
)
from tests.support import (
    EVENTS,
    fit,
    make_batches,
    make_learner,
    make_model,
    same,
    spy,
    train_by_hand,
    weights,
)

# ---- TerminateOnNaN


def bad_batches(value, i=2):
    batches = make_batches(4)
    batches[i][1][0] = value
    return batches


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_loss_ends_the_fit_with_the_weights_of_the_batch_before(value):
    learn = make_learner(cbs=TerminateOnNaN())
    learn.dls = learn.dls._replace(train=bad_batches(value))
    with pytest.warns(UserWarning, match=f"loss is {value} at epoch 0, batch 2"):
        fit(learn, 3)
    model = make_model()
    train_by_hand(model, make_batches(4)[:2])
    assert same(weights(learn.model), weights(model))
    assert learn.terminate_on_nan.reason == f"loss is {value} at epoch 0, batch 2"
    assert learn.recorder.rows == []
    learn.dls = learn.dls._replace(train=make_batches(4))
    fit(learn)
    assert learn.terminate_on_nan.reason is None


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


# ---- DetectAnomaly


def anomaly_mode():
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


@pytest.fixture(params=[(False, True), (True, False)])
def mode(request):
    before = anomaly_mode()
    torch.set_anomaly_enabled(*request.param)
    yield request.param
    torch.set_anomaly_enabled(*before)


@pytest.mark.parametrize(("start", "stop"), [(0, None), (2, 4), (5, 6), (4, None)])
def test_anomalies_are_looked_for_in_the_window_and_nowhere_else(start, stop, mode):
    seen = []

    def look(cb):
        seen.append((cb.training, cb.train_iter, anomaly_mode()))
        if cb.training and cb.iter == 1:
            cb.learn.validate(make_batches(1))

    fit(make_learner(cbs=[DetectAnomaly(start, stop), Callback(after_pred=look)]), 2)
    for training, i, now in seen:
        if training:
            assert now == ((True, True) if start <= i < (stop or 6) else mode)
        elif i in (3, 6):
            assert now == mode  # a validation after an epoch, not one inside a batch
    assert anomaly_mode() == mode


@pytest.mark.parametrize("error", [KeyboardInterrupt, CancelTrainException, CancelEpochException])
@pytest.mark.parametrize("event", EVENTS)
def test_the_mode_is_restored_however_a_batch_ends(event, error, mode):
    with suppress(KeyboardInterrupt, RuntimeError):
        fit(make_learner(cbs=[DetectAnomaly(stop=1), spy([], "a", {(event, 0): error()}, order=99)]), 2)
    assert anomaly_mode() == mode


def test_after_a_training_that_was_cut_short_the_validation_is_not_looked_at():
    seen = []
    look = Callback(before_validate=lambda cb: seen.append(torch.is_anomaly_enabled()))
    cut = spy([], "a", {("after_backward", 1): CancelTrainException()})
    fit(make_learner(cbs=[DetectAnomaly(), look, cut]))
    assert seen == [False]


def test_the_error_names_the_operation_and_where_it_was():
    def loss_func(pred, y):
        return (pred - pred.detach()).sqrt().mean() * 0

    with (
        pytest.warns(UserWarning, match="SqrtBackward0"),
        pytest.raises(RuntimeError, match="SqrtBackward0") as e,
    ):
        fit(make_learner(loss_func=loss_func, cbs=DetectAnomaly()))
    assert any("batch 0" in note for note in e.value.__notes__)
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(
    ("window", "error"), [((-1,), ValueError), ((2, 2), ValueError), ((0.5,), TypeError)]
)
def test_a_window_without_a_batch_is_refused(window, error):
    with pytest.raises(error, match="start"):
        DetectAnomaly(*window)


def test_windows_that_overlap_in_two_threads_leave_the_mode_as_the_first_found_it(mode):
    first_is_in, second_is_in, first_is_over = (threading.Event() for _ in range(3))
    seen = []

    def first(cb):
        if not first_is_in.is_set():
            first_is_in.set()
            assert second_is_in.wait(30)

    def second(cb):
        if not second_is_in.is_set():
            second_is_in.set()
            assert first_is_over.wait(30)
            seen.append(anomaly_mode())

    def run(wait_for, at):
        wait_for.wait(30)
        fit(make_learner(n_train=1, n_valid=0, cbs=[DetectAnomaly(), Callback(after_pred=at)]))

    began = threading.Event()
    began.set()
    threads = [threading.Thread(target=run, args=args) for args in ((began, first), (first_is_in, second))]
    for thread in threads:
        thread.start()
    threads[0].join()
    first_is_over.set()
    threads[1].join()
    assert seen == [(True, True)]
    assert anomaly_mode() == mode


def test_a_copy_made_in_a_window_does_not_close_it():
    copies, seen = [], []

    def look(cb):
        copies.append(copy.deepcopy(cb.learn.detect_anomaly))
        copies[-1].after_batch()
        seen.append(torch.is_anomaly_enabled())

    fit(make_learner(n_train=2, n_valid=0, cbs=[DetectAnomaly(), Callback(after_pred=look)]))
    assert seen == [True, True]


def test_it_is_refused_beside_a_gradscaler_with_what_to_use_instead():
    learn = make_learner(cbs=[DetectAnomaly(), MixedPrecision("fp16")])
    with pytest.raises(RuntimeError, match="NanTrace"):
        fit(learn)
    assert learn.train_iter == 0
    learn.remove_cb(MixedPrecision)
    learn.scaler = torch.amp.GradScaler("cpu", enabled=False)
    fit(learn)
    assert learn.train_iter == 3
    model = make_model()
    with pytest.raises(RuntimeError, match="bfloat16"):
        watch(model, DetectAnomaly(), scaler=torch.amp.GradScaler("cpu"))


# ---- MaxTime


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


@pytest.mark.parametrize(
    ("seconds", "error"), [(0, ValueError), (-1.0, ValueError), (math.nan, ValueError), ("1h", TypeError)]
)
def test_a_time_that_cannot_be_is_refused(seconds, error):
    with pytest.raises(error, match="seconds is"):
        MaxTime(seconds)


# ---- EarlyStopping


def scripted(values, column="valid_loss"):
    """Puts these values into the epochs' rows, one after the other."""

    def put(cb):
        cb.learn.row[column] = values[cb.epoch]

    return ordered(60, name="script", after_validate=put)  # after the Recorder


def ordered(order, **functions):
    cb = Callback(**functions)
    cb.order = order
    return cb


def stopped_by_hand(values, better, min_delta, patience):
    best, wait = None, 0
    for epoch, value in enumerate(values):
        if not math.isnan(value) and (best is None or better(value, best, min_delta)):
            best, wait = value, 0
        else:
            wait += 1
        if wait >= patience:
            return epoch + 1
    return len(values)


VALUES = [
    [5.0, 4.0, 3.0, 3.0, 2.0, 2.5, 2.4, 2.3, 1.0],
    [1.0, 2.0, 1.5, 0.5, 0.4, 0.3, 0.35, 0.36, 0.37],
    [math.nan, 2.0, math.nan, math.nan, 1.0, 0.9, 0.8, 0.7, 0.6],
    [3.0] * 9,
]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("min_delta", [0.0, 0.15, 1.0])
@pytest.mark.parametrize(
    ("column", "mode", "sign"), [("valid_loss", None, 1), ("score", None, -1), ("score", "min", 1)]
)
def test_it_stops_where_a_loop_by_hand_stops(values, patience, min_delta, column, mode, sign):
    values = [sign * v for v in values]
    cb = EarlyStopping(column, mode, min_delta, patience)
    learn = fit(make_learner(n_train=1, n_valid=1, cbs=[cb, scripted(values, column)]), 9)
    n = stopped_by_hand(values, lambda v, best, d: sign * v < sign * best - d, min_delta, patience)
    assert [row[column] for row in learn.recorder.rows] == pytest.approx(values[:n], nan_ok=True)
    assert (cb.reason is not None) == (cb.wait >= patience)
    if cb.best is not None:
        assert cb.best == values[cb.best_epoch]


def test_the_epoch_that_shows_it_is_complete_and_the_next_fit_begins_anew():
    learn = make_learner(lr=0.0, cbs=EarlyStopping(patience=2))
    log = []
    learn.add_cb(spy(log, "late", order=100))
    for _ in range(2):
        fit(learn, 9)
        assert len(learn.recorder.rows) == 3
        assert "time" in learn.recorder.rows[-1]
        assert log[-1] == ("late", "after_fit")
        assert log[-3] == ("late", "after_epoch")
        assert "valid_loss is not better than" in learn.early_stopping.reason


def test_a_cancelled_epoch_counts_neither_way():
    cut = spy([], "cut", {("after_loss", k): CancelEpochException() for k in (5, 6, 7)})
    learn = make_learner(lr=0.0, cbs=[EarlyStopping(patience=2), cut])
    fit(learn, 9)
    assert ["valid_loss" in row for row in learn.recorder.rows].count(True) == 3


def test_its_state_goes_on_where_it_was():
    def resumed(state, patience=2):
        cb = EarlyStopping(patience=patience)
        loader = ordered(99, name="loads", before_fit=lambda _: cb.load_state_dict(copy.deepcopy(state)))
        return fit(make_learner(n_train=1, lr=0.0, cbs=[cb, loader]), 9), cb

    cb = EarlyStopping(patience=2)
    learn = fit(make_learner(n_train=1, lr=0.0, cbs=cb), 1)
    again, _ = resumed(cb.state_dict())
    assert len(again.recorder.rows) == 2  # one had passed
    fit(learn, 9)
    again, stopped = resumed(cb.state_dict())
    assert len(again.recorder.rows) == 0
    assert stopped.reason == cb.reason
    again, _ = resumed(cb.state_dict(), patience=4)
    assert len(again.recorder.rows) == 2


def test_the_loss_of_the_validation_is_what_is_watched_by_default():
    learn = make_learner(lr=0.3, cbs=EarlyStopping(patience=2))
    fit(learn, 60)
    losses = [row["valid_loss"] for row in learn.recorder.rows]
    model, by_hand = make_model(), []
    for _ in losses:
        train_by_hand(model, make_batches(3), lr=0.3)
        with torch.no_grad():
            by_hand.append(sum(F.mse_loss(model(x), y).item() for x, y in make_batches(2, seed=1)) / 2)
    assert losses == pytest.approx(by_hand, rel=1e-5)
    assert len(losses) == stopped_by_hand(by_hand + [math.nan] * 2, lambda v, b, d: v < b, 0.0, 2)
    assert learn.early_stopping.best == min(losses)
