"""Incidents: events outside the training itself that may slow down a step."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from hookcb.core.clock import follow_garbage, leave_garbage
from hookcb.core.text import duration
from hookcb.core.torch_private import compile_counts

# attributes in which callbacks count what they do, and the note to add when one changes
COUNTS = {"n_written": "checkpoint written", "n_switched": "profiler switched on or off"}
LONG_COLLECTION = 1e-3  # seconds; collections of the youngest generation take 0.1 ms, every few steps


class Incidents:
    """Reports garbage collections, compilations, and files written by callbacks.

    Collections are reported between `open` and `close`, if they are full or take a millisecond or more.

    Args:
        report: called with a description of each.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._counted: list[tuple[Any, str]] = []
        self._counts: list[int] = []
        self._compiled: Counter[str] = Counter()
        self._n_compiled = 0

    def open(self) -> None:
        """Starts listening to the garbage collector."""
        follow_garbage(self._at_collection)

    def close(self) -> None:
        """Stops listening."""
        leave_garbage(self._at_collection)

    def follow(self, callbacks: Iterable[Any]) -> None:
        """Starts counting compilations, and what `callbacks` count themselves, see `COUNTS`."""
        self._counted = [(cb, count) for cb in callbacks for count in COUNTS if hasattr(cb, count)]
        self._counts = self._count()
        self._compiled = compile_counts("frames")
        self._n_compiled = self._compiled["total"]

    def report_changes(self) -> None:
        """Reports what was compiled and counted since the last call."""
        if (n := self._compiled["total"]) != self._n_compiled:
            self._n_compiled = n
            self._report("compilation")
        if self._counted and (counts := self._count()) != self._counts:
            for (_, name), before, now in zip(self._counted, self._counts, counts, strict=True):
                if before != now:
                    self._report(COUNTS[name])
            self._counts = counts

    def _count(self) -> list[int]:
        return [getattr(cb, name) for cb, name in self._counted]

    def _at_collection(self, generation: int, seconds: float) -> None:
        if seconds >= LONG_COLLECTION or generation == 2:
            self._report(f"garbage collection of {duration(seconds)}")
