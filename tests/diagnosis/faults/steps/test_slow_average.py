"""average.slow: averages of the weights that are evaluated."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookcb import EMA, Diagnose, Learner, watch
from hookcb.diagnosis.faults.steps.slow_average import SlowAverage
from hookcb.diagnosis.measurements.copies import Copies
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.testing import assert_no_hooks
from tests.diagnosis.support import measured, only
from tests.support import first


@pytest.fixture(autouse=True)
def no_models_of_other_tests():
    """Copies are looked for among all modules in memory, also those that wait for garbage collection."""
    gc.collect()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def data():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(160, 8, generator=rng)
    return x, x[:, :1] + x[:, 1:2]


def follow(average_of, update, every=10, n_epoch=5, trains=False):
    """Trains in a loop, and calls an average without gradients after so many steps."""
    x, y = data()
    model = net()
    average = average_of(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose(show=False)) as w:
        for _ in range(n_epoch):
            for i, (a, b) in enumerate(zip(x.split(16), y.split(16), strict=True)):
                w.report_loss(loss := F.mse_loss(model(a), b))
                opt.zero_grad()
                loss.backward()
                opt.step()
                update(average, model)
                if trains:
                    average(a)
                if i % every == every - 1:
                    with torch.no_grad():
                        average(x)
    return w, average


def by_hand(weight):
    def update(average, model):
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, weight)

    return update


def found(w):
    return [(x.code, x.severity) for x in w.diagnose().findings if x.code == "average.slow"]


def averaged(decay):
    return lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(decay))


@pytest.mark.parametrize(
    ("average_of", "update"),
    first(
        [
            (copy.deepcopy, by_hand(1e-3)),
            (averaged(0.999), lambda average, model: average.update_parameters(model)),
        ]
    ),
    ids=["by hand", "AveragedModel"],
)
def test_an_average_that_is_still_near_the_start_is_a_warning(average_of, update):
    w, average = follow(average_of, update)
    assert found(w) == [("average.slow", "warning")]
    finding = next(x for x in w.diagnose().findings if x.code == "average.slow")
    assert "evaluated at 5 batches" in finding.message
    assert "in 50 steps" in finding.message
    assert_no_hooks(average)


@pytest.mark.parametrize(
    ("average_of", "update", "options"),
    first(
        [
            (copy.deepcopy, by_hand(0.2), {}),
            (averaged(0.8), lambda average, model: average.update_parameters(model), {}),
            (copy.deepcopy, lambda average, model: None, {}),
            (copy.deepcopy, by_hand(1e-3), {"every": 1}),
            (copy.deepcopy, by_hand(1e-3), {"every": 100}),
            (copy.deepcopy, by_hand(1e-3), {"trains": True}),
        ]
    ),
    ids=["fast", "fast AveragedModel", "reference", "gives targets", "not evaluated", "trained"],
)
def test_other_copies_are_fine(average_of, update, options):
    assert found(follow(average_of, update, **options)[0]) == []


class Module(nn.Module):
    """A model with its average, which is that of a part of it, in a list."""

    def __init__(self, decay):
        super().__init__()
        self.net, self.decay = net(), decay
        self.averages = [copy.deepcopy(self.net).eval()]

    def forward(self, x):
        return self.net(x) if self.training else self.averages[0](x)

    def update(self):
        by_hand(1 - self.decay)(self.averages[0], self.net)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "is_each_step", "n"),
    [(0.98, False, 1), (0.98, True, 0), (0.6, False, 0)],
    ids=["once an epoch", "each step", "once an epoch with a low decay"],
)
def test_an_average_of_a_part_that_has_all_weights_is_judged(decay, is_each_step, n):
    x, y = data()
    model = Module(decay)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(10):
            for a, b in zip(x.split(8), y.split(8), strict=True):
                opt.zero_grad()
                w.report_loss(F.mse_loss(model(a), b)).backward()
                opt.step()
                if is_each_step:
                    model.update()
            if not is_each_step:
                model.update()
            with torch.no_grad():
                model.averages[0](x)
    assert found(w) == [("average.slow", "warning")] * n


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "expected"), [(0.9999, [("average.slow", "warning")]), (0.8, [])])
def test_the_ema_of_a_learner_is_judged_as_it_is_validated(decay, expected):
    x, y = data()
    batches = list(zip(x.split(16), y.split(16), strict=True))
    learn = Learner((batches, batches[:2]), net(), F.mse_loss, lr=1e-2)
    with learn.no_logging():
        learn.fit(5, cbs=[Diagnose(show=False), EMA(decay)])
    assert found(learn) == expected


@pytest.mark.slow
def test_looking_for_copies_changes_nothing():
    _, one = follow(copy.deepcopy, by_hand(1e-3))
    x, y = data()
    model = net()
    other = copy.deepcopy(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        for a, b in zip(x.split(16), y.split(16), strict=True):
            opt.zero_grad()
            F.mse_loss(model(a), b).backward()
            opt.step()
            by_hand(1e-3)(other, model)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_a_bare_run_is_not_judged_and_few_steps_are_not():
    assert isinstance(only(SlowAverage, Run()), Skipped)
    assert isinstance(only(SlowAverage, measured(Run(n_steps=10), Copies, moved=[(0.01, 3)])), Skipped)
    assert isinstance(
        only(SlowAverage, measured(Run(n_steps=50), Copies, moved=[(0.5, 3)], n_scans=1)), Passed
    )


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def stale(update, mode=False, freeze=False):
    """Severities of an average with batch norms that is evaluated, in eval mode or not."""
    x, y = data()
    model = normed()
    if freeze:
        model[1].eval()
    average = copy.deepcopy(model).train(mode)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i in range(60):
            a, b = x[i % 10 :: 10], y[i % 10 :: 10]
            opt.zero_grad()
            F.mse_loss(model(a), b).backward()
            opt.step()
            update(average, model)
            if i % 20 == 19:
                with torch.no_grad():
                    average(x)
    return [f.severity for f in w.diagnose().findings if f.code == "average.statistics"]


def with_buffers(average, model):
    by_hand(0.3)(average, model)
    for a, b in zip(average.buffers(), model.buffers(), strict=True):
        a.copy_(b)


@pytest.mark.slow
def test_an_average_that_is_evaluated_with_the_statistics_of_its_start_is_a_warning():
    assert stale(by_hand(0.3)) == ["warning"]


@pytest.mark.slow
def test_nothing_is_said_of_averages_whose_statistics_are_copied_or_not_used_or_frozen():
    assert stale(with_buffers) == []
    assert stale(by_hand(0.3), mode=True) == []
    assert stale(by_hand(0.3), freeze=True) == []
    assert stale(lambda average, model: None) == []  # a reference


@pytest.mark.slow
def test_statistics_that_update_bn_renews_before_an_evaluation_are_fine():
    from torch.optim.swa_utils import update_bn

    def update(average, model):
        by_hand(0.3)(average, model)
        update_bn([data()[0]], average)

    assert stale(update) == []
