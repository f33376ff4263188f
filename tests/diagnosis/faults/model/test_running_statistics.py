"""Batch norms whose running statistics do not follow the batches."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import update_bn

from hookcb import Callback, Diagnose, Learner, watch
from hookcb.diagnosis.faults.model.running_statistics import RunningStatistics
from hookcb.diagnosis.run import Absent, Run, Skipped
from tests.diagnosis.faults.support import numbers
from tests.support import along, first, fit


def net(momentum=0.1, norm=nn.BatchNorm1d, **kwargs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), norm(8, momentum=momentum, **kwargs), nn.ReLU(), nn.Linear(8, 1))


def batches(n, size=16):
    return [(x, x.sum(1, keepdim=True)) for x in (3 + numbers(size, 4, seed=i) for i in range(n))]


def told(verdict):
    return [(x.severity, x.layer) for x in verdict.findings if x.code == "norm.running"]


def trained(model, n=30, n_valid=2, size=16, cbs=()):
    data = batches(n, size), batches(n_valid) if n_valid else None
    learn = Learner(data, model, F.mse_loss, torch.optim.SGD, lr=1e-3)
    return told(fit(learn, 1, cbs=[Diagnose("ignore", show=False), *cbs]).diagnose())


def watched(model, n=30, each=lambda: None):
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, opt, cbs=Diagnose("ignore", show=False)) as w:
        for x, y in batches(n):
            loss = F.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            each()
    return told(w.diagnose())


@pytest.mark.parametrize(("n", "how"), first(along([3, 30], [trained, watched])))
def test_statistics_that_stay_as_they_began_are_told_in_short_trainings_too(n, how):
    assert how(net(momentum=0.0), n) == [("error", "1")]


@pytest.mark.parametrize(
    ("model", "n", "n_valid", "found"),
    first(
        [
            (net(momentum=0.001), 150, 2, [("warning", "1")]),
            (net(momentum=0.001), 150, 0, [("info", "1")]),
            (net(momentum=0.001), 50, 2, []),  # too short to say
            (net(momentum=0.01), 150, 2, []),
            (net(momentum=0.99), 30, 2, [("warning", "1")]),
            (net(momentum=1.0), 30, 2, []),
            (net(momentum=None), 30, 2, []),  # a cumulative average
            (net(track_running_stats=False), 30, 2, [("info", "1")]),
            (net(track_running_stats=False), 30, 0, []),
            (net(), 30, 2, []),
            (nn.Sequential(nn.Linear(4, 1)), 30, 2, []),
        ]
    ),
)
def test_a_momentum_of_another_framework_is_told_and_usual_ones_are_not(model, n, n_valid, found):
    model = pickle.loads(pickle.dumps(model))
    assert trained(model, n, n_valid) == found


@pytest.mark.parametrize(
    ("momentum", "n", "found"),
    first(
        [
            (lambda i: 0.1 / (i + 1), 200, [("warning", "1")]),
            (lambda i: 0.5 * 0.9**i, 200, [("warning", "1")]),
            (lambda i: 0.5 * 0.9**i, 90, []),  # too short to say
            (lambda i: max(0.01, 0.5 * 0.5 ** (i // 20)), 200, []),  # as PointNet++
            (lambda i: 1 / (i + 1), 200, []),  # a cumulative average
            (lambda i: 0.1 if i < 8 else 0.0, 200, [("info", "1")]),  # a freeze
            (lambda i: None if i % 2 else 0.1, 200, []),
        ]
    ),
)
def test_a_momentum_that_decays_too_fast_is_told(momentum, n, found):
    class Schedule(Callback):
        i = 0

        def after_step(self):
            self.i += 1
            self.model[1].momentum = momentum(self.i)

    assert trained(net(momentum(0)), n, cbs=[Schedule()]) == found


def test_the_noise_of_large_batches_is_small():
    assert trained(net(momentum=0.99), size=400) == []


@pytest.mark.slow
def test_loaded_statistics_that_stay_are_a_note_and_frozen_ones_are_not():
    model = net(momentum=0.0)
    model[1].running_mean.fill_(2.0)
    assert watched(model) == [("info", "1")]
    model[1].momentum = 0.1
    model[1].eval().requires_grad_(False)
    assert watched(model) == []


@pytest.mark.slow
def test_a_momentum_that_is_zero_in_every_second_forward_is_not_told():
    model = net()

    def twice():  # as sharpness-aware minimization does
        model[1].momentum = 0.0
        model(numbers(16, 4)).sum().backward()
        model[1].momentum = 0.1

    assert watched(model, each=twice) == []


@pytest.mark.slow
def test_statistics_that_are_put_back_are_told_and_those_computed_anew_are_not():
    model = net()

    def put_back():
        model[1].running_mean.zero_()
        model[1].running_var.fill_(1.0)

    assert watched(model, each=put_back) == [("error", "1")]
    model = net()
    assert watched(model, each=lambda: update_bn([x for x, _ in batches(2)], model)) == []


def test_the_cause_is_named_and_nothing_is_kept():
    model = net(momentum=0.0)
    learn = Learner(batches(10), model, F.mse_loss, torch.optim.SGD, lr=1e-3)
    verdict = fit(learn, 1, cbs=Diagnose("ignore", show=False)).diagnose()
    assert verdict.primary.code == "norm.running"
    assert "momentum" in verdict.primary.causes[0]
    assert pickle.loads(pickle.dumps(learn.diagnosis.evidence().measured(RunningStatistics)))


def test_without_anything_seen_nothing_is_ruled_out():
    assert [type(x) for x in RunningStatistics().findings(Run())] == [Skipped]
    fault = RunningStatistics()
    fault.on_model(Run(loop=type("Loop", (), {"model": nn.Linear(2, 2)})))
    assert [type(x) for x in fault.findings(Run())] == [Absent]


@pytest.mark.parametrize("norm", first([nn.InstanceNorm1d(4), nn.GroupNorm(2, 4)]))
def test_other_norms_have_no_running_statistics(norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 4, 1), norm, nn.Flatten(), nn.Linear(16, 1))
    assert trained(model) == []
