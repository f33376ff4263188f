"""Incidents: what happens during a step that is no part of it, and may take long."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hookcb.core.text import duration
from hookcb.core.torch_private import compile_counts

# what callbacks count of themselves: attributes, each with what is told when it changes
COUNTS = {"n_written": "checkpoint written", "n_switched": "profiler switched on or off"}
LONG_COLLECTION = 1e-3  # seconds; of the youngest objects there is one every few steps, and it takes 0.1 ms


class Incidents:
    """Says in words what happens: a collection of garbage, a compilation, a file written by a callback.

    Collections are told while `open`, those of all objects and those that take a millisecond or more.

    Args:
        tell: called with each.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._counted: list[tuple[Any, str]] = []
        self._counts: list[int] = []
        self._compiled: Counter[str] = Counter()
        self._n_compiled = 0
        self._began: float | None = None

    def open(self) -> None:
        """Begins to listen to the garbage collector."""
        gc.callbacks.append(self._at_collection)

    def close(self) -> None:
        """Listens no more."""
        if self._at_collection in gc.callbacks:
            gc.callbacks.remove(self._at_collection)

    def follow(self, callbacks: Iterable[Any]) -> None:
        """Counts from now on what is compiled, and what `callbacks` do that count it, see `COUNTS`."""
        self._counted = [(cb, count) for cb in callbacks for count in COUNTS if hasattr(cb, count)]
        self._counts = self._count()
        self._compiled = compile_counts("frames")
        self._n_compiled = self._compiled["total"]

    def look(self) -> None:
        """Tells what was compiled and done since the last look."""
        if (n := self._compiled["total"]) != self._n_compiled:
            self._n_compiled = n
            self._tell("compilation")
        if self._counted and (counts := self._count()) != self._counts:
            for (_, name), before, now in zip(self._counted, self._counts, counts, strict=True):
                if before != now:
                    self._tell(COUNTS[name])
            self._counts = counts

    def _count(self) -> list[int]:
        return [getattr(cb, name) for cb, name in self._counted]

    def _at_collection(self, stage: str, info: Mapping[str, int]) -> None:
        if stage == "start":
            self._began = time.perf_counter()
        elif self._began is not None:
            took, self._began = time.perf_counter() - self._began, None
            if took >= LONG_COLLECTION or info["generation"] == 2:
                self._tell(f"garbage collection of {duration(took)}")
