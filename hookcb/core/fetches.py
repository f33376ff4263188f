"""Fetches of batches: the time for which a training waits for data."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, Self, TypeVar

from torch.utils.data import DataLoader

from hookcb.core.call_hook import CallHook, Observer
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


class _Followed:
    """Method of DataLoaders whose calls are reported; see `CallHook`.

    Args:
        owner: the class.
        name: the method.
    """

    def __init__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name
        self._hooks: dict[FetchListener, CallHook] = {}

    def follow(self, listener: FetchListener) -> None:
        """Notifies a listener of calls in this thread; of nested ones, only of the outermost."""

        def observed(loader: Any) -> Observer:
            listener.begin()
            try:
                yield
            finally:
                listener.end()

        self.leave(listener)
        self._hooks[listener] = CallHook(self._owner, self._name, observed, _show, nested=False)

    def leave(self, listener: FetchListener) -> None:
        if (hook := self._hooks.pop(listener, None)) is not None:
            hook.remove()


def _show(error: Exception) -> None:
    """Prints an error of a listener, as Python does where it cannot raise one."""
    shown = {"exc_type": type(error), "exc_value": error, "exc_traceback": error.__traceback__}
    sys.unraisablehook(SimpleNamespace(**shown, err_msg="Exception ignored in hookcb", object=None))


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
