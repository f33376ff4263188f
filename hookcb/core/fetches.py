"""Fetches of batches, told as they begin and end: what a training waits for, and nothing else."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from time import perf_counter
from typing import Any, Protocol, Self, TypeVar

from hookcb.core.torch_private import DataLoaderIter

T = TypeVar("T")


class FetchListener(Protocol):
    """Who is told of fetches."""

    def begin(self) -> None:
        """A fetch begins."""

    def end(self) -> None:
        """It has ended, also by an error."""


class FetchTimer:
    """Adds up the seconds that pass in fetches.

    >>> from hookcb.core.fetches import FetchTimer
    >>> timer = FetchTimer()
    >>> timer.begin()
    >>> timer.end()
    >>> timer.take() > 0, timer.take()
    (True, 0.0)
    """

    def __init__(self) -> None:
        self._seconds = self._began = 0.0

    def begin(self) -> None:
        """A fetch begins."""
        self._began = perf_counter()

    def end(self) -> None:
        """It has ended."""
        self._seconds += perf_counter() - self._began

    def take(self) -> float:
        """The seconds since this was asked last; 0.0 if there was no fetch."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class ToldFetches(Iterator[T]):
    """Gives what `batches` gives, and tells listeners of each fetch; it keeps no batch alive.

    Args:
        batches: to iterate over.
        listeners: who is told.
    """

    def __init__(self, batches: Iterable[T], listeners: Sequence[FetchListener]) -> None:
        self._batches, self._listeners = iter(batches), listeners

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        for listener in self._listeners:
            listener.begin()
        try:
            return next(self._batches)
        finally:
            for listener in self._listeners:
                listener.end()


# ---- DataLoaders, in loops that are not ours


class _Follower:
    """Follows the fetches of one thread; of those inside one another the outermost."""

    def __init__(self, listener: FetchListener) -> None:
        self.listener = listener
        self._thread, self._depth = threading.get_ident(), 0

    def in_loop_thread(self) -> bool:
        """Whether this is the thread that it follows."""
        return threading.get_ident() == self._thread

    def begin(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self.listener.begin()

    def end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.listener.end()


_lock = threading.Lock()
_followers: tuple[_Follower, ...] = ()  # replaced whole, as fetches in other threads read it
_own: Callable[[Any], Any] | None = None  # what stands in for torch's method while there are followers


def follow_loaders(listener: FetchListener) -> None:
    """Tells `listener` of each fetch from a DataLoader in this thread, until `leave_loaders`.

    A DataLoader has no hook. While somebody listens, the `__next__` of all its iterators is one that tells of
    it; afterwards it is torch's own again.
    """
    global _followers, _own
    with _lock:
        _followers = (*_followers, _Follower(listener))
        if _own is None:
            _own = _telling(DataLoaderIter.__next__)
            DataLoaderIter.__next__ = _own  # type: ignore[method-assign, assignment]


def leave_loaders(listener: FetchListener) -> None:
    """Ends what `follow_loaders` began; a second time does nothing."""
    global _followers, _own
    with _lock:
        _followers = tuple(x for x in _followers if x.listener is not listener)
        # if somebody has replaced it since, ours is called by theirs and cannot be taken out
        if not _followers and _own is not None and DataLoaderIter.__next__ is _own:
            DataLoaderIter.__next__ = _own.__wrapped__  # type: ignore[attr-defined, method-assign]
            _own = None


def _telling(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(fetch)
    def __next__(self: Any) -> Any:
        told: list[_Follower] = []
        try:
            for follower in _followers:
                if follower.in_loop_thread():
                    told.append(follower)
                    follower.begin()
            return fetch(self)
        finally:
            for follower in told:
                follower.end()

    return __next__
