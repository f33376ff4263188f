"""Fetches of batches are told to who listens, and a DataLoader is otherwise torch's own."""

import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hookcb.core.fetches import ObservedFetches, follow_loaders, leave_loaders
from tests.support import SLEEP, Clock

TORCHS_OWN = _BaseDataLoaderIter.__next__


class FetchTimer:
    """Adds up the time spent in fetches."""

    def __init__(self):
        self._seconds = 0.0

    def begin(self):
        self._seconds -= time.perf_counter()

    def end(self):
        self._seconds += time.perf_counter()

    def take(self):
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture(autouse=True)
def torchs_own_is_put_back():
    yield
    assert _BaseDataLoaderIter.__next__ is TORCHS_OWN


def test_torchs_own_method_stands_unless_somebody_listens():
    timers = [FetchTimer(), FetchTimer()]
    for timer in timers:
        follow_loaders(timer)
        assert _BaseDataLoaderIter.__next__ is not TORCHS_OWN
    leave_loaders(timers[0])
    assert _BaseDataLoaderIter.__next__ is not TORCHS_OWN
    for _ in range(2):
        leave_loaders(timers[1])
        assert _BaseDataLoaderIter.__next__ is TORCHS_OWN


def test_batches_and_the_order_of_random_numbers_are_what_they_are_without():
    data = TensorDataset(torch.arange(64.0)[:, None])

    def drawn():
        torch.manual_seed(0)
        return [x.tolist() for (x,) in DataLoader(data, batch_size=8, shuffle=True)], torch.rand(1).item()

    plain, timer = drawn(), FetchTimer()
    follow_loaders(timer)
    try:
        assert drawn() == plain
    finally:
        leave_loaders(timer)
    assert timer.take() > 0


def test_an_iterator_that_began_before_is_seen_and_goes_on_afterwards():
    batches = iter(DataLoader(TensorDataset(torch.zeros(6, 1)), batch_size=2))
    next(batches)
    timer = FetchTimer()
    follow_loaders(timer)
    next(batches)
    leave_loaders(timer)
    assert timer.take() > 0
    next(batches)
    assert timer.take() == 0
    with pytest.raises(StopIteration):
        next(batches)


def test_fetches_of_another_thread_are_not_seen():
    timer = FetchTimer()
    follow_loaders(timer)
    try:
        data = DataLoader(TensorDataset(torch.zeros(6, 1)), batch_size=2)
        other = threading.Thread(target=lambda: list(data))
        other.start()
        other.join()
        assert timer.take() == 0
    finally:
        leave_loaders(timer)


def test_many_threads_may_listen_at_once():
    def listen():
        for _ in range(50):
            timer = FetchTimer()
            follow_loaders(timer)
            list(DataLoader(TensorDataset(torch.zeros(2, 1))))
            leave_loaders(timer)
            seconds.append(timer.take())

    seconds: list[float] = []
    threads = [threading.Thread(target=listen) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seconds) == 200
    assert min(seconds) > 0
    assert _BaseDataLoaderIter.__next__ is TORCHS_OWN


def test_an_error_of_the_dataset_is_the_users_and_ends_the_fetch(clock):
    class Broken(IterableDataset):
        def __iter__(self):
            clock.sleep()
            raise KeyError("of the user")
            yield

    timer = FetchTimer()
    follow_loaders(timer)
    try:
        with pytest.raises(KeyError, match="of the user"):
            next(iter(DataLoader(Broken(), batch_size=None)))
    finally:
        leave_loaders(timer)
    assert timer.take() == pytest.approx(SLEEP)


def test_a_replacement_by_somebody_else_stays(monkeypatch):
    timer = FetchTimer()
    follow_loaders(timer)
    ours, seen = _BaseDataLoaderIter.__next__, []
    _BaseDataLoaderIter.__next__ = lambda self: (seen.append(1), ours(self))[1]
    try:
        theirs = _BaseDataLoaderIter.__next__
        leave_loaders(timer)
        assert _BaseDataLoaderIter.__next__ is theirs
        follow_loaders(timer)
        list(DataLoader(TensorDataset(torch.zeros(2, 1))))
        assert timer.take() > 0
    finally:
        _BaseDataLoaderIter.__next__ = ours
        leave_loaders(timer)
    assert len(seen) == 3


def test_told_fetches_keep_no_batch_alive():
    made = []

    def generate():
        for _ in range(2):
            x = nn.Parameter(torch.zeros(1))
            made.append(weakref.ref(x))
            yield x
            del x

    batches = ObservedFetches(generate(), [FetchTimer()])
    first = next(batches)
    assert made[0]() is first
    del first
    next(batches)
    assert made[0]() is None
