"""A divided loader is as the one it is made from, but for its samples."""

from collections import namedtuple
from functools import partial

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from hookcb.processes.loaders import Share, divided, with_loaders
from tests.ranks.support import data
from tests.support import in_turn

SECOND = Share(2, 1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data(4))


class Named(DataLoader):
    """A loader with an argument of its own that is no attribute."""

    def __init__(self, dataset, batch_size, title, **options):
        super().__init__(dataset, batch_size, **options)


def collate(items):
    return torch.stack([x for x, _ in items])


def test_its_settings_stay():
    g = torch.Generator()
    options = {"num_workers": 2, "drop_last": True, "collate_fn": collate, "generator": g, "timeout": 5}
    options |= {"worker_init_fn": print, "persistent_workers": True, "prefetch_factor": 3}
    loader = DataLoader(data(11), 2, shuffle=True, **options)
    part, why = divided(loader, SECOND, training=True)
    assert why == ""
    assert {name: getattr(part, name) for name in options} == options
    assert (part.batch_size, len(part), part.sampler.shuffle) == (2, 3, True)
    assert part.dataset is loader.dataset


def test_a_batch_sampler_gives_the_batch_size():
    loader = DataLoader(data(11), batch_sampler=BatchSampler(RandomSampler(range(11)), 2, drop_last=True))
    part, why = divided(loader, SECOND, training=True)
    assert (part.batch_size, part.drop_last, part.sampler.shuffle, len(part), why) == (2, True, True, 3, "")


def test_validation_has_the_order_of_the_data():
    part, _ = divided(DataLoader(data(5), 2, shuffle=True), SECOND, training=False)
    assert list(part.sampler) == [1, 3, 0]


def test_a_distributed_sampler_stays():
    sampler = DistributedSampler(data(4), 2, 0)
    for loader in (
        DataLoader(data(4), 2, sampler=sampler),
        DataLoader(data(4), batch_sampler=BatchSampler(sampler, 2, False)),
    ):
        assert divided(loader, SECOND, training=True) == (loader, "")


@in_turn(
    ("make", "why"),
    [
        (lambda: [1, 2], "it is a list"),
        (lambda: DataLoader(Stream(), 2), "its dataset Stream is iterable"),
        (lambda: DataLoader(data(4), 2, sampler=SubsetRandomSampler([0, 1])), "sampler SubsetRandomSampler"),
        (lambda: DataLoader(data(4), 2, sampler=RandomSampler(data(4), True)), "draws with replacement"),
        (lambda: DataLoader(data(4), 2, sampler=SequentialSampler(range(3))), "its SequentialSampler"),
        (lambda: DataLoader(data(4), batch_size=None), "no batch_size"),
        (
            lambda: DataLoader(data(4), batch_sampler=[[0, 1], [2, 3]]),
            "batch sampler list",
        ),
        (lambda: Named(data(4), 2, title="mine"), "a Named cannot be made with a DistributedSampler"),
    ],
)
def test_what_cannot_be_divided_stays_and_says_why(make, why):
    loader = make()
    part, text = divided(loader, SECOND, training=True)
    assert part is loader
    assert why in text


def test_a_sequential_loader_is_not_shuffled():
    loader = DataLoader(data(6), 2, sampler=SequentialSampler(data(6)))
    assert list(divided(loader, SECOND, training=True)[0].sampler) == [1, 3, 5]


def test_other_attributes_of_the_loaders_stay():
    class Data:
        train, valid, n_classes = [1], [2], 7

    both = with_loaders(Data(), [3], [4])
    assert (both.train, both.valid, both.n_classes) == ([3], [4], 7)
    pair = namedtuple("Pair", "train valid")([1], [2])
    assert with_loaders(pair, [3], None) == ([3], None)
    with pytest.raises(AttributeError):
        partial(getattr, both)("missing")
