"""EarlyStopping ends a fit where fastai's rule says."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from hookcb import Callback, CancelEpochException, EarlyStopping
from tests.support import fit, make_batches, make_learner, make_model, spy, train_by_hand
from tests.training.support import CURVES, batches_of, quiet, scripted

VALUES = [
    *CURVES,
    [5.0, 4.0, 3.0, 3.0, 2.0, 2.5, 2.4, 2.3, 1.0],
    [1.0, 2.0, 1.5, 0.5, 0.4, 0.3, 0.35, 0.36, 0.37],
    [math.nan, 2.0, math.nan, math.nan, 1.0, 0.9, 0.8, 0.7, 0.6],
    [3.0] * 9,
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


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(
    ("column", "given", "mode"),
    [("score", "min", "min"), ("score", "max", "max"), ("score", None, "max"), ("valid_loss", None, "min")],
)
def test_it_stops_where_the_rule_says(values, column, given, mode):
    learn = quiet(batches_of([2]), batches_of([2]))
    for patience, min_delta in [(1, 0.0), (2, 0.06), (3, 0.0), (2, 0.15), (3, 1.0)]:
        cb = EarlyStopping(column, given, min_delta, patience)
        n, best_epoch = stopped_by_rule(values, mode, patience, min_delta)
        for _ in range(2 if patience == 1 else 1):  # a second fit starts anew
            learn.fit(len(values), cbs=[cb, scripted(values, column)])
            assert [row[column] for row in learn.recorder.rows] == pytest.approx(values[:n], nan_ok=True)
            assert (cb.reason is not None) == (cb.wait >= patience)
            assert cb.best_epoch == best_epoch
            if best_epoch is not None:
                assert cb.best == values[best_epoch]
            if n < len(values):
                assert column in cb.reason


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
        assert "valid_loss has not been better than" in learn.early_stopping.reason


def test_a_cancelled_epoch_counts_neither_way():
    cut = spy([], "cut", {("after_loss", k): CancelEpochException() for k in (5, 6, 7)})
    learn = make_learner(lr=0.0, cbs=[EarlyStopping(patience=2), cut])
    fit(learn, 9)
    assert ["valid_loss" in row for row in learn.recorder.rows].count(True) == 3


def test_its_state_goes_on_where_it_was():
    def resumed(state, patience=2):
        cb = EarlyStopping(patience=patience)
        loader = Callback(name="loads", before_fit=lambda _: cb.load_state_dict(copy.deepcopy(state)))
        loader.order = 99
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
    assert len(losses) == stopped_by_rule(by_hand + [math.nan] * 2, "min", 2, 0.0)[0]
    assert learn.early_stopping.best == min(losses)
