"""BackwardTimes: the time of backwards that are written in Python."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hookcb.core import graph
from hookcb.core.torch_private import backward_in_python
from hookcb.core.whose import is_of_user
from hookcb.diagnosis.measurements.lines import code_of, function_place

MAX_TIMED = 4  # batches


class BackwardTimes:
    """Times the backwards of the user's subclasses of `torch.autograd.Function` in a few batches.

    All other operations have backwards of torch or of a package. If the first graph has none of the user, no
    other is read.

    Args:
        guarded: calls a function; an error in it must not reach the training.
    """

    def __init__(self, guarded: Callable[..., object]) -> None:
        self._guarded = guarded
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)  # one for each batch
        self._began = 0.0
        self._n, self._has_some = 0, True

    def follow(self, node: Any) -> None:
        """Times the backward of a loss that is about to begin.

        Args:
            node: the autograd node of the loss.
        """
        if node is None or self._n == MAX_TIMED or not self._has_some:
            return
        self._n += 1
        names: set[str] = set()
        for found, function in _written_by_user(node):
            names.add(name := f"the backward of {function_place(function)}")
            if len(self._seconds[name]) < self._n:
                self._seconds[name].append(0.0)
            found.register_prehook(lambda grads: self._guarded(self._begin))
            found.register_hook(partial(self._end, name))
        self._has_some = bool(names)

    def _begin(self) -> None:
        self._began = time.perf_counter()

    def _end(self, name: str, *grads: Any) -> None:
        self._guarded(self._add, name)

    def _add(self, name: str) -> None:
        self._seconds[name][-1] += time.perf_counter() - self._began

    def seconds(self) -> dict[str, float]:
        """Least seconds of a batch by backward; a busy machine adds to them."""
        return {name: min(x) for name, x in self._seconds.items()}


def _written_by_user(node: Any) -> Iterator[tuple[Any, Any]]:
    """Nodes of a graph whose backward is a function of the user, and that."""
    for at in graph.walk([node], at_most=graph.MAX_NODES):
        function = backward_in_python(at)
        if (code := code_of(function)) is not None and is_of_user(code.co_filename):
            yield at, function
