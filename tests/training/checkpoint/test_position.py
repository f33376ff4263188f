"""The samples left of an epoch are divided among any number of ranks: none is repeated, none left out."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hookcb.training.checkpoint.position import Position, check_position, rest_of_epoch
from tests.support import in_turn


def loader(rank, world, n=48, per_batch=4, dataset_seed=0, epoch=3, **kwargs):
    dataset = TensorDataset(torch.arange(n))
    sampler = DistributedSampler(dataset, world, rank, seed=dataset_seed, **kwargs)
    sampler.set_epoch(epoch)
    return DataLoader(dataset, per_batch, sampler=sampler)


def samples(batches):
    return [int(i) for (x,) in batches for i in x]


def begin(world, n_batches, took_over=None, position=None, **kwargs):
    """The samples of the first batches on all ranks, and the position after them."""
    seen, saved = [], None
    for rank in range(world):
        dl = loader(rank, world, **kwargs)
        batches, at = (dl, Position()) if position is None else rest_of_epoch(position, dl)
        seen += samples(list(batches)[:n_batches])
        saved = at.saved(SimpleNamespace(dl=dl, iter=at.batches + n_batches - 1))
    return seen, saved


@in_turn("worlds", [(2, 1), (2, 4), (1, 3), (4, 2, 1), (3, 1, 2)])
@in_turn("shuffle", [True, False])
def test_each_sample_is_seen_once_whoever_goes_on(worlds, shuffle):
    seen, position = [], None
    for world in worlds:
        some, position = begin(world, 1, position=position, shuffle=shuffle)
        seen += some
    left, _ = begin(2, 99, position=position, shuffle=shuffle)
    assert sorted(seen + left) == list(range(48))


def test_what_does_not_divide_is_repeated_as_by_the_sampler_or_left_out_as_with_its_drop_last():
    _, position = begin(1, 1, n=15)
    assert position["samples"] == 4
    left = [samples(rest_of_epoch(position, loader(rank, 4, n=15))[0]) for rank in range(4)]
    assert [len(x) for x in left] == [3] * 4
    assert len({i for x in left for i in x}) == 11
    left = [samples(rest_of_epoch(position, loader(rank, 4, n=15, drop_last=True))[0]) for rank in range(4)]
    assert [len(x) for x in left] == [2] * 4


def test_an_epoch_of_which_nothing_is_left_has_no_batches():
    _, position = begin(2, 99)
    assert list(rest_of_epoch(position, loader(0, 3))[0]) == []


def test_the_loader_stays_as_it_was_and_batches_count_on():
    _, position = begin(2, 3)
    dl = loader(0, 1)
    whole = samples(dl)
    rest, began = rest_of_epoch(position, dl)
    assert began.batches == 6
    assert samples(rest) == whole[24:]
    assert samples(dl) == whole


def test_a_loader_with_workers_goes_on():
    _, position = begin(2, 3)
    dl = loader(0, 1)
    with_worker = DataLoader(dl.dataset, 4, sampler=dl.sampler, num_workers=1, persistent_workers=True)
    assert samples(rest_of_epoch(position, with_worker)[0]) == samples(dl)[24:]


def test_other_data_or_another_order_is_an_error_that_says_what_differs():
    _, position = begin(2, 1)
    check_position(position, loader(0, 1))
    with pytest.raises(ValueError, match="48 samples, but this training loader has 40"):
        check_position(position, loader(0, 1, n=40))
    with pytest.raises(
        ValueError, match="0 as seed of its DistributedSampler, but this training loader has 1"
    ):
        check_position(position, loader(0, 1, dataset_seed=1))
    with pytest.raises(ValueError, match="must be a DataLoader with a DistributedSampler"):
        check_position(position, DataLoader(TensorDataset(torch.arange(48)), 4))
    with pytest.raises(ValueError, match="nobody knows which samples are left"):
        check_position(None, loader(0, 1))


def test_a_loader_without_the_sampler_has_no_position():
    dl = DataLoader(TensorDataset(torch.arange(48)), 4)
    assert Position().saved(SimpleNamespace(dl=dl, iter=1)) is None
