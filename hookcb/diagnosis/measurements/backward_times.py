"""BackwardTimes: the time of backwards that are written in Python."""

import math
import time
from collections import defaultdict
from functools import partial
from typing import Any

from hookcb.core import graph
from hookcb.core.torch_private import backward_in_python
from hookcb.core.whose import is_of_user
from hookcb.diagnosis.fault import Measurement
from hookcb.diagnosis.measurements.lines import code_of, function_place
from hookcb.diagnosis.run import Run

MAX_TIMED = 4  # batches


class BackwardTimes(Measurement):
    """Times the backwards of the user's subclasses of `torch.autograd.Function` in a few batches.

    All other operations have backwards of torch or of a package. If the first graph has none of the user, no
    other is read.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # least of a batch by backward, as a busy machine adds to them
        self._all: defaultdict[str, list[float]] = defaultdict(list)  # one for each batch
        self._began = math.nan
        self._n = 0
        self._failure: Exception | None = None

    def on_loss(self, run: Run) -> None:
        if (node := run.loop.loss_node) is None:
            return
        self._n += 1
        names: set[str] = set()
        for at in graph.walk([node], at_most=graph.MAX_NODES):
            function = backward_in_python(at)
            if (code := code_of(function)) is None or not is_of_user(code.co_filename):
                continue
            names.add(name := f"the backward of {function_place(function)}")
            if len(self._all[name]) < self._n:
                self._all[name].append(0.0)
            at.register_prehook(partial(self._mark, ""))
            at.register_hook(partial(self._mark, name))
        self.done = not names or self._n == MAX_TIMED

    def _mark(self, name: str, *grads: Any) -> None:
        """Begins the time of a backward, or ends it if it has a name."""
        try:
            now = time.perf_counter()
            if name:
                self._all[name][-1] += now - self._began
            self._began = now
        except Exception as error:  # the user's backward goes on
            self._failure = error

    def tell(self, run: Run) -> None:
        if self._failure is not None:
            raise self._failure
        self.seconds = {name: min(x) for name, x in self._all.items()}
