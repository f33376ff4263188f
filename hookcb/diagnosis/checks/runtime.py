"""Checks of how the training runs: batches that are waited for, and memory that grows."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.checks.finding import finding
from hookcb.diagnosis.evidence import Evidence, Series
from hookcb.diagnosis.registry import Passed, Result, Site, Skipped, check
from hookcb.diagnosis.trends import median, ratio
from hookcb.profiling.memory.growth import fit_line

WAITING, WAITING_ERROR = 0.3, 0.6  # share of a batch's time
SHORTEST_WAIT = 0.003  # seconds; what a small batch takes to put together, which is no trouble to anyone
WARM_UP, ENOUGH_WAITS = 5, 10  # first batches, in which workers start; batches after these
MEMORY_WARM_UP, ENOUGH_MEMORY = (
    10,
    50,
)  # first steps, in which buffers and states come to be; steps after these
GROWTH, CERTAIN = 1e6, 1.96  # bytes a step; standard errors of a 95 % confidence interval
PART = 0.15  # of the growth, in each half: one larger batch makes a step, not a slope
MOST_BYTES = 1e18


@check("time.data_bound", site=Site.RUN, needs=("time",))
def waiting_for_data(evidence: Evidence) -> Iterator[Result]:
    """Training that waits for its batches.

    Formula: median time in the fetch of a batch / median time from the end of one batch to that of the next,
    the first five left out. Limit: 0.3, and 0.6 for an error; nothing below 3 ms, where there is nothing to
    gain. A Learner fetches its batches itself. In any other loop only a DataLoader's fetches are seen: what
    else the loop does between its steps is not waiting, and batches from elsewhere are not judged.

    Source: Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", 2021.
    """
    waits = dict(evidence.waits)
    pairs = [(waits.get(step, math.nan), x) for step, x in list(evidence.batches)[WARM_UP:]]
    pairs = [(wait, x) for wait, x in pairs if math.isfinite(wait) and math.isfinite(x)]
    if len(pairs) < ENOUGH_WAITS:
        yield Skipped(f"fewer than {WARM_UP + ENOUGH_WAITS} batches were timed")
        return
    n_fetched = sum(wait > 0 for wait, _ in pairs)
    if 2 * n_fetched <= len(pairs):
        yield Skipped(f"the fetch of a batch was seen before {n_fetched} of {len(pairs)} batches")
        return
    wait, whole = median(wait for wait, _ in pairs), median(x for _, x in pairs)
    share = ratio(wait, whole)
    if not (share > WAITING and wait >= SHORTEST_WAIT):
        yield Passed(f"waiting for data ({share:.0%} of the time, {1e3 * wait:.1f} ms)", share, WAITING)
        return
    yield finding(
        "time.data_bound",
        "error" if share > WAITING_ERROR else "warning",
        when=(evidence.batches.steps[WARM_UP], evidence.batches.steps[-1]),
        value=share,
        limit=WAITING,
        message=f"{share:.0%} of the time goes by in fetching batches, {1e3 * wait:.0f} ms of "
        f"{1e3 * whole:.0f} ms each (limit {WAITING:.0%}).",
        causes=("samples that are slow to load or transform", "no worker processes, or too few"),
        next_steps=(
            "Give the DataLoader num_workers=4 and persistent_workers=True",
            "Transform or decode the data once, before the training",
        ),
    )


@check("memory.growth", site=Site.RUN, needs=("memory",))
def growing_memory(evidence: Evidence) -> Iterator[Result]:
    """Memory that grows from step to step, until there is none left.

    Formula: slope by least squares over 50 steps or more after the first ten. Limit: 1 MB a step, with a 95 %
    confidence interval above zero, and growth in both halves of the run.

    Source: Draper & Smith, "Applied Regression Analysis", 1998, for the standard error of a slope; the
    PyTorch FAQ, "My model reports cuda runtime error(2): out of memory", for losses that are kept.
    """
    memory = Series.of(evidence.memory.steps, evidence.memory.values)
    points = [(float(step), x) for step, x in list(memory)[MEMORY_WARM_UP:] if 0 <= x < MOST_BYTES]
    if len(points) < ENOUGH_MEMORY or points[0][0] >= points[-1][0]:
        yield Skipped(f"memory of fewer than {MEMORY_WARM_UP + ENOUGH_MEMORY} steps is known")
        return
    slope, error = fit_line(points)
    if slope - CERTAIN * error <= 0 or slope <= GROWTH or not _is_steady([x for _, x in points]):
        yield Passed(f"growing memory ({slope / 1e6:.2f} MB a step)", slope, GROWTH)
        return
    n_steps = points[-1][0] - points[0][0]  # of a long run not each is there
    yield finding(
        "memory.growth",
        "warning",
        when=(int(points[0][0]), int(points[-1][0])),
        value=slope,
        limit=GROWTH,
        message=f"Memory grows by {slope / 1e6:.1f} MB a step, {slope * n_steps / 1e9:.1f} GB so far (limit "
        f"{GROWTH / 1e6:.0f} MB a step).",
        causes=("losses or outputs that are kept with their graph", "a list that tensors are appended to"),
        next_steps=("Keep loss.item() or loss.detach() rather than the loss itself",),
    )


def _is_steady(values: list[float]) -> bool:
    """Whether it grows from the first third to the second, and to the last."""
    n = len(values) // 3
    first, second, third = (median(part) for part in (values[:n], values[n : 2 * n], values[2 * n :]))
    least = PART * (third - first)
    return min(second - first, third - second) > max(0.0, least)
