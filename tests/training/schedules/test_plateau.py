"""ReduceLROnPlateau lowers rates as torch's scheduler does, by a number of the epoch's row."""

import math

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from hookcb import Callback, CancelEpochException, ReduceLROnPlateau
from tests.support import covering, fit, in_turn, make_learner, make_model
from tests.training.support import CURVES, batches_of, groups, quiet, rates, scripted, two_groups


@in_turn("cooldown", [0, 2])
@in_turn("mode", ["min", "max"])
def test_the_plateau_is_that_of_torch(mode, cooldown):
    values = [1.0, 0.95, 0.95, 2.0, math.nan, 0.5, 0.5, 0.5, 0.9, 3.0, 3.0, 3.0]
    opt = SGD(make_model().parameters(), lr=0.1)
    torchs = lr_scheduler.ReduceLROnPlateau(
        opt, mode, factor=0.5, patience=1, threshold=0.1, threshold_mode="abs", min_lr=0.02, cooldown=cooldown
    )
    lrs = []
    for value in values:
        lrs.append(opt.param_groups[0]["lr"])
        torchs.step(value)
    learn = make_learner(n_train=1)
    fit(
        learn,
        len(values),
        cbs=[ReduceLROnPlateau("my_loss", mode, 0.1, 1, 0.5, 0.02, cooldown), scripted(values, "my_loss")],
    )
    assert learn.recorder.lrs == lrs
    assert len(set(lrs)) > 2


def test_the_plateau_waits_for_its_validation():
    learn = make_learner(n_valid=0)
    with pytest.raises(ValueError, match=r"no dls.valid"):
        fit(learn, cbs=ReduceLROnPlateau())
    fit(learn, 2, cbs=ReduceLROnPlateau("train_loss"))


def test_a_column_that_never_comes_is_refused_before_training():
    learn = make_learner()
    with pytest.raises(LookupError, match=r"'sharpness'.*known are: train_loss, valid_loss, time"):
        fit(learn, cbs=ReduceLROnPlateau("sharpness"))
    assert learn.train_iter == 0


@pytest.mark.parametrize("others", [Callback(after_train=lambda cb: None), scripted([1.0], "my_loss")])
def test_a_column_that_a_callback_of_ones_own_might_add_is_missed_after_the_first_epoch(others):
    learn = make_learner()
    with pytest.raises(LookupError, match="it has: train_loss, valid_loss"):
        fit(learn, cbs=[ReduceLROnPlateau("sharpness"), others])
    assert learn.train_iter > 0


def test_an_epoch_cut_short_is_none_without_improvement():
    def cut(cb):
        if cb.epoch in (1, 2):
            raise CancelEpochException

    plateau = ReduceLROnPlateau(patience=0, min_delta=0.0)
    learn = fit(make_learner(lr=1e-3), 4, cbs=[plateau, Callback(after_step=cut)])
    assert set(learn.recorder.lrs) == {1e-3}


@pytest.mark.parametrize(
    ("values", "mode", "rule"), covering(CURVES, ["min", "max"], [(0, 0.0), (1, 0.06), (2, 0.0)])
)
def test_a_plateau_reduces_the_rates_as_torchs_scheduler_does(values, mode, rule):
    patience, min_delta = rule

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
