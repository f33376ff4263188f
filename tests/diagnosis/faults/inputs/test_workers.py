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
from tests.support import each, first, fit, in_turn

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


@pytest.mark.parametrize("train", first([by_learner, by_watch]))
def test_generators_that_are_copied_into_workers_are_found(train):
    assert found(train(DataLoader(Noisy(), 8, num_workers=2))) == [("random.workers", "warning")]


@pytest.mark.slow
@pytest.mark.parametrize("train", [by_learner, by_watch])
def test_workers_that_give_the_same_samples_are_found(train):
    assert found(train(DataLoader(Stream(), 8, num_workers=2))) == [("data.workers", "warning")]


@pytest.mark.slow
def test_the_same_numbers_in_each_epoch_are_a_note():
    assert found(by_learner(DataLoader(Noisy(), 8, num_workers=1))) == [("random.workers", "info")]


def seed_worker(i):
    get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())


class Augmented(Noisy):
    """Changes samples with numbers of a global generator."""

    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, i):
        return X[i] + self.draw(), X[i].sum()[None]


def of_numpy():
    return float(np.random.standard_normal())


def of_torch():
    return torch.randn(4)


def one_seed(i):
    np.random.seed(0)


def seed_of_worker(i):
    np.random.seed(40 + i)


@pytest.mark.slow
@pytest.mark.parametrize("train", [by_learner, by_watch])
def test_one_seed_for_all_workers_is_found(train):
    loader = DataLoader(Augmented(of_numpy), 8, shuffle=True, num_workers=2, worker_init_fn=one_seed)
    verdict = train(loader)
    assert found(verdict) == [("random.workers", "warning")]
    text = next(x.message for x in verdict.findings if x.code == "random.workers")
    assert "the global generator of numpy.random, with which 2 workers begin in the same state" in text


@pytest.mark.slow
def test_one_seed_for_each_epoch_is_a_note_if_samples_are_shuffled():
    given = {"num_workers": 2, "worker_init_fn": seed_of_worker}
    assert found(by_learner(DataLoader(Augmented(of_numpy), 8, shuffle=True, **given))) == [
        ("random.workers", "info")
    ]
    kept = DataLoader(Augmented(of_numpy), 8, shuffle=True, persistent_workers=True, **given)
    assert found(by_learner(kept)) == []


def test_a_seed_of_a_generator_that_is_not_used_is_right():
    loader = DataLoader(Augmented(of_torch), 8, num_workers=2, worker_init_fn=one_seed)
    assert found(by_learner(loader)) == []


class OfSample(Noisy):
    """Has a seed for each sample."""

    def __getitem__(self, i):
        np.random.seed(i)
        return X[i] + of_numpy(), X[i].sum()[None]


def by_initial_seed(i):
    np.random.seed(torch.initial_seed() % 2**32)


RIGHT = {
    "seeds of samples": lambda: DataLoader(OfSample(), 8, num_workers=2, worker_init_fn=one_seed),
    "initial seed": lambda: DataLoader(Augmented(of_numpy), 8, num_workers=2, worker_init_fn=by_initial_seed),
    "seeds of torch": lambda: DataLoader(Augmented(of_numpy), 8, num_workers=2),
    "seeded": lambda: DataLoader(Noisy(), 8, num_workers=2, worker_init_fn=seed_worker),
    "not used": lambda: DataLoader(Plain(), 8, num_workers=2),
    "split": lambda: DataLoader(Split(), 8, num_workers=2),
    "no workers": lambda: DataLoader(Noisy(), 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", each(3, RIGHT))
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


def hashed(i):
    return (torch.initial_seed() + i) % 2**32


def by_helper(i):
    np.random.seed(hashed(i))


def by_import(i):
    from tests import support

    np.random.seed(support.SEED + i)


class Reseeding:
    def __call__(self, i):
        np.random.seed(i)


NOISY = Noisy()


def by_global(i):
    NOISY.rng = np.random.default_rng(i)


@pytest.mark.slow
@pytest.mark.parametrize("init", [by_initial_seed, by_helper])
def test_a_worker_init_fn_that_seeds_another_generator_leaves_the_copies(init):
    verdict = by_learner(DataLoader(Noisy(), 8, num_workers=2, worker_init_fn=init))
    assert ("random.workers", "warning") in found(verdict)
    causes = next(x.causes for x in verdict.findings if x.code == "random.workers")
    assert "a worker_init_fn that seeds other generators than this one" in causes


@in_turn("init", [by_import, by_global, Reseeding(), seed_worker, lambda i: X])
def test_a_worker_init_fn_that_may_reach_the_dataset_is_right(init):
    assert pass_of(DataLoader(NOISY, 8, num_workers=2, worker_init_fn=init)).may_reseed


def test_without_a_worker_init_fn_nothing_may_reseed():
    assert not pass_of(DataLoader(NOISY, 8, num_workers=2)).may_reseed
