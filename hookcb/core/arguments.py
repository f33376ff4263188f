"""Checks of arguments; errors say what is possible."""

import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hookcb.core.other_names import ALIKE, ELSEWHERE

P = ParamSpec("P")
R = TypeVar("R")
NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def hinted(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a call with an unknown keyword raises a TypeError that says what was meant.

    The signature stays as it is, for `help`, IDEs and type checkers.

    >>> hinted(lambda cbs=(): cbs)(callbacks=[])
    Traceback (most recent call last):
    TypeError: <lambda> has no argument 'callbacks'; did you mean 'cbs'? it takes: cbs
    """

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        known = inspect.signature(function).parameters if kwargs else {}
        is_open = any(param.kind is inspect.Parameter.VAR_KEYWORD for param in known.values())
        names = [name for name, param in known.items() if param.kind in NAMED and name != "self"]
        unknown = [name for name in kwargs if name not in known]
        if is_open:  # they are options of a base or of torch, but for names of others
            is_own = bool(args) and getattr(type(args[0]), "__init__", None) is checked
            of_bases = _of_bases(type(args[0])) if is_own and unknown else set()
            unknown = [name for name in unknown if is_own and _same(name, names) and name not in of_bases]
        if unknown:
            raise unknown_argument(function.__qualname__.removesuffix(".__init__"), unknown[0], names)
        return function(*args, **kwargs)

    return checked


def _of_bases(cls: type) -> set[str]:
    """Arguments that the bases of a class take by name."""
    return {
        name
        for base in cls.__mro__[1:]
        for name in inspect.signature(vars(base).get("__init__", object)).parameters
    }


def unknown_argument(owner: str, name: str, known: Iterable[str], more: str = "") -> TypeError:
    """The error for a keyword that a function does not have; `more` is added to what it takes."""
    names = list(known)
    is_elsewhere = name in ELSEWHERE and not _same(name, names)
    hint = f"use {ELSEWHERE[name]}; " if is_elsewhere else did_you_mean(name, names)
    return TypeError(f"{owner} has no argument {name!r}; {hint}it takes: {', '.join(names)}{more}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The part of a message that gives the known name which `name` stands for; "" if there is none.

    >>> did_you_mean("callbacks", ["n_epoch", "cbs"]), did_you_mean("patients", ["patience"])
    ("did you mean 'cbs'? ", "did you mean 'patience'? ")
    """
    names = list(known)
    close = _same(name, names) or difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _same(name: str, known: Iterable[str]) -> list[str]:
    """The known names that another library's `name` stands for."""
    return [other for alike in ALIKE if name in alike for other in known if other in alike]


def check_count(name: str, value: Any, unit: str = "", least: int = 1, hint: str = "") -> int:
    """Returns `value` if it is a whole number of at least `least`.

    Args:
        name: name of the argument, for the message.
        value: the argument.
        unit: what is counted, such as "batches".
        least: the smallest valid value.
        hint: added to what is possible, such as ", or None".

    Raises:
        TypeError: If `value` is not a whole number.
        ValueError: If `value` is below `least`.
    """
    number = f"a whole number of {unit}" if unit else "a whole number"
    message = f"{name} must be {number}, {least} or more{hint}, got {value!r:.80}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(message)
    if value < least:
        raise ValueError(message)
    return value


def check_number(
    name: str, value: Any, low: float = 0.0, high: float = math.inf, closed: bool = False, hint: str = ""
) -> float:
    """Returns `value` if it is a number above `low` and below `high`.

    Args:
        name: name of the argument, for the message.
        value: the argument.
        low: the lower limit.
        high: the upper limit.
        closed: whether the limits are valid too, unless they are infinite.
        hint: added to what is possible, such as an example.

    Raises:
        TypeError: If `value` is not a number.
        ValueError: If `value` is out of range.
    """
    span = f" from {low:g} to {high:g}" if closed else f" between {low:g} and {high:g}"
    if high == math.inf:
        span = f", {low:g} or more" if closed else f" above {low:g}"
    message = f"{name} must be a number{span}{hint}, got {value!r:.80}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(message)
    if not (low < value < high or (closed and value in (low, high) and math.isfinite(value))):
        raise ValueError(message)
    return value


def check_page(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a page, which is one HTML file, or of a folder, which is refused later.

    Raises:
        TypeError: If it is not a path.
        ValueError: If its name promises another format.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f'path must be the path of a file, such as "run.html", got {path!r:.80}')
    file = Path(path)
    if file.suffix.lower() not in (".html", ".htm") and not file.is_dir():
        raise ValueError(
            f"a page is an HTML file; give a name in .html, as {file.stem}.html, got {str(path)!r}"
        )
    return file
