"""Methods, properties and attributes that a callback forwards to its records."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def forwarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method that calls `method` on `self.records`, with its signature and docstring."""
    name = method.__name__

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast("R", getattr(self.records, name)(*args, **kwargs))

    return call


def forwarded_property(read: Callable[[Any], R]) -> R:
    """A property that reads the same property of `self.records`, with its docstring.

    Args:
        read: the property, such as `ActivationRecords.stats`; for mypy, the function that reads it.
    """
    fget: Any = cast("property", read).fget
    name = fget.__name__
    return cast("R", property(lambda self: getattr(self.records, name), doc=fget.__doc__))


def forwarded_attribute(name: str) -> Any:
    """A read-only attribute that is the same attribute of `self.records`; annotate it with its type."""
    return property(lambda self: getattr(self.records, name))
