"""The weights that were best can be had back from a checkpoint."""

from contextlib import nullcontext

import pytest
import torch

from hookcb import EMA, Callback, Checkpoint
from tests.training.checkpoint.support import learner, seed_all


def trained(tmp_path, *cbs):
    seed_all(0)
    learn = learner(lr=0.1)
    with learn.no_logging():
        learn.fit(4, cbs=[*cbs, Checkpoint(tmp_path, keep=1, monitor="valid_loss")])
    return learn


@pytest.mark.parametrize("cbs", [[], [EMA(0.8)]], ids=["plain", "average"])
def test_the_best_file_gives_the_weights_whose_validation_was_best(tmp_path, cbs):
    best = trained(tmp_path, *cbs).checkpoint.best
    fresh = learner()
    fresh.load(tmp_path / "best.pt")
    fresh.model.calls.copy_(torch.load(tmp_path / "best.pt", weights_only=True)["buffers"]["calls"])
    if cbs:
        fresh.model.calls.copy_(
            torch.load(tmp_path / "best.pt", weights_only=True)["cbs"]["ema"]["averaged"]["calls"]
        )
    assert fresh.validate()[0] == pytest.approx(best, rel=1e-6)


def test_an_average_that_was_not_validated_is_not_taken(tmp_path):
    learn = trained(tmp_path, EMA(0.8, validate=False))
    fresh = learner()
    fresh.load(learn.checkpoint.files[-1])
    assert torch.equal(fresh.model.head.weight, learn.model.head.weight)


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_fit_that_was_complete_warns_that_nothing_is_left(tmp_path, is_quiet):
    seen = []
    learn = learner(cbs=Callback(before_batch=lambda cb: seen.append(cb.iter)))
    with learn.no_logging():
        learn.fit(1, cbs=Checkpoint(tmp_path))
    seen.clear()
    said = r"nothing left to train: .*epoch-0001\.pt is of epoch 1 of 1, step 5, train_loss .* anew"
    with pytest.warns(UserWarning, match=said) as told, learn.no_logging() if is_quiet else nullcontext():
        learn.fit(1, cbs=Checkpoint(tmp_path), resume="latest")
    assert seen == []
    assert [warning.filename for warning in told] == [__file__]
