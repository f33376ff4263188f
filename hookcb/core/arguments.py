"""Checks of arguments that several callbacks take; errors say what is possible."""

import math
from typing import Any


def check_count(name: str, value: int, unit: str = "") -> int:
    """`value`, if it is a whole number of 1 or more.

    Args:
        name: of the argument, for the message.
        value: what was given.
        unit: what is counted, such as "batches".

    Raises:
        TypeError: where it is no whole number.
        ValueError: where it is less than 1.
    """
    number = f"a whole number of {unit}" if unit else "a whole number"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; give {number}, 1 or more")
    if value < 1:
        raise ValueError(f"{name} is {value}; give {number}, 1 or more")
    return value


def check_number(
    name: str, value: Any, low: float = 0.0, high: float = math.inf, closed: bool = False
) -> None:
    """Refuses what is no number above `low` and below `high`; `closed` admits both, infinity excepted.

    Raises:
        TypeError: where it is no number.
        ValueError: where it is outside.
    """
    where = f"from {low:g} to {high:g}" if closed else f"between {low:g} and {high:g}"
    if high == math.inf:
        where = f"of {low:g} or more" if closed else f"above {low:g}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r:.80}; give a number {where}")
    if not (low < value < high or (closed and value in (low, high) and math.isfinite(value))):
        raise ValueError(f"{name} is {value}; give a number {where}")
