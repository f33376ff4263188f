"""Checks of arguments that many callbacks take; errors say what is possible."""

import math
from typing import Any


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
