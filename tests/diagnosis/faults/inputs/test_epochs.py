"""Random samples, and orders, that are the same in each epoch."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hookcb import Callback, Diagnose, Learner, watch
from hookcb.diagnosis.faults.inputs.epochs import RepeatedRandomNumbers
from hookcb.diagnosis.measurements.drawing import drawn, random_states
from hookcb.diagnosis.run import Run, Skipped
from tests.support import along, first, fit

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
CODES = ("random.epochs", "data.same_order")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Samples(Dataset):
    def __init__(self, change=lambda i: 0.0):
        self.change = change

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i] + self.change(i), X[i].sum()[None]


def of_torch(i):
    return torch.randn(4)


def of_sample(i):
    return torch.randn(4, generator=torch.Generator().manual_seed(i))


def with_seed_of_sample(i):
    np.random.seed(i)
    return float(np.random.standard_normal())


def seed_all(epoch):
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


def seed_worker(i):
    np.random.seed(40 + i)


def loader(change=lambda i: 0.0, shuffle=False, n_workers=0, init=None):
    return DataLoader(Samples(change), 8, shuffle=shuffle, num_workers=n_workers, worker_init_fn=init)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))


def by_watch(loader, begin=lambda epoch: None, n_epoch=3):
    model = make()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for epoch in range(n_epoch):
            begin(epoch)
            for x, y in loader() if callable(loader) else loader:
                opt.zero_grad()
                F.mse_loss(model(x), y).backward()
                opt.step()
        return w.diagnose()


class Begin(Callback):
    """Calls a function before each epoch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def before_train(self):
        self.function(self.epoch)


def by_learner(loader, begin=lambda epoch: None, n_epoch=3):
    learn = Learner(loader, make(), F.mse_loss, lr=1e-2)
    return fit(learn, n_epoch, cbs=[Begin(begin), Diagnose("ignore", show=False)]).diagnose()


def found(verdict):
    return [(x.code, x.severity) for x in verdict.findings if x.code in CODES]


def of_numpy(i):
    return float(np.random.standard_normal())


def of_python(i):
    return random.gauss(0, 1)


@pytest.mark.parametrize(
    ("train", "change"), first(along([by_watch, by_learner], [of_torch, of_numpy, of_python]))
)
def test_the_same_changes_in_each_epoch_are_found(train, change):
    verdict = train(loader(change), seed_all)
    assert found(verdict) == [("random.epochs", "warning")]
    text = next(x.message for x in verdict.findings if x.code == "random.epochs")
    assert text.startswith("The 8 batches from 8 on are those from 0 on, although random numbers of ")


@pytest.mark.slow
@pytest.mark.parametrize("train", [by_watch, by_learner])
def test_the_same_order_in_each_epoch_is_found(train):
    assert found(train(loader(shuffle=True), seed_all)) == [("data.same_order", "warning")]
    verdict = train(loader(of_torch, shuffle=True), seed_all)
    assert [(x.code, x.consequence_of) for x in verdict.findings if x.code in CODES] == [
        ("data.same_order", ""),
        ("random.epochs", "data.same_order"),
    ]


@pytest.mark.slow
def test_a_generator_that_is_made_anew_gives_the_same_order():
    def anew():
        return DataLoader(Samples(), 8, shuffle=True, generator=torch.Generator().manual_seed(0))

    assert found(by_watch(anew)) == [("data.same_order", "warning")]


@pytest.mark.slow
def test_the_same_changes_by_workers_are_found():
    assert found(by_watch(loader(of_torch, n_workers=2), seed_all)) == [("random.epochs", "warning")]
    seeded = loader(lambda i: float(np.random.standard_normal()), n_workers=2, init=seed_worker)
    verdict = by_watch(seeded)
    assert found(verdict) == [("random.epochs", "warning")]
    cause = next(x.causes for x in verdict.findings if x.code == "random.epochs")
    assert cause == ("a worker_init_fn that sets the same seeds in each epoch",)


def draw_batches(n, every, seeds):
    """Batches of random samples, with a validation every few batches that sets a seed."""
    model = make()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i in range(n):
            if i % every == 0:
                if seeds:
                    torch.manual_seed(1)
                with torch.no_grad():
                    model.eval()(X[torch.randint(64, (8,))])
                model.train()
            rows = torch.randint(64, (8,))
            opt.zero_grad()
            F.mse_loss(model(X[rows]), X[rows].sum(1, keepdim=True)).backward()
            opt.step()
        return w.diagnose()


@pytest.mark.slow
def test_a_validation_that_sets_a_seed_is_found_without_a_loader():
    assert found(draw_batches(40, 10, seeds=True)) == [("random.epochs", "warning")]
    assert found(draw_batches(40, 10, seeds=False)) == []
    assert found(draw_batches(40, 3, seeds=True)) == []  # too few batches in a row


RIGHT = {
    "new numbers": (loader(of_torch, shuffle=True), lambda epoch: None),
    "a seed for each epoch": (loader(of_torch, shuffle=True), torch.manual_seed),
    "fixed data": (loader(), seed_all),
    "fixed data without seeds": (loader(), lambda epoch: None),
    "generators of samples": (loader(of_sample), seed_all),
    "seeds of samples": (loader(with_seed_of_sample), lambda epoch: None),
    "seeds of samples in workers": (loader(with_seed_of_sample, n_workers=1), seed_all),
    "new numbers of workers": (loader(of_torch, shuffle=True, n_workers=2), lambda epoch: None),
    "one batch": ([next(iter(loader()))] * 8, seed_all),
}


@pytest.mark.parametrize(("name", "train"), first(along(RIGHT, [by_watch, by_learner])))
def test_other_epochs_are_right(train, name):
    assert found(train(*RIGHT[name])) == []


def test_a_training_that_begins_anew_is_right():
    model, data = make(), loader(of_torch, shuffle=True)
    with watch(model, Diagnose("ignore", show=False)) as w:
        for lr in (1e-3, 1e-2):
            opt = torch.optim.SGD(model.parameters(), lr=lr)
            torch.manual_seed(0)
            for x, y in data:
                opt.zero_grad()
                F.mse_loss(model(x), y).backward()
                opt.step()
        assert found(w.diagnose()) == []


def test_random_states_tell_which_generator_was_used():
    before = random_states()
    assert random_states() == before
    np.random.standard_normal()
    assert drawn(before, random_states()) == (False, False, True)
    random.random()
    torch.rand(1)
    assert drawn(before, random_states()) == (True, True, True)


def test_numpy_is_as_it_was_afterwards():
    seed = np.random.seed
    by_watch(loader(), n_epoch=1)
    assert np.random.seed == seed
    assert not hasattr(np.random.seed, "call_hooks")


def test_without_epochs_nothing_is_known():
    assert list(RepeatedRandomNumbers().findings(Run())) == [
        Skipped("no two epochs of four batches were seen")
    ]
