"""Quantities as people read them."""

from collections.abc import Iterable


def duration(seconds: float | None) -> str:
    """Seconds in three digits and a unit; None is nothing.

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
    """A number in three digits and a letter for its size; None is nothing.

    >>> short_number(2.5e9), short_number(1300.0), short_number(7.0)
    ('2.5 G', '1.3 k', '7')
    """
    if number is None:
        return ""
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g} {letter}"
    return f"{number:.3g}"


def join_names(names: Iterable[str], most: int = 20) -> str:
    """Names for a message, of many the first; the whole model's, which is empty, left out."""
    found = [name for name in names if name]
    return ", ".join(found[:most]) + (f" … and {len(found) - most} more" if len(found) > most else "")
