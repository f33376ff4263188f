"""time.layer: a layer that takes more time than its work."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.layer_times import LayerTimes
from hookcb.diagnosis.rules import ratio
from hookcb.diagnosis.run import Passed, Run, Skipped

MANY_OF_LAYER = 50  # operations of a layer that has a Python loop
# share of the forward and seconds, less is the noise of a machine; and multiple of its share of the work
MIN_LAYER, MIN_SECONDS, MAX_EXCESS = 0.4, 1e-3, 10.0
MIN_PYTHON = 5e-3  # seconds without an operation, as an engine around a model takes a millisecond or two
SEQUENTIAL = ("RNN", "LSTM", "GRU")


@fault("time.layer", Site.RUN, needs="time")
class SlowLayer(Fault):
    """A layer that takes far more time for its work than the other layers.

    Formula: (seconds of its forward / its work) / (seconds of the others / their work); work is in
    multiply-adds, of which an element of a result counts as 16. Limit: 10, for a layer that takes 0.4 of the
    forward, and 1 ms; 5 ms if it runs no operation itself. It is a note, as there may be no other way to
    compute it. Least of 3 to 6 batches that follow inspected ones; modules that a layer calls do not count,
    nor do layers whose work is unknown, as of a sort, or whose steps follow each other, as of an LSTM. A loop
    is named as its cause if it runs 50 operations, and a wait if one of them reads a number. On a GPU it is
    the time of the processor. Nothing is timed once anything is compiled.

    Source: Williams et al., "Roofline: An Insightful Visual Performance Model for Multicore Architectures",
    2009, bounds the time of a kernel by its operations and its bytes; the limits are choices.
    """

    headline = "One layer is slow for its work"
    uses = (LayerTimes,)
    severity = "info"

    def findings(self, run: Run) -> Iterator[Result]:
        times = run.measured(LayerTimes)
        seconds, whole = times.seconds, sum(times.seconds.values())
        unknown = {name: why for name in seconds if (why := _why_unknown(run, name))}
        work = {name: times.work.get(name, 0.0) for name in seconds if name not in unknown}
        of_known, whole_work = sum(seconds[name] for name in work), sum(work.values())
        large = [
            name
            for name, x in seconds.items()
            if x > MIN_LAYER * whole and x >= (MIN_SECONDS if times.n_ops[name] else MIN_PYTHON)
        ]
        parts = {name: _part(name, seconds[name], whole) for name in large}
        not_judged = [f"{parts[name]}, but {unknown[name]}" for name in large if name in unknown]
        alone = [name for name in large if name in work and seconds[name] >= of_known]
        not_judged += [f"{parts[name]}, but no other was timed whose work is known" for name in alone]
        if not whole_work:
            not_judged = not_judged or ["the forwards of layers were not timed, or their work is unknown"]
        yield from map(Skipped, not_judged)
        excess = {  # time for its work, as a multiple of that of the others together
            name: ratio(
                seconds[name] / max(1.0, work[name]),
                (of_known - seconds[name]) / max(1.0, whole_work - work[name]),
            )
            for name in large
            if name in work and name not in alone
        }
        slow = {name: x for name, x in excess.items() if x > MAX_EXCESS}
        if not slow and not not_judged:
            most = max(excess.values(), default=0.0)
            seen = f"×{most:.1f}" if excess else "none takes a large part of the forward"
            yield Passed(f"a layer that takes more time than its work ({seen})", most, MAX_EXCESS)
        for name, x in slow.items():
            causes, next_steps = _why_slow(times.n_ops[name], times.n_reads[name])
            yield self.finding(
                at=run.layers.get(name, name),
                value=x,
                limit=MAX_EXCESS,
                message=f"{parts[name]}, for {ratio(work[name], whole_work):.1%} of the work: ×{x:.3g} of "
                f"the other layers (limit ×{MAX_EXCESS:g}).",
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
