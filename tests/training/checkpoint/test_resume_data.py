"""The data goes on where it was: the same samples in the same order, changed by the same random numbers."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

from hookcb import Callback
from hookcb.training.checkpoint.callback import Checkpoint
from tests.support import make_batches
from tests.training.checkpoint.support import check_resumes, dataset, go_on, learner, shuffled, train


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


class Augmented(Dataset):
    """Changes its samples at random; `noise` gives a number."""

    def __init__(self, noise, n=18):
        self.samples, self.noise = dataset(n), noise

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        x, y = self.samples[i]
        return x + self.noise(), y


class WithGenerator(Augmented):
    """Keeps random numbers of its own."""

    def __init__(self, rng, draw):
        super().__init__(None)
        self.rng, self.noise = rng, lambda: draw(self.rng)


class Transform:
    """A random change with random numbers of its own, as an attribute of a dataset."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self):
        return self.rng.normal()


def all_of_them():
    return torch.randn(()) + random.random() + np.random.rand()


OWN = {
    "torch's": lambda: WithGenerator(generator(), lambda g: torch.randn((), generator=g)),
    "Python's": lambda: WithGenerator(random.Random(0), lambda g: g.random()),
    "NumPy's": lambda: WithGenerator(np.random.default_rng(0), lambda g: g.normal()),
    "NumPy's older": lambda: WithGenerator(np.random.RandomState(0), lambda g: g.rand()),
}


class Custom:
    """A loader written by hand, of batches in an order that `shuffle(rng, indices)` gives."""

    def __init__(self, rng, permutation):
        self.generator, self.permutation, self.batches = rng, permutation, make_batches(4)

    def __len__(self):
        return 4

    def __iter__(self):
        return (self.batches[i] for i in self.permutation(self.generator))


def permuted(rng):
    indices = list(range(4))
    rng.shuffle(indices)
    return indices


def drawn_one_by_one(rng):
    return (torch.randint(4, (), generator=rng).item() for _ in range(4))


class Unsized:
    """A loader of which nobody knows how many batches it gives; not always the same number."""

    def __iter__(self):
        return iter(make_batches(3 + torch.randint(3, ()).item(), seed=torch.randint(99, ()).item()))


class Stream(IterableDataset):
    def __iter__(self):
        for x, y in dataset(14):
            yield x + torch.randn(()), y


class Collate:
    """Changes whole batches at random."""

    def __init__(self):
        self.rng = random.Random(0)

    def __call__(self, samples):
        x, y = map(torch.stack, zip(*samples, strict=True))
        return x + self.rng.random(), y


class Wrapped:
    """A loader around a loader, as one that moves batches ahead to a GPU is."""

    def __init__(self):
        self.dl = shuffled(generator=generator())

    def __iter__(self):
        return iter(self.dl)


class OwnOrder(Sampler):
    """A sampler of users' own; it keeps its random numbers under a name of its own."""

    def __init__(self):
        self.my_numbers = generator()

    def __len__(self):
        return 18

    def __iter__(self):
        yield from torch.randperm(18, generator=self.my_numbers).tolist()


def of_batches(sampler):
    return DataLoader(dataset(), batch_sampler=BatchSampler(sampler, 4, drop_last=True))


def sampled(make):
    return DataLoader(dataset(), 4, sampler=make())


def subset():
    return DataLoader(random_split(OWN["NumPy's"](), [14, 4], generator())[0], 4, shuffle=True)


LOADERS = {
    "shuffling": shuffled,
    "shuffling with its own generator": lambda: shuffled(generator=generator()),
    "shuffling that drops the last": lambda: shuffled(drop_last=True),
    "replacement": lambda: sampled(lambda: RandomSampler(dataset(), replacement=True, num_samples=70)),
    "replacement with its own generator": lambda: sampled(
        lambda: RandomSampler(dataset(), replacement=True, num_samples=70, generator=generator())
    ),
    "weights": lambda: sampled(lambda: WeightedRandomSampler(torch.arange(1.0, 19), 18)),
    "weights with its own generator": lambda: sampled(
        lambda: WeightedRandomSampler(torch.arange(1.0, 19), 18, generator=generator())
    ),
    "a subset with its own generator": lambda: sampled(lambda: SubsetRandomSampler(range(10), generator())),
    "a sampler of batches": lambda: of_batches(RandomSampler(dataset(), generator=generator())),
    "a sampler by hand": lambda: sampled(OwnOrder),
    "changes by everybody's random numbers": lambda: DataLoader(Augmented(all_of_them), 4, shuffle=True),
    "a change that keeps its own": lambda: DataLoader(Augmented(Transform()), 4, shuffle=True),
    "a part of such": subset,
    "several such": lambda: DataLoader(ConcatDataset([OWN["NumPy's"](), OWN["torch's"]()]), 8),
    "changes of batches": lambda: DataLoader(dataset(), 4, collate_fn=Collate()),
    "a loader around another": Wrapped,
    **{
        f"changes by {whose} random numbers of its own": lambda whose=whose: DataLoader(OWN[whose](), 4)
        for whose in OWN
    },
    "torch's numbers by hand": lambda: Custom(generator(), lambda g: torch.randperm(4, generator=g).tolist()),
    "torch's numbers one by one": lambda: Custom(generator(), drawn_one_by_one),
    "Python's numbers by hand": lambda: Custom(random.Random(0), permuted),
    "NumPy's numbers by hand": lambda: Custom(np.random.default_rng(0), permuted),
    "everybody's numbers by hand": lambda: Custom(random, permuted),
    "plain lists": lambda: make_batches(4, last=2),
    "no length": Unsized,
    "a stream": lambda: DataLoader(Stream(), 4),
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_data_goes_on_as_it_was_with(name, tmp_path):
    check_resumes(lambda: learner(LOADERS[name]()), tmp_path, files=(0, 2, 4, 5, 6, 8))


def test_a_validation_that_shuffles_goes_on_as_it_was(tmp_path):
    check_resumes(lambda: learner(valid=shuffled(10)), tmp_path)


def test_a_generator_of_both_loaders_goes_on_as_it_was(tmp_path):
    def make():
        both = generator()
        return learner(shuffled(generator=both), valid=shuffled(10, generator=both))

    check_resumes(make, tmp_path)


def test_a_fit_without_validation_goes_on_as_it_was(tmp_path):
    check_resumes(lambda: learner(valid=None), tmp_path)


# ---- workers


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "no generator"])
def test_random_changes_in_workers_go_on_as_they_were(tmp_path, own):
    def make():
        options = {"generator": generator()} if own else {}
        augmented = Augmented(all_of_them)
        return learner(DataLoader(augmented, 4, shuffle=True, num_workers=2, **options))

    check_resumes(make, tmp_path, files=(1, 5, 9))


# ---- loaders with a state of their own


class Stateful:
    """Knows how far it is, as torchdata's StatefulDataLoader does; counts batches it really gave."""

    def __init__(self, n=4):
        self.batches, self.epoch, self.done, self.given = make_batches(n), 0, 0, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        order = torch.randperm(len(self.batches), generator=generator(self.epoch)).tolist()
        for i in order[self.done :]:
            self.done += 1
            self.given += 1
            yield self.batches[i]
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]


class Tape(Dataset):
    """A dataset with a state: what it gives depends on how often it was asked."""

    def __init__(self):
        self.samples, self.asked = dataset(), 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        self.asked += 1
        x, y = self.samples[i]
        return x / self.asked, y

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


def test_a_loader_with_a_state_of_its_own_goes_on_from_it(tmp_path):
    check_resumes(lambda: learner(Stateful()), tmp_path)


def test_a_loader_with_a_state_of_its_own_gives_no_batch_twice(tmp_path):
    train(lambda: learner(Stateful()), 2, Checkpoint(tmp_path, every=1, keep=99))
    resumed = go_on(lambda: learner(Stateful()), 2, resume=tmp_path / "epoch-0001-batch-000003.pt")
    assert resumed.dls.train.given == 1 + 4


def test_a_dataset_with_a_state_of_its_own_goes_on_from_it(tmp_path):
    check_resumes(lambda: learner(DataLoader(Tape(), 4, shuffle=True)), tmp_path)


def test_a_loader_that_gives_fewer_batches_than_were_trained_on_is_refused(tmp_path):
    train(lambda: learner(make_batches(4)), 1, Checkpoint(tmp_path, every=1, keep=9))
    with pytest.raises(ValueError, match="batch"):
        go_on(lambda: learner(make_batches(2)), 1, resume=tmp_path / "epoch-0001-batch-000003.pt")


# ---- nested uses of the data


def test_validations_between_batches_do_not_disturb_it(tmp_path):
    def make():
        look = Callback(name="look", after_batch=lambda cb: cb.training and cb.learn.validate())
        return learner(cbs=look, valid=shuffled(8))

    check_resumes(make, tmp_path, files=(0, 2, 4, 5, 6, 8))


def test_a_loader_of_one_batch_goes_on_as_it_was(tmp_path):
    check_resumes(lambda: learner(make_batches(1)), tmp_path, n_epoch=3)


def test_batches_of_an_epoch_come_once_each_over_the_interruption(tmp_path):
    def make(log):
        batches = shuffled()
        seen = itertools.count()
        learn = learner(batches)
        predict = learn.predict
        learn.predict = lambda: (log.append((next(seen), learn.x.clone())), predict())[1]
        return learn

    whole, saving = [], Checkpoint(tmp_path, every=1, keep=99)
    train(lambda: make(whole), 1, saving)
    resumed = []
    go_on(lambda: make(resumed), 1, resume=tmp_path / "epoch-0001-batch-000003.pt")
    assert len(resumed) == len(whole) - 3
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole[3:], resumed, strict=True))
