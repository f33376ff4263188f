"""Fetches of batches: the time for which a training waits for data."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, Protocol, Self, TypeVar

from hookcb.core.threads import locked, this_thread
from hookcb.core.torch_private import DataLoaderIter

T = TypeVar("T")


class FetchListener(Protocol):
    """Is notified of fetches."""

    def begin(self) -> None:
        """Called when a fetch begins."""

    def end(self) -> None:
        """Called when the fetch has ended, also by an error."""


class ObservedFetches(Iterator[T]):
    """Iterates over batches, and notifies listeners of each fetch; keeps no batch alive.

    Args:
        batches: iterable of batches.
        listeners: notified of each fetch.
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


# ---- DataLoaders, in loops that hookcb does not run


class _Follower:
    """Notifies a listener of the fetches of one thread; of nested fetches, only of the outermost."""

    def __init__(self, listener: FetchListener) -> None:
        self.listener = listener
        self._thread, self._depth = this_thread(), 0

    def in_loop_thread(self) -> bool:
        """Whether the current thread is the one that is followed."""
        return this_thread() == self._thread

    def begin(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self.listener.begin()

    def end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.listener.end()


_followers: tuple[_Follower, ...] = ()  # replaced as a whole, as fetches in other threads read it
_wrapper: Callable[[Any], Any] | None = None  # takes the place of torch's method while there are followers


def follow_loaders(listener: FetchListener) -> None:
    """Notifies `listener` of each fetch from a DataLoader in this thread, until `leave_loaders`.

    A DataLoader has no hooks. While there are listeners, the `__next__` of its iterators is wrapped;
    afterwards it is torch's own again.
    """
    global _followers, _wrapper
    with locked():
        _followers = (*_followers, _Follower(listener))
        if _wrapper is None:
            _wrapper = _notifying(DataLoaderIter.__next__)
            DataLoaderIter.__next__ = _wrapper  # type: ignore[method-assign, assignment]


def leave_loaders(listener: FetchListener) -> None:
    """Undoes `follow_loaders`; a second call does nothing."""
    global _followers, _wrapper
    with locked():
        _followers = tuple(x for x in _followers if x.listener is not listener)
        # if other code has wrapped it since, ours is called by theirs and cannot be removed
        if not _followers and _wrapper is not None and DataLoaderIter.__next__ is _wrapper:
            DataLoaderIter.__next__ = _wrapper.__wrapped__  # type: ignore[attr-defined, method-assign]
            _wrapper = None


def _notifying(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(fetch)
    def __next__(self: Any) -> Any:
        notified: list[_Follower] = []
        try:
            for follower in _followers:
                if follower.in_loop_thread():
                    notified.append(follower)
                    follower.begin()
            return fetch(self)
        finally:
            for follower in notified:
                follower.end()

    return __next__
