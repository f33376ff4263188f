"""SWA averages the weights at the end of each of the last epochs."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from hookcb import SWA, Callback, CancelFitException, Checkpoint, Learner, OneCycle
from tests.support import fit, in_turn
from tests.training.support import batches_of

N = 6


def normed(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def learner(cbs=(), batches=None, lr=0.1):
    batches = batches_of([8, 8, 8]) if batches is None else batches
    return Learner((batches, batches_of([4])), normed(), nn.functional.mse_loss, SGD, lr=lr, cbs=cbs)


def by_hand(start, lr, anneal):
    model, batches = normed(), batches_of([8, 8, 8])
    opt = SGD(model.parameters(), lr=0.1)
    averaged, rates, lrs = AveragedModel(model), SWALR(opt, lr, anneal), []
    for epoch in range(N):
        model.train()
        for x, y in batches:
            lrs.append(opt.param_groups[0]["lr"])
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        if epoch >= start:
            averaged.update_parameters(model)
        if epoch + 1 >= start:
            rates.step()
    update_bn(batches, averaged)
    return model, averaged.module, lrs


def same(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@in_turn(("start", "first"), [(3, 3), (0.5, 3), (0, 0), (5, 5)])
@in_turn("anneal", [0, 2])
def test_it_is_that_of_torch_by_hand(start, first, anneal):
    learn = learner(SWA(start, lr=0.02, anneal_epochs=anneal))
    fit(learn, N)
    model, averaged, lrs = by_hand(first, 0.02, anneal)
    assert same(learn.model, model)
    assert same(learn.swa.model, averaged)
    assert learn.recorder.lrs == pytest.approx(lrs)
    assert learn.swa.n_averaged == N - first
    assert learn.opt.param_groups[0]["lr"] == 0.1  # as before the fit
    assert not learn.swa.model.training


def test_without_a_rate_training_is_as_without_it():
    plain, averaged = learner(), learner(SWA(2))
    before = torch.get_rng_state()
    fit(plain, N)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    fit(averaged, N)
    assert torch.equal(after, torch.get_rng_state())
    assert same(plain.model, averaged.model)
    assert not same(averaged.swa.model, averaged.model)


def test_a_resumed_fit_has_the_same_average(tmp_path):
    whole = learner(SWA(1, lr=0.02, anneal_epochs=2))
    fit(whole, N)

    class Stop(Callback):
        def before_epoch(self):
            if self.epoch == 3:
                raise KeyboardInterrupt

    stopped = learner([SWA(1, lr=0.02, anneal_epochs=2), Checkpoint(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, N, cbs=Stop())
    resumed = learner([SWA(1, lr=0.02, anneal_epochs=2), Checkpoint(tmp_path)])
    fit(resumed, N, resume="latest")
    assert same(whole.swa.model, resumed.swa.model)
    assert whole.recorder.lrs == resumed.recorder.lrs


def test_a_loader_that_can_be_read_once_leaves_the_statistics(recwarn):
    batches = iter(batches_of([8] * 3))
    learn = learner(SWA(0), batches=batches)
    with pytest.warns(UserWarning, match="could not compute the statistics of batch norm anew"):
        fit(learn, 1)
    assert learn.swa.model[1].running_mean.abs().sum() > 0


def test_a_fit_that_is_stopped_has_the_statistics_too():
    def stop(cb):
        if cb.epoch == 2:
            raise CancelFitException

    learn = learner([SWA(1), Callback(after_epoch=stop, name="stop")])
    fit(learn, N)
    averaged = copy.deepcopy(learn.swa.model)
    update_bn(batches_of([8, 8, 8]), averaged)
    assert learn.swa.n_averaged == 2
    assert same(averaged, learn.swa.model)


def test_inputs_may_be_several_or_have_names():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(2, 1)

        def forward(self, a, b):
            return self.head(self.norm(a + b))

    torch.manual_seed(0)
    batches = [(torch.randn(4, 2), torch.randn(4, 2), torch.randn(4, 1)) for _ in range(3)]
    learn = Learner((batches, batches), Two(), nn.functional.mse_loss, SGD, lr=0.1, cbs=SWA(0))
    fit(learn, 2)
    means = torch.stack([(a + b).mean(0) for a, b, _ in batches]).mean(0)
    assert torch.allclose(learn.swa.model.norm.running_mean, means, atol=1e-6)


@in_turn(
    ("options", "told"),
    [
        ({"start": 1.5}, "start must be a number from 0 to 1"),
        ({"start": -1}, "start must be"),
        ({"lr": 0}, "lr must be a number"),
        ({"anneal_epochs": -1}, "anneal_epochs must be"),
    ],
)
def test_wrong_options_are_told(options, told):
    with pytest.raises(ValueError, match=told):
        SWA(**options)


def test_what_cannot_be_averaged_is_told_when_the_fit_begins():
    with pytest.raises(ValueError, match="SWA begins with epoch 7, but the last one is 1"):
        fit(learner(SWA(7)), 2)
    with pytest.raises(ValueError, match="sets the rate too"):
        fit(learner([SWA(0, lr=0.1), OneCycle(0.1)]), 2)
    with pytest.raises(AttributeError, match="before its first fit"):
        SWA().model  # noqa: B018
    fit(learner([SWA(0), OneCycle(0.1)]), 2)


def test_weights_of_a_checkpoint_are_those_that_were_trained(tmp_path):
    learn = learner([SWA(0), Checkpoint(tmp_path)])
    fit(learn, 2)
    other = learner()
    other.load(tmp_path / "epoch-0002.pt")
    assert same(other.model, learn.model)


def test_an_average_of_an_older_file_has_no_buffers_that_are_not_saved():
    learn = learner(SWA(0))
    learn.model.register_buffer("seen", torch.ones(()), persistent=False)
    fit(learn, 2)
    state = {"averaged": {name: x + 1 for name, x in learn.swa.model.state_dict().items()}, "n_averaged": 7}
    learn.swa.load_state_dict(state)
    assert all(torch.equal(x, state["averaged"][name]) for name, x in learn.swa.model.state_dict().items())
    assert learn.swa.n_averaged == 7
