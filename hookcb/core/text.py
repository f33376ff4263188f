"""Text for quantities and names."""

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

from rich.filesize import decimal


def duration(seconds: float | None) -> str:
    """Seconds with three digits and a unit; empty for None.

    >>> duration(0.01234), duration(3.4e-05), duration(95.0)
    ('12.3 ms', '34 µs', '95 s')
    """
    if seconds is None:
        return ""
    if not seconds:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}" if abs(seconds) < 1000 * scale else f"{seconds:,.0f} s"
    return f"{seconds * 1e6:.3g} µs"


def short_number(number: float | None) -> str:
    """A number with three digits and an SI prefix; empty for None.

    >>> short_number(2.5e9), short_number(1300.0), short_number(7.0)
    ('2.5 G', '1.3 k', '7')
    """
    if number is None:
        return ""
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g} {letter}"
    return f"{number:.3g}"


def format_bytes(n: float | None) -> str:
    """A number of bytes with a decimal unit; empty for None.

    >>> format_bytes(-1500), format_bytes(0)
    ('-1.5 kB', '0 bytes')
    """
    return "" if n is None else f"{'-' * (n < 0)}{decimal(round(abs(n)))}"


def join_names(names: Iterable[str], most: int = 20) -> str:
    """Joins the first `most` nonempty names, and counts the others; the whole model's name is empty."""
    named = [name for name in names if name]
    return ", ".join(named[:most]) + (f" … and {len(named) - most} more" if len(named) > most else "")


def as_layer(name: str) -> str:
    """Name of a layer as it stands in a sentence: a name that reads as a number gets the word before it.

    >>> as_layer("0.1"), as_layer("2#1"), as_layer("body.0"), as_layer("")
    ('layer 0.1', 'layer 2#1', 'body.0', '')
    """
    return f"layer {name}" if re.match(r"\d+(\.\d+)*($|[#\[])", name) else name


def name_of(function: Any) -> str:
    """Name of a function, also inside a partial, or of the class of an object.

    >>> name_of(partial(max, key=len)), name_of(3)
    ('max', 'int')
    """
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
