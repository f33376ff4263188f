"""Methods and properties of a callback that are those of its records."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def forwarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Makes a method of a callback that calls `method` on `self.records`; same signature and docstring."""
    name = method.__name__

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast("R", getattr(self.records, name)(*args, **kwargs))

    return call


def forwarded_property(read: Callable[[Any], R]) -> R:
    """Makes a property of a callback that reads the same one of `self.records`; same docstring.

    Args:
        read: the property, `ActivationRecords.stats`, which mypy takes for the function that reads it.
    """
    fget: Any = cast("property", read).fget
    name = fget.__name__
    return cast("R", property(lambda self: getattr(self.records, name), doc=fget.__doc__))
