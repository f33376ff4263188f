"""State that is easily forgotten is resumed too, the data go on where they were, callbacks get theirs."""

import itertools
import os
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
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

from hookcb import Callback, Metrics
from hookcb.training.checkpoint.callback import Checkpoint
from hookcb.training.checkpoint.folder import MARKER
from hookcb.training.checkpoint.state import checkpoints_in
from hookcb.training.clip import GradientClip
from hookcb.training.ema import EMA
from tests.support import each, fit, make_batches
from tests.training.checkpoint.support import (
    Net,
    check_resumes,
    dataset,
    differing,
    go_on,
    learner,
    outcome,
    shuffled,
    train,
    uninterrupted,
)

sgd = torch.optim.SGD


class Lazy(Net):
    """Makes a buffer that is not saved in its first forward, and lets it grow, as caches of positions do."""

    def forward(self, x):
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.cache = torch.cat([self.cache, self.cache[-1:] + 0.01])
        return super().forward(x) + self.cache.sum()


def test_a_buffer_that_is_made_on_the_way_is_resumed(tmp_path):
    check_resumes(lambda: learner(model=Lazy()), tmp_path)


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


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_checkpoints_of_one_time_are_in_the_order_of_their_places(tmp_path, suffix):
    places = ["epoch-0001", "epoch-0002-batch-000004", "epoch-0002-batch-000010", "epoch-0002"]
    for place in reversed(places):
        file = tmp_path / f"{place}{suffix}"
        if not suffix:
            file.mkdir()
            file /= MARKER
        file.touch()
        os.utime(file, (1.7e9, 1.7e9))
    assert [file.stem for file in checkpoints_in(tmp_path)] == places


def test_a_fit_that_writes_no_more_files_goes_on_without_a_warning(tmp_path):
    train(learner, 1, Checkpoint(tmp_path))
    resumed = train(learner, 2, resume=tmp_path / "epoch-0001.pt", seed=1)
    assert differing(uninterrupted(learner, 2), outcome(resumed)) == []


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


@pytest.mark.parametrize("name", each(2, LOADERS))
def test_the_data_goes_on_as_it_was_with(name, tmp_path):
    check_resumes(lambda: learner(LOADERS[name]()), tmp_path)


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


@pytest.mark.parametrize("own", each(2, [True, False]), ids=["own generator", "no generator"])
def test_random_changes_in_workers_go_on_as_they_were(tmp_path, own):
    def make():
        options = {"generator": generator()} if own else {}
        augmented = Augmented(all_of_them)
        return learner(DataLoader(augmented, 4, shuffle=True, num_workers=2, **options))

    check_resumes(make, tmp_path, files=slice(0, 2))


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

    check_resumes(make, tmp_path)


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
