"""State that is easily forgotten is resumed too, and callbacks get their own back in time."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from hookcb import Callback, Metrics
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.clip import GradientClip
from hookcb.training.ema import EMA
from tests.support import fit, make_batches
from tests.training.checkpoint.support import Net, check_resumes, differing, go_on, learner, outcome, train

sgd = torch.optim.SGD


class Lazy(Net):
    """Makes a buffer that is not saved in its first forward, and lets it grow, as caches of positions do."""

    def forward(self, x):
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.cache = torch.cat([self.cache, self.cache[-1:] + 0.01])
        return super().forward(x) + self.cache.sum()


def test_a_buffer_that_is_made_on_the_way_is_resumed(tmp_path):
    check_resumes(lambda: learner(model=Lazy()), tmp_path, files=(3, 5, 8))


class Center(nn.Module):
    """A loss with a weight that is learnt and a running mean, as some of contrastive learning have."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("center", torch.zeros(()))

    def forward(self, pred, y):
        self.center += 0.1 * (pred.detach().mean() - self.center)
        return (self.scale * (pred - self.center) - y).pow(2).mean()


def test_a_loss_with_weights_and_buffers_is_resumed(tmp_path):
    def make():
        model, loss = Net(), Center()
        opt = sgd([*model.parameters(), *loss.parameters()], lr=0.1)
        return learner(model=model, loss_func=loss, opt_func=opt)

    check_resumes(make, tmp_path)


def test_columns_that_a_callback_puts_into_the_row_during_training_are_resumed(tmp_path):
    def first(cb):
        if cb.training and cb.iter == 0:
            cb.learn.row["first_loss"] = cb.loss.item()

    check_resumes(lambda: learner(cbs=Callback(name="first", after_batch=first)), tmp_path)


class InFloat32(torch.optim.Optimizer):
    """Keeps its momentum in more digits than the weights have."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
                p.sub_(group["lr"] * momentum.mul_(0.9).add_(p.grad))


def test_the_state_of_an_optimizer_keeps_its_digits(tmp_path):
    def make():
        batches = [(x.bfloat16(), y.bfloat16()) for x, y in make_batches(4)]
        return learner(batches, valid=None, model=Net().bfloat16(), opt_func=InFloat32)

    check_resumes(make, tmp_path)


def test_a_rate_of_numpy_is_resumed(tmp_path):
    opt_func = partial(sgd, momentum=np.float64(0.9))
    check_resumes(lambda: learner(lr=np.float64(0.05), opt_func=opt_func), tmp_path)


def test_a_metric_of_numpy_is_resumed(tmp_path):
    def make():
        learn = learner()
        learn.remove_cb(learn.metrics)
        learn.add_cb(Metrics(lambda pred, y: np.float64(pred.mean())))
        return learn

    check_resumes(make, tmp_path)


# ---- what callbacks see of it


def positions(log):
    def see(cb):
        log.append((cb.training, cb.epoch, cb.iter, cb.n_iter, cb.train_iter, cb.n_epoch, cb.pct_train))

    return Callback(name="see", after_batch=see)


@pytest.mark.filterwarnings("ignore:nothing left to train")
def test_callbacks_see_the_positions_of_the_uninterrupted_fit(tmp_path):
    whole, saving = [], Checkpoint(tmp_path, every=1, keep=100)
    train(learner, 2, saving, positions(whole))
    for file in saving.files:
        log = []
        go_on(learner, 2, positions(log), resume=file)
        assert log == whole[len(whole) - len(log) :], file.name
    assert log == []


def test_state_comes_back_once_before_the_next_batch(tmp_path):
    class Counts(Callback):
        order = -5

        def before_fit(self):
            self.n, self.log = 0, ["before_fit"]

        def before_epoch(self):
            self.log.append("before_epoch")

        def before_train(self):
            self.log.append("before_train")

        def before_batch(self):
            self.log.append("before_batch")

        def after_batch(self):
            self.n += self.training

        def state_dict(self):
            return {"n": self.n}

        def load_state_dict(self, state):
            self.log.append("load")
            self.n = state["n"]

    train(learner, 2, Checkpoint(tmp_path, every=2, keep=9), counts := Counts())
    assert counts.n == 10
    go_on(learner, 2, counts, resume=tmp_path / "epoch-0001-batch-000002.pt")
    assert counts.n == 10
    assert counts.log[:5] == ["before_fit", "before_epoch", "before_train", "load", "before_batch"]
    assert counts.log.count("load") == 1
    go_on(learner, 2, counts, resume=tmp_path / "epoch-0001.pt")
    assert counts.n == 10
    assert counts.log[:5] == ["before_fit", "load", "before_epoch", "before_train", "before_batch"]


def test_the_best_is_remembered_over_the_interruption(tmp_path):
    def scores(values):
        return Callback(name="scores", after_epoch=lambda cb: cb.learn.row.update(score=values[cb.epoch]))

    train(learner, 2, Checkpoint(tmp_path, monitor="score"), scores([9, 1]))
    best = (tmp_path / "best.pt").read_bytes()
    saving = Checkpoint(tmp_path, monitor="score")
    go_on(learner, 4, saving, scores([9, 1, 5, 6]), resume="latest")
    assert saving.best == 9
    assert (tmp_path / "best.pt").read_bytes() == best
    resumed = go_on(learner, 4, scores([9, 1, 5, 6]), resume=tmp_path / "best.pt")
    assert differing(outcome(train(learner, 4, scores([9, 1, 5, 6]))), outcome(resumed)) == []


def test_a_fit_that_writes_no_more_files_goes_on_without_a_warning(tmp_path):
    train(learner, 1, Checkpoint(tmp_path))
    resumed = train(learner, 2, resume=tmp_path / "epoch-0001.pt", seed=1)
    assert differing(outcome(train(learner, 2)), outcome(resumed)) == []


def test_state_of_callbacks_that_are_missing_is_warned_of(tmp_path):
    train(lambda: learner(cbs=EMA(0.9)), 1, Checkpoint(tmp_path))
    with pytest.warns(UserWarning, match="ema"):
        go_on(learner, 2, Checkpoint(tmp_path), resume="latest")


def test_callbacks_that_are_new_begin_anew(tmp_path):
    train(learner, 1, Checkpoint(tmp_path))
    resumed = go_on(lambda: learner(cbs=GradientClip()), 2, Checkpoint(tmp_path), resume="latest")
    assert len(resumed.gradient_clip.norms) == 5


def test_a_resumed_fit_goes_on_with_its_own_rate(tmp_path):
    train(learner, 1, Checkpoint(tmp_path))
    resumed = go_on(lambda: learner(lr=0.9), 2, Checkpoint(tmp_path), resume="latest")
    assert resumed.recorder.lrs == [0.05] * 10
    assert fit(learner(), 3, lr=0.9, cbs=Checkpoint(tmp_path), resume="latest").recorder.lrs == [0.05] * 15
