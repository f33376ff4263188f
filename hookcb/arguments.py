"""Checks of arguments that several callbacks take; errors say what is possible."""


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
