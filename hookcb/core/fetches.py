"""Fetches of batches: the time for which a training waits for data."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, Protocol, Self, TypeVar

from torch.utils.data import DataLoader

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


class _Followed:
    """Method of torch whose calls are reported; while nobody follows them, it is torch's own.

    Args:
        owner: the class.
        name: the method.
    """

    def __init__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name
        self._followers: tuple[_Follower, ...] = ()  # replaced as a whole, as other threads read it
        self._wrapper: Any = None

    def follow(self, listener: FetchListener) -> None:
        with locked():
            self._followers = (*self._followers, _Follower(listener))
            if self._wrapper is None:
                self._wrapper = self._notifying(getattr(self._owner, self._name))
                setattr(self._owner, self._name, self._wrapper)

    def leave(self, listener: FetchListener) -> None:
        with locked():
            self._followers = tuple(x for x in self._followers if x.listener is not listener)
            # if other code has wrapped it since, ours is called by theirs and cannot be removed
            is_ours = self._wrapper is not None and getattr(self._owner, self._name) is self._wrapper
            if not self._followers and is_ours:
                setattr(self._owner, self._name, self._wrapper.__wrapped__)
                self._wrapper = None

    def _notifying(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(method)
        def notifying(loader: Any) -> Any:
            notified: list[_Follower] = []
            try:
                for follower in self._followers:
                    if follower.in_loop_thread():
                        notified.append(follower)
                        follower.begin()
                return method(loader)
            finally:
                for follower in notified:
                    follower.end()

        return notifying


_fetches, _starts = _Followed(DataLoaderIter, "__next__"), _Followed(DataLoader, "__iter__")


def follow_loaders(listener: FetchListener) -> None:
    """Notifies `listener` of each fetch from a DataLoader in this thread, until `leave_loaders`.

    A DataLoader has no hooks. While there are listeners, the `__next__` of its iterators is wrapped;
    afterwards it is torch's own again.
    """
    _fetches.follow(listener)


def leave_loaders(listener: FetchListener) -> None:
    """Undoes `follow_loaders`; a second call does nothing."""
    _fetches.leave(listener)


def follow_starts(listener: FetchListener) -> None:
    """Notifies `listener` of each start of a DataLoader's iterator, and of its workers, likewise."""
    _starts.follow(listener)


def leave_starts(listener: FetchListener) -> None:
    """Undoes `follow_starts`; a second call does nothing."""
    _starts.leave(listener)
