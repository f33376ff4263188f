"""time.other and time.garbage: what the time is spent on beside the model and its data."""

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

from hookcb.core import graph
from hookcb.core.clock import DATA, EPOCH, GARBAGE, VALIDATION
from hookcb.core.torch_private import backward_in_python
from hookcb.core.whose import is_of_user
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.layer_times import LayerTimes
from hookcb.diagnosis.measurements.lines import code_of, function_place
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.measurements.spent import SpentTime
from hookcb.diagnosis.rules import ratio
from hookcb.diagnosis.run import Passed, Run, Skipped

MAX_OTHER, MIN_OTHER = 0.3, 1e-3  # share of a mean batch, and seconds; less is the noise of a machine
MAX_OWN = 0.6  # share of the optimizer or the loss; a third is usual for Adam on small batches
# operations of a loss that is a Python loop, and share that it may take, as its backward takes twice as much
MANY_OPERATIONS, MAX_LOSS = 100, 0.2
MAX_GARBAGE = 0.15  # share; automatic collections usually take 0.01
MIN_BATCHES = 10  # timed ones
MAX_TIMED = 4  # batches whose backwards are timed
TOO_FEW = f"fewer than {MIN_BATCHES} batches were timed outside of inspections"
LOSS = "the loss function"
NAMES = {  # of phases that are not part of a step
    VALIDATION: "validation",
    EPOCH: "the time between epochs and the start of the loader",
}
OTHER = (  # likely causes, and what to do
    ("work that is done more often than needed", "work that waits for a disk or a network"),
    ("Do it less often, or in another thread or process",),
)
BACKWARD = (
    ("a Python loop over samples, steps or elements", "a wait for a device, as by .item()"),
    ("Compute it for the whole batch at once, in few operations", "Profile it"),
)
WORK = {"Checkpoint": "checkpoints", "Log": "logging"}  # of callbacks
Place = tuple[str, float, float]  # what time is spent on, seconds of a mean batch, and limit of their share


@fault("time.other", Site.RUN, needs="time")
class OtherWork(Fault):
    """Time that is spent neither in the model nor in waiting for data, by what it is spent on.

    Formula: mean seconds a batch in a callback, in validation, in a line of the loop or between epochs / mean
    seconds of a batch, without the first five batches, those that are inspected closely, and the two that
    take longest, unless a third one of 0.1 s or more takes half as long. Limit: 0.3, and 1 ms; 0.6 for the
    optimizer's step, the loss, lines that call the model and backwards that are written in Python; 0.2 for a
    loss of 100 operations or more, which its backward undoes one by one. Of forward
    hooks and of such backwards it is the least of 3 to 6 batches. A line that makes a whole step does not
    count.
    It is a note, as the work may be wanted. Lines of a loop that hookcb does not run are sampled if a fifth
    of the time or more is spent between its steps; of a trainer it is the user's functions that it calls.

    Source: the limit is a choice, the same as that of `time.data_bound`.
    """

    headline = "Much of the time goes to other work"
    uses = (SpentTime, LayerTimes, Loss)
    severity = "info"

    def __init__(self) -> None:
        super().__init__()
        # seconds of each batch in backwards of the user's subclasses of `torch.autograd.Function`; all others
        # are of torch or of a package
        self.backwards = defaultdict[str, list[float]](list)
        self._n, self._began = 0, math.nan

    def on_loss(self, run: Run) -> None:
        """Times the user's backwards in a few batches; if the first graph has none, no other is read."""
        if (node := run.loop.loss_node) is None:
            return
        self._n, self.done = self._n + 1, True
        for at in graph.walk([node], at_most=graph.MAX_NODES):
            function = backward_in_python(at)
            if (code := code_of(function)) is None or not is_of_user(code.co_filename):
                continue
            seconds = self.backwards[f"the backward of {function_place(function)}"]
            if len(seconds) < self._n:
                seconds.append(0.0)
            at.register_prehook(partial(self._mark, None))
            at.register_hook(partial(self._mark, seconds))
            self.done = self._n == MAX_TIMED

    def _mark(self, seconds: list[float] | None, *grads: Any) -> None:
        """Begins the time of a backward, or adds it to those of its batch."""
        try:
            now = time.perf_counter()
            if seconds is not None:
                seconds[-1] += now - self._began
            self._began = now
        except Exception as error:  # the user's backward goes on
            self.failure = error

    def findings(self, run: Run) -> Iterator[Result]:
        spent = run.measured(SpentTime)
        if spent.n < MIN_BATCHES:
            yield Skipped(TOO_FEW)
            return
        places = self._places(run, spent)
        slow = [(place, x, limit) for place, x, limit in places if x > limit * spent.whole and x >= MIN_OTHER]
        if not slow:
            most = max((x for _, x, limit in places if limit == MAX_OTHER), default=0.0)
            share = ratio(most, spent.whole)
            what = f"time spent outside of the model and its backward ({share:.0%} at most)"
            yield Passed(what, share, MAX_OTHER)
        for place, seconds, limit in slow:
            share = ratio(seconds, spent.whole)
            is_python = place.startswith(LOSS) or place in self.backwards
            causes, next_steps = BACKWARD if is_python else OTHER
            yield self.finding(
                at=place,
                value=share,
                limit=limit,
                message=f"{share:.0%} of the time goes to {place}: {1e3 * seconds:.1f} of "
                f"{1e3 * spent.whole:.1f} ms per batch, on average (limit {limit:.0%}).",
                causes=causes,
                next_steps=next_steps,
            )

    def _places(self, run: Run, spent: SpentTime) -> list[Place]:
        phases, n_operations = spent.phases, run.measured(Loss).n_operations
        forward, backward = phases.get("forward", math.inf), phases.get("backward", math.inf)
        of_loss = phases.get("loss", 0.0)
        hooks = run.measured(LayerTimes).hook_seconds
        # fetches of a loader are seen, so that its line does more than that
        fetches = spent.fetches if phases.get(DATA) else {}
        places = [
            *((_kind(name), x, MAX_OTHER) for name, x in spent.callbacks.items()),
            *((line, x, MAX_OTHER) for line, x in spent.lines.items()),
            *((line, x, MAX_OWN) for line, x in spent.steps.items()),
            *((hook, min(x, forward), MAX_OTHER) for hook, x in hooks.items()),
            # the least of a batch, as a busy machine adds to it
            *((name, min(*x, backward), MAX_OWN) for name, x in self.backwards.items()),
            *((line, x, MAX_OTHER) for line, x in fetches.items()),
            *((name, phases.get(phase, 0.0), MAX_OTHER) for phase, name in NAMES.items()),
            ("the optimizer's step", phases.get("optimizer", 0.0), MAX_OWN),
        ]
        if n_operations >= MANY_OPERATIONS:
            if 2 * max(spent.lines.values(), default=0.0) < of_loss:  # else one of these lines calls it
                places.append((f"{LOSS}, of {n_operations:,} operations", of_loss, MAX_LOSS))
        elif not spent.has_lines:  # else it is in one of them
            places.append((LOSS, of_loss, MAX_OWN))
        return places


def _kind(callback: str) -> str:
    """Work of a callback, and its name."""
    work = WORK.get(re.match(r"\w*", callback)[0])  # type: ignore[index]  # it matches any text
    return f"the callback {callback}" if work is None else f"{work} ({callback})"


@fault("time.garbage", Site.RUN, needs="time")
class Garbage(Fault):
    """Python's garbage collector, which looks through all objects again and again.

    Formula: mean seconds a batch in collections of older generations / mean seconds of a batch. Limit: 0.15,
    and 1 ms.

    Source: Python's `gc` module: a full collection visits each object that may be part of a cycle.
    """

    headline = "Garbage collections take much of the time"
    uses = (SpentTime,)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        spent = run.measured(SpentTime)
        if spent.n < MIN_BATCHES:
            yield Skipped(TOO_FEW)
            return
        share = ratio(seconds := spent.phases.get(GARBAGE, 0.0), spent.whole)
        if not (share > MAX_GARBAGE and seconds >= MIN_OTHER):
            yield Passed(f"garbage collections ({share:.1%} of the time)", share, MAX_GARBAGE)
            return
        yield self.finding(
            value=share,
            limit=MAX_GARBAGE,
            message=f"Garbage collections take {share:.0%} of the time: {1e3 * seconds:.1f} of "
            f"{1e3 * spent.whole:.1f} ms per batch, on average (limit {MAX_GARBAGE:.0%}).",
            causes=(
                "calls of gc.collect() in the loop",
                "millions of Python objects, as in a dataset of lists",
            ),
            next_steps=(
                "Call gc.freeze() once the data is loaded, or keep it in tensors or arrays",
                "Remove gc.collect() from the loop",
            ),
        )
