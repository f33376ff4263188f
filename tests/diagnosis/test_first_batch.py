"""A loader is asked for its first batch, and does not notice."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookcb.diagnosis.first_batch import first_batch, preserve_loader, why_not_readable

X = torch.arange(12.0)[:, None]


class Stream(IterableDataset):
    def __iter__(self):
        yield from X


class Counting:
    """A loader that counts its passes."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        yield from X.split(4)


def shuffled(**kwargs):
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(X), 4, shuffle=True, generator=generator, **kwargs)


def test_a_loader_that_was_asked_gives_what_it_would_have_given():
    asked, other = shuffled(), shuffled()
    with preserve_loader(asked):
        seen = first_batch(asked)[0]
    batches = [batch for (batch,) in asked]
    assert torch.equal(torch.cat(batches), torch.cat([batch for (batch,) in other]))
    assert torch.equal(seen, batches[0])


def test_attributes_of_a_loader_and_random_numbers_are_put_back():
    loader, before = Counting(), torch.get_rng_state()
    with preserve_loader(loader):
        assert torch.equal(first_batch(loader), X[:4])
        torch.rand(3)
        assert loader.passes == 1
    assert loader.passes == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_no_worker_is_started_for_one_batch(monkeypatch):
    def start(self):
        raise AssertionError("a worker process")

    loader = shuffled(num_workers=2)
    monkeypatch.setattr(torch.multiprocessing.Process, "start", start)
    assert first_batch(loader)[0].shape == (4, 1)


def test_an_iterable_dataset_gives_whole_batches():
    assert torch.equal(first_batch(DataLoader(Stream(), 5)), X[:5])


def test_a_loader_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="has no batch"):
        first_batch([])


def test_what_can_be_asked_only_once_is_not_asked():
    assert "read only once" in why_not_readable(iter(X.split(4)))
    assert why_not_readable(X.split(4)) == why_not_readable(shuffled()) == ""
