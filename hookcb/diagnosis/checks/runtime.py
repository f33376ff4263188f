"""Checks of time and memory: waiting for batches or for a rank, and memory that grows."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hookcb.core.threads import n_cores
from hookcb.diagnosis.fault import Result, Site
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.registry import check
from hookcb.diagnosis.rules import finding, median, ratio
from hookcb.diagnosis.run import Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.profiling.memory.growth import fit_line
from hookcb.profiling.steps.stragglers import MAX_EXCESS, MIN_EXCESS

MAX_WAITING, MAX_WAITING_WARNING = 0.3, 0.6  # share of a batch's time
MIN_WAIT = 0.003  # seconds; a small batch takes that long to collate, and nothing can be gained
MIN_ALARM = 0.01  # seconds; a shorter wait is a note
MIN_MEAN = 2e-3  # seconds, if most batches come at once and some are slow
MIN_SLOW, MIN_SLOWDOWN = 3, 10.0  # slow batches, and multiple of the median from which one is slow
MIN_EXCESS_DELAY = 2.0  # multiple of the delays that a busy machine would have caused
MAX_WORKERS = 4  # that are advised
N_WARM_UP, MIN_BATCHES = 5, 10  # first batches, in which workers start; batches after these
N_MEMORY_WARM_UP, MIN_MEMORY_STEPS = 10, 50  # first steps, which allocate buffers and optimizer state
MAX_GROWTH, N_SIGMAS = 1e6, 1.96  # bytes per step; standard errors of a 95 % confidence interval
MIN_PART = 0.15  # of the growth, in each half: a single larger batch makes a jump rather than a slope
MIN_BLOCKS, MAX_CHANCE = 5, 0.05  # of steps; probability of ranks that take turns
MAX_BYTES = 1e18  # more cannot be real


@check("time.data_bound", site=Site.RUN, needs=("time",))
def waiting_for_data(evidence: Run) -> Iterator[Result]:
    """Training that waits for its batches, for each of them or for some.

    Formula: median time to fetch a batch / median time from the end of one batch to the end of the next,
    without the first five; or the same with means, if three batches or more take ten times the median to
    fetch, and these delays are longer than those of the rest of the batches, and twice as long as a busy
    machine would make them in proportion. Garbage collections in a fetch do not count. Limit: 0.3, and 0.6
    for an error. Waits below 3 ms are ignored, as there is nothing to gain; of means, those
    below 2 ms. Below 10 ms it is a note, and lower quartiles are compared in place of medians, as a busy
    machine delays many batches of a small training. A Learner fetches its batches itself. In any other loop
    the fetches of a DataLoader are seen, and other fetches if a fifth of the time is spent between the steps:
    as the time of a `for` statement with a step in its body, or of a statement that calls `next`. Whatever
    else the loop does between its steps does not count as waiting.

    Source: Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", 2021.
    """
    waits = dict(evidence.waits)
    pairs = [(waits.get(step, math.nan), x) for step, x in list(evidence.batches)[N_WARM_UP:]]
    pairs = [(wait, x) for wait, x in pairs if math.isfinite(wait) and math.isfinite(x)]
    if len(pairs) < MIN_BATCHES:
        yield Skipped(f"fewer than {N_WARM_UP + MIN_BATCHES} batches were timed")
        return
    n_fetched = sum(wait > 0 for wait, _ in pairs)
    if 2 * n_fetched <= len(pairs) and evidence.spent.fetches:
        yield _slow_fetches(evidence)
        return
    if 2 * n_fetched <= len(pairs):
        yield Skipped(f"the fetch of a batch was seen before {n_fetched} of {len(pairs)} batches")
        return
    wait, whole = median(wait for wait, _ in pairs), median(x for _, x in pairs)
    if wait < MIN_ALARM:
        wait, whole = _low(wait for wait, _ in pairs), _low(x for _, x in pairs)
    share, some, delay = ratio(wait, whole), "", wait
    if not (share > MAX_WAITING and wait >= MIN_WAIT) and (slow := _slow_batches(evidence)) is not None:
        wait, whole, delay, some = slow
        share = ratio(wait, whole)
    if not (share > MAX_WAITING and (wait >= MIN_WAIT or some)):
        yield Passed(f"waiting for data ({share:.0%} of the time, {1e3 * wait:.1f} ms)", share, MAX_WAITING)
        return
    yield _data_bound(evidence, share, delay, f"{1e3 * wait:.1f} of {1e3 * whole:.1f} ms per batch", some)


def _low(values: Iterable[float]) -> float:
    """The lower quartile."""
    in_order = sorted(values)
    return in_order[len(in_order) // 4]


def _slow_batches(evidence: Run) -> tuple[float, float, float, str] | None:
    """Mean seconds of fetches and of batches, those of a slow fetch, and what to say, if some are slow."""
    waits, inspected = dict(evidence.waits), set(evidence.measured(Inputs).sizes.steps)
    pairs = [
        (waits[step], x)
        for step, x in list(evidence.batches)[N_WARM_UP:]
        if step in waits and step not in inspected and math.isfinite(waits[step]) and math.isfinite(x)
    ]
    if len(pairs) < MIN_BATCHES:
        return None
    usual = median(wait for wait, _ in pairs)
    usual_rest = median(x - wait for wait, x in pairs)
    slow = [wait for wait, _ in pairs if wait > MIN_SLOWDOWN * usual]
    delay = math.fsum(wait - usual for wait in slow)
    # a busy machine delays both, each as long as it usually takes
    delay_of_rest = math.fsum(max(0.0, x - wait - usual_rest) for wait, x in pairs)
    as_much = delay_of_rest * max(1.0, MIN_EXCESS_DELAY * ratio(usual, usual_rest))
    mean_wait, mean = (math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True))
    if len(slow) < MIN_SLOW or mean_wait < MIN_MEAN or delay < as_much:
        return None
    text = f" One batch in {len(pairs) / len(slow):.0f} takes {1e3 * median(slow):.0f} ms to fetch."
    return mean_wait, mean, median(slow), text


def _slow_fetches(evidence: Run) -> Result:
    """Verdict on the fetches that were seen as lines of the loop."""
    spent = evidence.spent
    wait, line = math.fsum(spent.fetches.values()), max(spent.fetches, key=spent.fetches.__getitem__)
    share = ratio(wait, spent.whole)
    if not (share > MAX_WAITING and wait >= MIN_WAIT):
        return Passed(f"waiting for data ({share:.0%} of the time, {1e3 * wait:.1f} ms)", share, MAX_WAITING)
    text = f"{1e3 * wait:.1f} of {1e3 * spent.whole:.1f} ms per batch"
    return _data_bound(evidence, share, wait, text, f" They are fetched in {line}.")


def _data_bound(evidence: Run, share: float, delay: float, text: str, more: str) -> Finding:
    n = min(MAX_WORKERS, n_cores())  # with more workers than processors they wait for each other
    why = f", as this process may use {n} processor{'s' * (n > 1)}" if n < MAX_WORKERS else ""
    return finding(
        "time.data_bound",
        "info" if delay < MIN_ALARM else "error" if share > MAX_WAITING_WARNING else "warning",
        when=(evidence.batches.steps[N_WARM_UP], evidence.batches.steps[-1]),
        value=share,
        limit=MAX_WAITING,
        message=f"Training waits for batches {share:.0%} of the time: {text} "
        f"(limit {MAX_WAITING:.0%}).{more}",
        causes=("samples that are slow to load or transform", "no worker processes, or too few"),
        next_steps=(
            f"Give the DataLoader persistent_workers=True and num_workers={n}{why}",
            "Transform or decode the data once, before training",
        ),
    )


@check("time.straggler", site=Site.RUN, needs=("ranks",), subject="ranks")
def waiting_for_a_rank(evidence: Run) -> Iterator[Result]:
    """One rank that all the others wait for.

    Formula: mean own work of the slowest rank in a step - median of that of the others / mean step, over
    five blocks of up to 100 steps or more; the same rank must be the slowest in so many of them that it
    happens to one of two equal ranks with a probability below 5 %, as in 5 of 5 or 7 of 8. Limit: 0.1, and
    3 ms, as for `time.data_bound`. Own work is the time in data, forward, loss, callbacks and optimizer: in
    the backward, in which gradients are averaged, ranks wait for each other; with sharded parameters or
    SyncBatchNorm also in the forward, which does not count then. A rank that takes longer only there cannot
    be told. A Learner's fit of DistributedDataParallel or of sharded parameters is judged, no other loop.

    Source: Jiang et al., "MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs", 2024,
    which finds stragglers by comparing the times of the same phases between ranks.
    """
    found = evidence.slowest_rank
    if found is None or found.n_blocks < MIN_BLOCKS:
        yield Skipped(f"ranks were compared in fewer than {MIN_BLOCKS} blocks of steps")
        return
    is_chronic = _chance(found.n_slowest, found.n_blocks) < MAX_CHANCE
    if not (found.share > MAX_EXCESS and found.excess >= MIN_EXCESS and is_chronic):
        name = "a rank that the others wait for"
        more = f"{found.share:.0%} more work at most" if is_chronic else "not always the same one"
        yield Passed(f"{name} ({more})", found.share, MAX_EXCESS)
        return
    late = finding(
        "time.straggler",
        "warning",
        value=found.share,
        limit=MAX_EXCESS,
        message=f"The other ranks wait for rank {found.rank} (host {found.host}) {found.share:.0%} of the "
        f"time: it works {1e3 * found.seconds:.1f} ms in a step, the others {1e3 * found.usual:.1f} ms; its "
        f"{found.phase} takes {1e3 * found.extra:.1f} ms more (limit {MAX_EXCESS:.0%}).",
        causes=_causes_of_lag(found.phase),
        next_steps=(
            evidence.advise("straggler"),
            "Give its shard as much work as the others have",
        ),
    )
    yield replace(late, ranks=(found.rank,))


def _chance(k: int, n: int) -> float:
    """Probability that a fair coin shows heads in `k` or more of `n` throws."""
    return float(sum(math.comb(n, i) for i in range(k, n + 1)) / 2**n)


def _causes_of_lag(phase: str) -> tuple[str, ...]:
    machine = "a slower or busy machine or GPU"
    if phase == "data":
        return "samples that are slower to read there, as from another disk", machine
    if phase == "callbacks":
        return "work that only this rank does, such as logging or writing files", machine
    return machine, "batches that are longer than those of the other ranks"


@check("memory.growth", site=Site.RUN, needs=("memory",))
def growing_memory(evidence: Run) -> Iterator[Result]:
    """Memory that grows from step to step until it runs out.

    Formula: slope by least squares over 50 steps or more after the first ten. Limit: 1 MB per step, with a
    95 % confidence interval above zero, and growth in both halves of the run. Not judged if LBFGS alone
    trains the model: its history of up to `history_size` steps grows at first.

    Source: Draper & Smith, "Applied Regression Analysis", 1998, for the standard error of a slope; the
    PyTorch FAQ, "My model reports cuda runtime error(2): out of memory", for losses that are kept.
    """
    if evidence.is_by_closure:
        yield Skipped("LBFGS keeps a history of its steps, which grows at first")
        return
    memory = Series.of(evidence.memory.steps, evidence.memory.values)
    points = [(float(step), x) for step, x in list(memory)[N_MEMORY_WARM_UP:] if 0 <= x < MAX_BYTES]
    if len(points) < MIN_MEMORY_STEPS or points[0][0] >= points[-1][0]:
        yield Skipped(f"memory was recorded in fewer than {N_MEMORY_WARM_UP + MIN_MEMORY_STEPS} steps")
        return
    slope, error = fit_line(points)
    if slope - N_SIGMAS * error <= 0 or slope <= MAX_GROWTH or not _is_steady([x for _, x in points]):
        yield Passed(f"growing memory ({slope / 1e6:.2f} MB per step)", slope, MAX_GROWTH)
        return
    n_steps = points[-1][0] - points[0][0]  # more than len(points): a long run keeps only some
    yield finding(
        "memory.growth",
        "warning",
        when=(int(points[0][0]), int(points[-1][0])),
        value=slope,
        limit=MAX_GROWTH,
        message=f"Memory grows by {slope / 1e6:.1f} MB per step, {slope * n_steps / 1e9:.1f} GB so far "
        f"(limit {MAX_GROWTH / 1e6:.0f} MB per step).",
        causes=("losses or outputs that are kept with their graph", "a list that tensors are appended to"),
        next_steps=("Keep loss.item() or loss.detach() rather than the loss itself",),
    )


def _is_steady(values: list[float]) -> bool:
    """Whether memory grows from the first third to the second, and from the second to the last."""
    n = len(values) // 3
    first, second, third = (median(part) for part in (values[:n], values[n : 2 * n], values[2 * n :]))
    smallest = MIN_PART * (third - first)
    return min(second - first, third - second) > max(0.0, smallest)
