"""Workers of a DataLoader that draw the same random numbers, or give the same samples."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hookcb import Diagnose, Learner, watch
from hookcb.diagnosis.faults.inputs.workers import CopiedGenerators, UnshardedWorkers
from hookcb.diagnosis.measurements.loading import pass_of
from hookcb.diagnosis.run import Absent, Run
from tests.support import fit

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Noisy(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i] + torch.from_numpy(self.rng.standard_normal(4)).float(), X[i].sum()[None]


class Plain(Noisy):
    """Has used its generator, and uses it no more."""

    def __getitem__(self, i):
        return X[i], X[i].sum()[None]


class Stream(IterableDataset):
    def __iter__(self):
        for x in X:
            yield x, x.sum()[None]


class Split(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for x in X[info.id :: info.num_workers]:
            yield x, x.sum()[None]


def by_learner(loader):
    torch.manual_seed(0)
    learn = Learner(loader, nn.Linear(4, 1), F.mse_loss, lr=1e-3)
    return fit(learn, 2, cbs=Diagnose("ignore", show=False)).diagnose()


def by_watch(loader):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for _ in range(2):
            for x, y in loader:
                opt.zero_grad()
                F.mse_loss(model(x), y).backward()
                opt.step()
        return w.diagnose()


def found(verdict):
    return [(x.code, x.severity) for x in verdict.findings if x.code.endswith(".workers")]


@pytest.mark.parametrize("train", [by_learner, by_watch])
def test_generators_that_are_copied_into_workers_are_found(train):
    assert found(train(DataLoader(Noisy(), 8, num_workers=2))) == [("random.workers", "warning")]


@pytest.mark.parametrize("train", [by_learner, by_watch])
def test_workers_that_give_the_same_samples_are_found(train):
    assert found(train(DataLoader(Stream(), 8, num_workers=2))) == [("data.workers", "warning")]


def test_the_same_numbers_in_each_epoch_are_a_note():
    assert found(by_learner(DataLoader(Noisy(), 8, num_workers=1))) == [("random.workers", "info")]


def seed_worker(i):
    get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())


RIGHT = {
    "seeded": lambda: DataLoader(Noisy(), 8, num_workers=2, worker_init_fn=seed_worker),
    "not used": lambda: DataLoader(Plain(), 8, num_workers=2),
    "split": lambda: DataLoader(Split(), 8, num_workers=2),
    "no workers": lambda: DataLoader(Noisy(), 8),
}


@pytest.mark.parametrize("name", RIGHT)
def test_other_loaders_are_right(name):
    assert found(by_learner(RIGHT[name]())) == []


def test_what_a_pass_begins_with():
    held = pass_of(DataLoader(Noisy(), 8, num_workers=2)).held
    assert [name for name, _ in held] == ["Noisy.rng"]
    assert held == pass_of(DataLoader(Noisy(), 8, num_workers=1)).held
    assert pass_of(DataLoader(Plain(), 8)).held == ()
    assert pass_of(DataLoader(Stream(), 8)).is_unsharded
    assert not pass_of(DataLoader(Split(), 8)).is_unsharded


@pytest.mark.parametrize("fault", [CopiedGenerators, UnshardedWorkers])
def test_without_workers_there_is_nothing_to_see(fault):
    (result,) = fault().findings(Run())
    assert isinstance(result, Absent)
