"""EarlyStopping ends a fit where fastai's rule says."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from hookcb import EMA, Callback, CancelEpochException, Checkpoint, EarlyStopping
from tests.support import covering, fit, in_turn, make_batches, make_learner, make_model, spy, train_by_hand
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


@pytest.mark.parametrize(
    ("values", "rule"),
    covering(
        VALUES,
        [
            ("score", "min", "min"),
            ("score", "max", "max"),
            ("score", None, "max"),
            ("valid_loss", None, "min"),
        ],
        of=1,
    ),
)
def test_it_stops_where_the_rule_says(values, rule):
    column, given, mode = rule
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


# ---- what Keras and Lightning have too


def epochs_of(values, patience=2, **options):
    """Number of epochs until it stops, and the callback."""
    learn, cb = (
        quiet(batches_of([2]), batches_of([2])),
        EarlyStopping("score", "min", 0.0, patience, **options),
    )
    learn.fit(len(values), cbs=[cb, scripted(values, "score")])
    return len(learn.recorder.rows), cb


@in_turn(
    ("options", "values", "n", "reason"),
    [
        ({"baseline": 0.5}, [3.0, 2.0, 1.0, 0.9, 0.8], 2, "has not been better than 2"),
        ({"baseline": 2.5}, [3.0, 2.0, 1.0, 1.5, 1.4, 1.3], 5, "has not been better than 1"),
        ({"start_from_epoch": 3}, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 6, "than 4, of epoch 3"),
        ({"check_finite": True}, [1.0, math.nan, 0.5], 2, "score is nan"),
        ({"check_finite": True}, [1.0, math.inf, 0.5], 2, "score is inf"),
        ({}, [1.0, math.nan, 0.5, 0.4], 4, None),
        ({"stopping_threshold": 0.5}, [1.0, 0.5, 0.4, 0.3], 3, "score is 0.4, better than 0.5"),
        ({"divergence_threshold": 9.0, "patience": 9}, [1.0, 9.0, 9.5, 1.0], 3, "score is 9.5, worse than 9"),
    ],
)
def test_options_of_others_end_a_fit_where_they_say(options, values, n, reason):
    stopped, cb = epochs_of(values, **options)
    assert stopped == n
    assert cb.reason is None if reason is None else reason in cb.reason


def weights_by_epoch(learn):
    kept = []
    learn.add_cbs(Callback(after_epoch=lambda cb: kept.append(copy.deepcopy(cb.learn.model.state_dict()))))
    return kept


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("values", [[3.0, 1.0, 2.0, 2.5, 2.6], [3.0, 1.0, 2.0], [3.0, 2.0, 1.0]])
def test_the_best_weights_come_back(values):
    learn = make_learner()
    kept = weights_by_epoch(learn)
    learn.fit(
        len(values),
        cbs=[EarlyStopping("score", "min", patience=2, restore_best=True), scripted(values, "score")],
    )
    best = values.index(min(values))
    assert same(learn.model.state_dict(), kept[best])
    assert best == len(kept) - 1 or not same(kept[best], kept[-1])


@pytest.mark.parametrize("event", ["after_batch", "after_epoch"])
def test_a_fit_that_fails_keeps_the_weights_it_had(event):
    def fail(cb):
        if cb.epoch == 2 and (event == "after_epoch" or cb.iter == 1):
            raise ZeroDivisionError

    learn = make_learner()
    last = []
    learn.add_cbs(Callback(after_step=lambda cb: last.append(copy.deepcopy(cb.learn.model.state_dict()))))
    with pytest.raises(ZeroDivisionError):
        learn.fit(
            4,
            cbs=[
                EarlyStopping("score", "min", restore_best=True, patience=3),
                scripted([1.0, 2.0, 3.0, 4.0], "score"),
                Callback(name="fail", **{event: fail}),
            ],
        )
    assert same(learn.model.state_dict(), last[-1])


def test_the_best_weights_survive_a_resume(tmp_path):
    def run(n, resume):
        learn = make_learner()
        kept = weights_by_epoch(learn)
        stop = EarlyStopping("score", "min", patience=9, restore_best=True)
        cbs = [stop, scripted([3.0, 1.0, 2.0, 2.5], "score"), Checkpoint(tmp_path)]
        learn.fit(n, cbs=cbs, resume=resume)
        return learn, kept

    _, kept = run(3, None)
    learn, _ = run(4, "latest")
    assert same(learn.model.state_dict(), kept[1])


def test_weights_that_were_not_validated_are_not_brought_back():
    with pytest.raises(ValueError, match="their average is validated"):
        make_learner().fit(1, cbs=[EarlyStopping(restore_best=True), EMA()])
    make_learner().fit(1, cbs=[EarlyStopping(restore_best=True), EMA(validate=False)])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"baseline": "0.5"}, "baseline must be a number"),
        ({"start_from_epoch": -1}, "start_from_epoch must be"),
    ],
)
def test_wrong_options_are_told(options, told):
    with pytest.raises((TypeError, ValueError), match=told):
        EarlyStopping(**options)
