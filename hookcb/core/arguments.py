"""Checks of arguments that several callbacks take; errors say what is possible."""

import math
from typing import Any


def check_count(name: str, value: Any, unit: str = "", least: int = 1, hint: str = "") -> int:
    """`value`, if it is a whole number of `least` or more.

    Args:
        name: the argument's, for the message.
        value: what was given.
        unit: what is counted, such as "batches".
        least: the smallest that is possible.
        hint: the end of the message, what else may be given or meant.

    Raises:
        TypeError: if it is not a whole number.
        ValueError: if it is below `least`.
    """
    number = f"a whole number of {unit}" if unit else "a whole number"
    message = f"{name} is {value!r:.80}; give {number}, {least} or more{hint}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(message)
    if value < least:
        raise ValueError(message)
    return value


def check_number(
    name: str, value: Any, low: float = 0.0, high: float = math.inf, closed: bool = False, hint: str = ""
) -> float:
    """`value`, if it is a number above `low` and below `high`; `closed` admits both, except infinity.

    Args:
        name: the argument's, for the message.
        value: what was given.
        low: the lower limit.
        high: the upper limit.
        closed: whether they are possible values too.
        hint: the end of the message, such as an example.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is out of range.
    """
    where = f"from {low:g} to {high:g}" if closed else f"between {low:g} and {high:g}"
    if high == math.inf:
        where = f"of {low:g} or more" if closed else f"above {low:g}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r:.80}; give a number {where}{hint}")
    if not (low < value < high or (closed and value in (low, high) and math.isfinite(value))):
        raise ValueError(f"{name} is {value}; give a number {where}{hint}")
    return value
