"""Checks of what the time is spent on: callbacks, lines of a loop, one layer, and growing batches."""

import math
import re
from collections.abc import Iterator, Mapping

from hookcb.core.time_split import DATA, EPOCH, GARBAGE, VALIDATION
from hookcb.diagnosis.fault import Result, Site
from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import finding, median, ratio
from hookcb.diagnosis.run import Passed, Run, Skipped

MAX_OTHER, MIN_OTHER = 0.3, 1e-3  # share of a mean batch, and seconds; less is the noise of a machine
MAX_OWN = 0.6  # share of the optimizer or the loss; a third is usual for Adam on small batches
# operations of a loss that is a Python loop, and share that it may take, as its backward takes twice as much
MANY_OPERATIONS, MAX_LOSS = 100, 0.2
MANY_OF_LAYER = 50  # operations of a layer that has a Python loop
MIN_LAYER, MAX_EXCESS = 0.4, 10.0  # share of the forward, and multiple of its share of the work
SEQUENTIAL = ("RNN", "LSTM", "GRU")
MAX_GARBAGE = 0.15  # share; automatic collections usually take 0.01
MIN_BATCHES = 10  # timed ones
MIN_GROWTH = 2.0  # of a batch and of its time, from the first third of the training to the last
MIN_LOOKS = 9  # at the size of a batch
NAMES = {  # of phases that are not part of a step
    VALIDATION: "validation",
    EPOCH: "the time between epochs and the start of the loader",
}
OTHER = {  # likely causes, and what to do
    "causes": ("work that is done more often than needed", "work that waits for a disk or a network"),
    "next_steps": ("Do it less often, or in another thread or process",),
}
BACKWARD = {
    "causes": ("a Python loop over samples, steps or elements", "a wait for a device, as by .item()"),
    "next_steps": ("Compute it for the whole batch at once, in few operations", "Profile it"),
}
WORK = {"Checkpoint": "checkpoints", "Log": "logging"}  # of callbacks


@check("time.other", site=Site.RUN, needs=("time",))
def time_elsewhere(evidence: Run) -> Iterator[Result]:
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
    spent = evidence.spent
    if spent.n < MIN_BATCHES:
        yield Skipped(f"fewer than {MIN_BATCHES} batches were timed outside of inspections")
        return
    places = [(_kind(name), seconds, MAX_OTHER) for name, seconds in spent.callbacks.items()]
    places += [(line, seconds, MAX_OTHER) for line, seconds in spent.lines.items()]
    places += [(line, seconds, MAX_OWN) for line, seconds in spent.steps.items()]
    forward, backward = (spent.phases.get(phase, math.inf) for phase in ("forward", "backward"))
    places += [(hook, min(seconds, forward), MAX_OTHER) for hook, seconds in evidence.hook_seconds.items()]
    places += [(name, min(seconds, backward), MAX_OWN) for name, seconds in evidence.backward_seconds.items()]
    aside = {phase: spent.phases.get(phase, 0.0) for phase in NAMES}
    if spent.phases.get(DATA):  # fetches of a loader are seen, so that its line does more than that
        places += [(line, seconds, MAX_OTHER) for line, seconds in spent.fetches.items()]
    places += [(name, aside[phase], MAX_OTHER) for phase, name in NAMES.items()]
    places.append(("the optimizer's step", spent.phases.get("optimizer", 0.0), MAX_OWN))
    of_loss, loss = spent.phases.get("loss", 0.0), "the loss function"
    if evidence.measured(Loss).n_operations >= MANY_OPERATIONS:
        loss = f"the loss function, of {evidence.measured(Loss).n_operations:,} operations"
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
        yield finding(
            "time.other",
            "info",
            at=place,
            value=share,
            limit=limit,
            message=f"{share:.0%} of the time goes to {place}: {1e3 * seconds:.1f} of "
            f"{1e3 * spent.whole:.1f} ms per batch, on average (limit {limit:.0%}).",
            **(BACKWARD if place in {loss, *evidence.backward_seconds} else OTHER),
        )


@check("time.layer", site=Site.RUN, needs=("time",))
def slow_layer(evidence: Run) -> Iterator[Result]:
    """A layer that takes far more time for its work than the other layers.

    Formula: (seconds of its forward / its work) / (seconds of the others / their work); work is in
    multiply-adds, of which an element of a result counts as 16. Limit: 10, for a layer that takes 0.4 of the
    forward, and 1 ms.
    It is a note, as there may be no other way to compute it. Least of 3 to 6 batches that follow inspected
    ones; modules that a layer calls do not count, nor do layers whose work is unknown, as of a sort, or whose
    steps follow each other, as of an LSTM. A loop is named as its cause if it runs 50 operations, and a wait
    if one of them reads a number. On a GPU it is the time of the processor. Nothing is timed once
    anything is compiled.

    Source: Williams et al., "Roofline: An Insightful Visual Performance Model for Multicore Architectures",
    2009, bounds the time of a kernel by its operations and its bytes; the limits are choices.
    """
    seconds, work = evidence.layer_seconds, evidence.layer_work
    whole = sum(seconds.values())
    unknown = {name: why for name in seconds if (why := _why_unknown(evidence, name))}
    known = {name: x for name, x in seconds.items() if name not in unknown}
    whole_work = sum(work.get(name, 0.0) for name in known)
    not_judged = [
        f"{_part(name, seconds[name], whole)}, but {why}"
        for name, why in unknown.items()
        if _is_large(seconds[name], whole)
    ]
    if not whole_work:
        not_judged = not_judged or ["the forwards of layers were not timed, or their work is unknown"]
    yield from map(Skipped, not_judged)
    excess = _excess(known, work)
    large = {name: excess[name] for name, x in known.items() if _is_large(x, whole)}
    slow = {name: x for name, x in large.items() if x > MAX_EXCESS}
    if not slow and not not_judged:
        most = max(large.values(), default=0.0)
        seen = f"×{most:.1f}" if large else "none takes a large part of the forward"
        yield Passed(f"a layer that takes more time than its work ({seen})", most, MAX_EXCESS)
    for name, x in slow.items():
        causes, next_steps = _why_slow(*evidence.layer_ops.get(name, (0, 0)))
        yield finding(
            "time.layer",
            "info",
            at=evidence.layers.get(name, name),
            value=x,
            limit=MAX_EXCESS,
            message=f"{_part(name, seconds[name], whole)}, for "
            f"{ratio(work.get(name, 0.0), whole_work):.1%} of the work: ×{x:.3g} of the other layers "
            f"(limit ×{MAX_EXCESS:g}).",
            causes=causes,
            next_steps=next_steps,
        )


def _why_slow(n_ops: int, n_reads: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Causes that the operations of a layer show, and what to do."""
    causes, next_steps = [], []
    if n_ops >= MANY_OF_LAYER:
        causes.append(f"a Python loop over samples, steps or elements: it runs {n_ops:,} operations")
        next_steps.append("Compute it for the whole batch at once, in few operations")
    if n_reads:
        causes.append(f"numbers that Python reads, as by .item(): {n_reads:,} of them")
        next_steps.append("Keep the numbers in tensors")
    slow = "an operation that takes longer for an element than those of other layers"
    return tuple(causes or [slow]), (*next_steps, "Profile this layer")


def _is_large(seconds: float, whole: float) -> bool:
    return seconds > MIN_LAYER * whole and seconds >= MIN_OTHER


def _part(name: str, seconds: float, whole: float) -> str:
    which, share = f"Layer {name}" if name else "The model itself", ratio(seconds, whole)
    return f"{which} takes {share:.0%} of the forward, {1e3 * seconds:.1f} of {1e3 * whole:.1f} ms"


def _why_unknown(evidence: Run, name: str) -> str:
    """Why the time of a layer cannot be compared with its work; "" if it can."""
    layer = evidence.layers.get(name)
    if layer is not None and layer.kind in SEQUENTIAL:
        return "its steps follow each other"
    return "" if math.isfinite(evidence.layer_work.get(name, 0.0)) else "the work of an operation is unknown"


def _excess(seconds: Mapping[str, float], work: Mapping[str, float]) -> dict[str, float]:
    """Time of each layer for its work, as a multiple of that of the others together."""
    own = {name: work.get(name, 0.0) for name in seconds}
    whole, whole_work = sum(seconds.values()), sum(own.values())
    return {
        name: ratio(x / max(1.0, own[name]), (whole - x) / max(1.0, whole_work - own[name]))
        for name, x in seconds.items()
    }


@check("time.garbage", site=Site.RUN, needs=("time",))
def garbage_collections(evidence: Run) -> Iterator[Result]:
    """Python's garbage collector, which looks through all objects again and again.

    Formula: mean seconds a batch in collections of older generations / mean seconds of a batch. Limit: 0.15,
    and 1 ms.

    Source: Python's `gc` module: a full collection visits each object that may be part of a cycle.
    """
    spent = evidence.spent
    if spent.n < MIN_BATCHES:
        yield Skipped(f"fewer than {MIN_BATCHES} batches were timed outside of inspections")
        return
    seconds = spent.phases.get(GARBAGE, 0.0)
    share = ratio(seconds, spent.whole)
    if not (share > MAX_GARBAGE and seconds >= MIN_OTHER):
        yield Passed(f"garbage collections ({share:.1%} of the time)", share, MAX_GARBAGE)
        return
    yield finding(
        "time.garbage",
        "warning",
        value=share,
        limit=MAX_GARBAGE,
        message=f"Garbage collections take {share:.0%} of the time: {1e3 * seconds:.1f} of "
        f"{1e3 * spent.whole:.1f} ms per batch, on average (limit {MAX_GARBAGE:.0%}).",
        causes=("calls of gc.collect() in the loop", "millions of Python objects, as in a dataset of lists"),
        next_steps=(
            "Call gc.freeze() once the data is loaded, or keep it in tensors or arrays",
            "Remove gc.collect() from the loop",
        ),
    )


@check("time.growing", site=Site.RUN, needs=("time",))
def growing_batches(evidence: Run) -> Iterator[Result]:
    """Batches that grow, and steps that take longer and longer with them.

    Formula: median number of elements in the inputs of the last third of the inspected batches / that of the
    first third, and the same ratio of the time of a batch without its fetch, over all batches. Limit: 2, for
    both. It is a note, as a schedule may have it so.

    Source: the limit is a choice; a busy machine slows down a training without growing batches.
    """
    sizes = evidence.sizes.values
    waits = dict(evidence.waits)
    seconds = [x - waits.get(step, 0.0) for step, x in evidence.batches]
    if len(sizes) < MIN_LOOKS or len(seconds) < 3 * MIN_BATCHES:
        yield Skipped(f"fewer than {3 * MIN_BATCHES} batches were timed")
        return
    size, before = _thirds(sizes)
    now, earlier = _thirds(seconds)
    if not (before and earlier > 0):
        yield Skipped(f"the {'times' if before else 'inputs'} of batches were not seen")
        return
    grown, slower = ratio(size, before), ratio(now, earlier)
    if not (grown >= MIN_GROWTH and slower >= MIN_GROWTH and now - earlier >= MIN_OTHER):
        yield Passed(f"growing batches (×{min(grown, slower):.1f})", min(grown, slower), MIN_GROWTH)
        return
    yield finding(
        "time.growing",
        "info",
        when=evidence.sizes,
        value=min(grown, slower),
        limit=MIN_GROWTH,
        message=f"Batches grow, from {before:,.0f} to {size:,.0f} elements, and take {slower:.1f} times as "
        f"long: {1e3 * now:.1f} ms instead of {1e3 * earlier:.1f} ms (limit {MIN_GROWTH:g}).",
        causes=("inputs that are appended to those of earlier batches", "samples that are sorted by length"),
        next_steps=("Print the shape of the inputs in each batch",),
    )


def _thirds(values: list[float]) -> tuple[float, float]:
    """Medians of the last and of the first third."""
    n = len(values) // 3
    return median(values[-n:]), median(values[:n])


def _kind(callback: str) -> str:
    """Work of a callback, and its name."""
    work = WORK.get(re.match(r"\w*", callback)[0])  # type: ignore[index]  # it matches any text
    return f"the callback {callback}" if work is None else f"{work} ({callback})"
