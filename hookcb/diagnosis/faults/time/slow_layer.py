"""time.layer: a layer that takes more time than its work."""

import math
from collections.abc import Iterator, Mapping

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.layer_times import LayerTimes
from hookcb.diagnosis.rules import ratio
from hookcb.diagnosis.run import Passed, Run, Skipped

MANY_OF_LAYER = 50  # operations of a layer that has a Python loop
# share of the forward and seconds, less is the noise of a machine; and multiple of its share of the work
MIN_LAYER, MIN_SECONDS, MAX_EXCESS = 0.4, 1e-3, 10.0
SEQUENTIAL = ("RNN", "LSTM", "GRU")


@fault("time.layer", Site.RUN, needs="time")
class SlowLayer(Fault):
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

    headline = "One layer is slow for its work"
    uses = (LayerTimes,)
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        times = run.measured(LayerTimes)
        seconds, work, whole = times.seconds, times.work, sum(times.seconds.values())
        unknown = {name: why for name in seconds if (why := _why_unknown(run, name))}
        known = {name: x for name, x in seconds.items() if name not in unknown}
        whole_work = sum(work.get(name, 0.0) for name in known)
        large_unknown = {name: why for name, why in unknown.items() if _is_large(seconds[name], whole)}
        not_judged = [
            f"{_part(name, seconds[name], whole)}, but {why}" for name, why in large_unknown.items()
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
            causes, next_steps = _why_slow(times.n_ops[name], times.n_reads[name])
            yield self.finding(
                at=run.layers.get(name, name),
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
    return seconds > MIN_LAYER * whole and seconds >= MIN_SECONDS


def _part(name: str, seconds: float, whole: float) -> str:
    which, share = f"Layer {name}" if name else "The model itself", ratio(seconds, whole)
    return f"{which} takes {share:.0%} of the forward, {1e3 * seconds:.1f} of {1e3 * whole:.1f} ms"


def _why_unknown(run: Run, name: str) -> str:
    """Why the time of a layer cannot be compared with its work; "" if it can."""
    layer = run.layers.get(name)
    if layer is not None and layer.kind in SEQUENTIAL:
        return "its steps follow each other"
    is_known = math.isfinite(run.measured(LayerTimes).work.get(name, 0.0))
    return "" if is_known else "the work of an operation is unknown"


def _excess(seconds: Mapping[str, float], work: Mapping[str, float]) -> dict[str, float]:
    """Time of each layer for its work, as a multiple of that of the others together."""
    own = {name: work.get(name, 0.0) for name in seconds}
    whole, whole_work = sum(seconds.values()), sum(own.values())
    return {
        name: ratio(x / max(1.0, own[name]), (whole - x) / max(1.0, whole_work - own[name]))
        for name, x in seconds.items()
    }
