"""SaveModelCallback saves and loads as fastai's does."""

import math

import pytest
import torch

from hookcb import EMA, Callback, CancelEpochException, SaveModelCallback
from tests.support import covering, in_turn, make_learner
from tests.training.support import CURVES, batches_of, quiet, scripted


def weights(learn):
    return [p.detach().clone() for p in learn.model.parameters()]


def same(ones, others):
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def less(a, b):
    return a < b


def greater(a, b):
    return a > b


def best_by_rule(values, mode, min_delta):
    """Index of the last improvement; None if there is none."""
    best, index = None, None
    for i, value in enumerate(values):
        sign = 1 if mode == "min" else -1
        if not math.isnan(value) and (best is None or sign * value < sign * best - min_delta):
            best, index = value, i
    return index


@pytest.mark.parametrize(
    ("values", "rule"), covering(CURVES, [(less, "min"), (greater, "max"), (None, "max")], of=1)
)
def test_the_model_is_that_of_the_best_epoch(values, rule, tmp_path):
    column, (comp, mode) = "score", rule
    for min_delta in (0.0, 0.15):
        learn, kept = quiet(batches_of([2]), batches_of([2])), []
        learn.add_cb(Callback(after_epoch=lambda cb, kept=kept: kept.append(weights(cb.learn)), name="spy"))
        cb = SaveModelCallback(column, comp, min_delta, fname=tmp_path / "best")
        learn.fit(len(values), 0.1, cbs=[cb, scripted(values, column)])
        index = best_by_rule(values, mode, min_delta)
        assert same(weights(learn), kept[-1 if index is None else index])
        assert cb.best == (None if index is None else values[index])
        assert cb.last_saved_path == (None if index is None else tmp_path / "best.pth")
    assert not same(kept[0], kept[-1])


@pytest.mark.parametrize(("every", "n", "there"), [(True, 3, [0, 1, 2]), (2, 5, [0, 2, 4])])
def test_epochs_have_files_of_their_own(every, n, there, tmp_path):
    learn = make_learner()
    with learn.no_logging():
        learn.fit(n, cbs=SaveModelCallback(fname=f"{tmp_path}/m.pth", every_epoch=every))
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"m_{i}.pth" for i in there]
    last = weights(learn)
    learn.load(tmp_path / f"m_{there[-1]}.pth")
    assert same(weights(learn), last) == (there[-1] == n - 1)


def test_the_end_has_a_file_and_nothing_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn = make_learner()
    with learn.no_logging():
        learn.fit(2, cbs=SaveModelCallback(at_end=True))
        last = weights(learn)
        learn.fit(1)
    learn.load("models/model.pth")
    assert same(weights(learn), last)
    assert learn.save_model.last_saved_path.parts == ("models", "model.pth")


@pytest.mark.parametrize("with_opt", [True, False])
def test_the_optimizer_is_in_the_file_on_request(with_opt, tmp_path):
    learn = make_learner(opt_func=torch.optim.Adam)
    with learn.no_logging():
        learn.fit(1, cbs=SaveModelCallback(fname=tmp_path / "m", with_opt=with_opt))
    assert (torch.load(tmp_path / "m.pth")["opt"] is not None) == with_opt


@pytest.mark.parametrize(("reset", "best"), [(True, 2.0), (False, 1.0)])
def test_the_best_of_an_earlier_fit_counts_on_request(reset, best, tmp_path):
    learn = quiet(batches_of([2]), batches_of([2]))
    cb = SaveModelCallback("score", less, fname=tmp_path / "m", reset_on_fit=reset)
    assert cb.state_dict() == {"best": None}
    learn.fit(1, cbs=[cb, scripted([1.0], "score")])
    first = weights(learn)
    learn.fit(1, 0.1, cbs=[cb, scripted([2.0], "score")])
    assert cb.best == best
    assert same(weights(learn), first) == (not reset)  # fastai loads the best of both


@pytest.mark.parametrize("event", ["after_batch", "after_epoch"])
def test_a_fit_that_fails_loads_nothing(event, tmp_path):
    learn, kept = quiet(batches_of([2]), batches_of([2])), []

    def fail(cb):
        if cb.epoch == 2:
            kept.append(weights(learn))
            raise SystemError

    cbs = [SaveModelCallback("score", less, fname=tmp_path / "m"), scripted([1.0, 2.0, 3.0], "score")]
    with pytest.raises(SystemError):
        learn.fit(3, 0.1, cbs=[*cbs, Callback(name="spy", **{event: fail})])
    assert same(weights(learn), kept[0])
    assert (tmp_path / "m.pth").exists()


def test_an_epoch_without_a_value_is_not_one(tmp_path):
    def cancel(cb):
        raise CancelEpochException

    learn = quiet(batches_of([2]), batches_of([2]))
    learn.fit(2, cbs=[SaveModelCallback(fname=tmp_path / "m"), Callback(name="spy", before_train=cancel)])
    assert learn.save_model.best is None


@in_turn(
    ("options", "error", "told"),
    [
        ({"comp": "less"}, TypeError, "comp must be a function such as np.less"),
        ({"every_epoch": True, "at_end": True}, ValueError, "exclude each other"),
        ({"every_epoch": -1}, ValueError, "every_epoch must be"),
        ({"min_delta": -1.0}, ValueError, "min_delta must be"),
        ({"monitor": 3}, TypeError, "monitor must be the name of a column"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options, error, told):
    with pytest.raises(error, match=told):
        SaveModelCallback(**options)


def test_what_does_not_go_with_the_fit_is_refused_before_training(tmp_path):
    with pytest.raises(LookupError, match="did you mean 'valid_loss'"):
        make_learner().fit(1, cbs=SaveModelCallback("val_loss"))
    with pytest.raises(ValueError, match="would save the trained weights, but their average is validated"):
        make_learner().fit(1, cbs=[SaveModelCallback(fname=tmp_path / "m"), EMA()])
