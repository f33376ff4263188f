"""time.other and time.garbage: what the time is spent on beside the model and its data."""

import math
import re
from collections.abc import Iterator

from hookcb.core.time_split import DATA, EPOCH, GARBAGE, VALIDATION
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.backward_times import BackwardTimes
from hookcb.diagnosis.measurements.layer_times import LayerTimes
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
TOO_FEW = f"fewer than {MIN_BATCHES} batches were timed outside of inspections"
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
    uses = (SpentTime, LayerTimes, BackwardTimes, Loss)
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        spent = run.measured(SpentTime)
        if spent.n < MIN_BATCHES:
            yield Skipped(TOO_FEW)
            return
        of_hooks, of_backwards = run.measured(LayerTimes).hook_seconds, run.measured(BackwardTimes).seconds
        places = [(_kind(name), seconds, MAX_OTHER) for name, seconds in spent.callbacks.items()]
        places += [(line, seconds, MAX_OTHER) for line, seconds in spent.lines.items()]
        places += [(line, seconds, MAX_OWN) for line, seconds in spent.steps.items()]
        forward, backward = (spent.phases.get(phase, math.inf) for phase in ("forward", "backward"))
        places += [(hook, min(seconds, forward), MAX_OTHER) for hook, seconds in of_hooks.items()]
        places += [(name, min(seconds, backward), MAX_OWN) for name, seconds in of_backwards.items()]
        aside = {phase: spent.phases.get(phase, 0.0) for phase in NAMES}
        if spent.phases.get(DATA):  # fetches of a loader are seen, so that its line does more than that
            places += [(line, seconds, MAX_OTHER) for line, seconds in spent.fetches.items()]
        places += [(name, aside[phase], MAX_OTHER) for phase, name in NAMES.items()]
        places.append(("the optimizer's step", spent.phases.get("optimizer", 0.0), MAX_OWN))
        of_loss, loss = spent.phases.get("loss", 0.0), "the loss function"
        if (n_operations := run.measured(Loss).n_operations) >= MANY_OPERATIONS:
            loss = f"the loss function, of {n_operations:,} operations"
            if 2 * max(spent.lines.values(), default=0.0) < of_loss:  # else one of these lines calls it
                places.append((loss, of_loss, MAX_LOSS))
        elif not spent.has_lines:  # else it is in one of them
            places.append((loss, of_loss, MAX_OWN))
        slow = [(place, x, limit) for place, x, limit in places if x > limit * spent.whole and x >= MIN_OTHER]
        if not slow:
            most = max((x for _, x, limit in places if limit == MAX_OTHER), default=0.0)
            share = ratio(most, spent.whole)
            what = f"time spent outside of the model and its backward ({share:.0%} at most)"
            yield Passed(what, share, MAX_OTHER)
        for place, seconds, limit in slow:
            share = ratio(seconds, spent.whole)
            causes, next_steps = BACKWARD if place in {loss, *of_backwards} else OTHER
            yield self.finding(
                at=place,
                value=share,
                limit=limit,
                message=f"{share:.0%} of the time goes to {place}: {1e3 * seconds:.1f} of "
                f"{1e3 * spent.whole:.1f} ms per batch, on average (limit {limit:.0%}).",
                causes=causes,
                next_steps=next_steps,
            )


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
