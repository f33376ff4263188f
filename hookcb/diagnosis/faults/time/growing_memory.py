"""memory.growth: memory that grows from step to step."""

from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.curves import Curves
from hookcb.diagnosis.rules import median
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.profiling.memory.growth import fit_line

N_WARM_UP, MIN_STEPS = 10, 50  # first steps, which allocate buffers and optimizer state
MAX_GROWTH, N_SIGMAS = 1e6, 1.96  # bytes per step; standard errors of a 95 % confidence interval
MIN_PART = 0.15  # of the growth, in each half: a single larger batch makes a jump rather than a slope
MAX_BYTES = 1e18  # more cannot be real


@fault("memory.growth", headline="Memory grows with each step", site=Site.RUN, needs=("memory",))
class GrowingMemory(Fault):
    """Memory that grows from step to step until it runs out.

    Formula: slope by least squares over 50 steps or more after the first ten. Limit: 1 MB per step, with a
    95 % confidence interval above zero, and growth in both halves of the run. Not judged if LBFGS alone
    trains the model: its history of up to `history_size` steps grows at first.

    Source: Draper & Smith, "Applied Regression Analysis", 1998, for the standard error of a slope; the
    PyTorch FAQ, "My model reports cuda runtime error(2): out of memory", for losses that are kept.
    """

    uses = (Curves,)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        if run.is_by_closure:
            yield Skipped("LBFGS keeps a history of its steps, which grows at first")
            return
        memory = run.measured(Curves).memory
        points = [(float(step), x) for step, x in list(memory)[N_WARM_UP:] if 0 <= x < MAX_BYTES]
        if len(points) < MIN_STEPS or points[0][0] >= points[-1][0]:
            yield Skipped(f"memory was recorded in fewer than {N_WARM_UP + MIN_STEPS} steps")
            return
        slope, error = fit_line(points)
        if slope - N_SIGMAS * error <= 0 or slope <= MAX_GROWTH or not _is_steady([x for _, x in points]):
            yield Passed(f"growing memory ({slope / 1e6:.2f} MB per step)", slope, MAX_GROWTH)
            return
        n_steps = points[-1][0] - points[0][0]  # more than len(points): a long run keeps only some
        yield self.finding(
            when=(int(points[0][0]), int(points[-1][0])),
            value=slope,
            limit=MAX_GROWTH,
            message=f"Memory grows by {slope / 1e6:.1f} MB per step, {slope * n_steps / 1e9:.1f} GB so far "
            f"(limit {MAX_GROWTH / 1e6:.0f} MB per step).",
            causes=(
                "losses or outputs that are kept with their graph",
                "a list that tensors are appended to",
            ),
            next_steps=("Keep loss.item() or loss.detach() rather than the loss itself",),
        )


def _is_steady(values: list[float]) -> bool:
    """Whether memory grows from the first third to the second, and from the second to the last."""
    n = len(values) // 3
    first, second, third = (median(part) for part in (values[:n], values[n : 2 * n], values[2 * n :]))
    smallest = MIN_PART * (third - first)
    return min(second - first, third - second) > max(0.0, smallest)
