"""Fetches of batches: the time for which a training waits for data."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, Self, TypeVar

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


_hooks: dict[FetchListener, CallHook] = {}


def follow_loaders(listener: FetchListener) -> None:
    """Notifies `listener` of each fetch from a DataLoader in this thread, until `leave_loaders`.

    Of nested fetches only the outermost counts. A DataLoader has no hooks: while there are listeners, the
    `__next__` of its iterators is wrapped; afterwards it is torch's own again.
    """

    def observed(iterator: Any) -> Observer:
        listener.begin()
        try:
            yield
        finally:
            listener.end()

    leave_loaders(listener)
    _hooks[listener] = CallHook(DataLoaderIter, "__next__", observed, print_error, nested=False)


def leave_loaders(listener: FetchListener) -> None:
    """Undoes `follow_loaders`; a second call does nothing."""
    if (hook := _hooks.pop(listener, None)) is not None:
        hook.remove()


def print_error(error: Exception) -> None:
    """Prints an error of a listener, as Python does where it cannot raise one."""
    shown = {"exc_type": type(error), "exc_value": error, "exc_traceback": error.__traceback__}
    sys.unraisablehook(SimpleNamespace(**shown, err_msg="Exception ignored in hookcb", object=None))
