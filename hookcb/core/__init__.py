"""Base of all other packages: events, Callback, Loop, batches, files, random state, printing of text."""

import random

_before = random.getstate()
import rich.console  # noqa: E402, F401  # draws a number when it is first imported

random.setstate(_before)
