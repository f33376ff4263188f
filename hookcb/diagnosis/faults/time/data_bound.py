"""time.data_bound: training that waits for its batches."""

import math
from collections.abc import Iterable, Iterator

from hookcb.core.threads import n_cores
from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.measurements.spent import SpentTime
from hookcb.diagnosis.rules import median, ratio
from hookcb.diagnosis.run import Passed, Run, Skipped

MAX_WAITING, MAX_WAITING_WARNING = 0.3, 0.6  # share of a batch's time
MIN_WAIT = 0.003  # seconds; a small batch takes that long to collate, and nothing can be gained
MIN_ALARM = 0.01  # seconds; a shorter wait is a note
MIN_MEAN = 2e-3  # seconds, if most batches come at once and some are slow
MIN_SLOW, MIN_SLOWDOWN = 3, 10.0  # slow batches, and multiple of the median from which one is slow
MIN_EXCESS_DELAY = 2.0  # multiple of the delays that a busy machine would have caused
MAX_WORKERS = 4  # that are advised
N_WARM_UP, MIN_BATCHES = 5, 10  # first batches, in which workers start; batches after these


@fault("time.data_bound", Site.RUN, needs="time")
class DataBound(Fault):
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

    headline = "Training waits for its batches"
    uses = (Curves, SpentTime, Inputs)

    def findings(self, run: Run) -> Iterator[Result]:
        pairs = _timed(run)
        n_fetched = sum(wait > 0 for wait, _ in pairs)
        if len(pairs) < MIN_BATCHES:
            yield Skipped(f"fewer than {N_WARM_UP + MIN_BATCHES} batches were timed")
        elif 2 * n_fetched > len(pairs):
            wait, whole = (median(column) for column in zip(*pairs, strict=True))
            if wait < MIN_ALARM:  # lower quartiles
                wait, whole = (sorted(column)[len(pairs) // 4] for column in zip(*pairs, strict=True))
            is_usual = ratio(wait, whole) > MAX_WAITING and wait >= MIN_WAIT
            some = None if is_usual else self._of_slow_batches(run)
            yield some or self._judged(run, wait, whole, wait)
        elif (spent := run.measured(SpentTime)).fetches:  # seen as lines of the loop
            wait, line = math.fsum(spent.fetches.values()), max(spent.fetches, key=spent.fetches.__getitem__)
            yield self._judged(run, wait, spent.whole, wait, f" They are fetched in {line}.")
        else:
            yield Skipped(f"the fetch of a batch was seen before {n_fetched} of {len(pairs)} batches")

    def _of_slow_batches(self, run: Run) -> Result | None:
        """Verdict on the mean times, if some fetches are slow and a busy machine does not explain it."""
        pairs = _timed(run, inspected=run.measured(Inputs).sizes.steps)
        if len(pairs) < MIN_BATCHES:
            return None
        usual, usual_rest = median(wait for wait, _ in pairs), median(x - wait for wait, x in pairs)
        slow = [wait for wait, _ in pairs if wait > MIN_SLOWDOWN * usual]
        delay = math.fsum(wait - usual for wait in slow)
        # a busy machine delays both, each as long as it usually takes
        delay_of_rest = math.fsum(max(0.0, x - wait - usual_rest) for wait, x in pairs)
        as_much = delay_of_rest * max(1.0, MIN_EXCESS_DELAY * ratio(usual, usual_rest))
        mean_wait, mean = (math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True))
        if len(slow) < MIN_SLOW or mean_wait < MIN_MEAN or delay < as_much:
            return None
        text = f" One batch in {len(pairs) / len(slow):.0f} takes {1e3 * median(slow):.0f} ms to fetch."
        return self._judged(run, mean_wait, mean, median(slow), text, MIN_MEAN)

    def _judged(
        self, run: Run, wait: float, whole: float, delay: float, more: str = "", least: float = MIN_WAIT
    ) -> Result:
        """Verdict on the seconds of fetches and of batches, by how long those take that wait."""
        share = ratio(wait, whole)
        if not (share > MAX_WAITING and wait >= least):
            return Passed(
                f"waiting for data ({share:.0%} of the time, {1e3 * wait:.1f} ms)", share, MAX_WAITING
            )
        n = min(MAX_WORKERS, n_cores())  # with more workers than processors they wait for each other
        why = f", as this process may use {n} processor{'s' * (n > 1)}" if n < MAX_WORKERS else ""
        steps = run.measured(Curves).batches.steps
        return self.finding(
            f"Training waits for batches {share:.0%} of the time: {1e3 * wait:.1f} of {1e3 * whole:.1f} ms "
            f"per batch (limit {MAX_WAITING:.0%}).{more}",
            "info" if delay < MIN_ALARM else "error" if share > MAX_WAITING_WARNING else "warning",
            when=(steps[N_WARM_UP], steps[-1]),
            value=share,
            limit=MAX_WAITING,
            causes=("samples that are slow to load or transform", "no worker processes, or too few"),
            next_steps=(
                f"Give the DataLoader persistent_workers=True and num_workers={n}{why}",
                "Transform or decode the data once, before training",
            ),
        )


def _timed(run: Run, inspected: Iterable[int] = ()) -> list[tuple[float, float]]:
    """Seconds of the fetch and of the whole of each batch but the first and the inspected ones, if known."""
    curves, left_out = run.measured(Curves), set(inspected)
    waits, later = dict(curves.waits), list(curves.batches)[N_WARM_UP:]
    pairs = [(waits.get(step, math.nan), x) for step, x in later if step not in left_out]
    return [(wait, x) for wait, x in pairs if math.isfinite(wait) and math.isfinite(x)]
