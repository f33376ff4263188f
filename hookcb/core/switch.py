"""The variable HOOKCB of the environment, which switches hookcb off; this is the one place that reads it."""

import os

VARIABLE = "HOOKCB"
OFF = f"{VARIABLE}=0 switches hookcb off"


def is_off() -> bool:
    """Whether hookcb is switched off: HOOKCB=0.

    Raises:
        ValueError: If the variable is neither 0 nor 1.
    """
    return _value() == "0"


def is_asked_for() -> bool:
    """Whether hookcb is asked to join each training that it can join by itself: HOOKCB=1.

    Raises:
        ValueError: If the variable is neither 0 nor 1.
    """
    return _value() == "1"


def _value() -> str:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"{VARIABLE} in the environment must be 0, which switches hookcb off, or 1, got {value!r:.80}; "
            "without the variable hookcb is on"
        )
    return value
