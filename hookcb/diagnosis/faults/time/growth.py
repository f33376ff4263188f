"""time.growing, memory.growth and memory.graphs_kept: steps and memory that grow."""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar
from weakref import ReferenceType, ref

from hookcb.core.text import as_layer
from hookcb.diagnosis.fault import NOTES, Fault, Result, Site, fault
from hookcb.diagnosis.figure import over_steps
from hookcb.diagnosis.measurements.curves import Curve, Curves
from hookcb.diagnosis.measurements.inputs import Inputs
from hookcb.diagnosis.rules import median, ratio
from hookcb.diagnosis.run import Passed, Run, Series, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.hooks.modules import modules_in, named_modules
from hookcb.hooks.own import n_others
from hookcb.hooks.params import all_params
from hookcb.profiling.memory.growth import fit_line

MIN_GROWTH = 2.0  # of a batch and of its time, from the first third of the training to the last
MIN_LONGER = 1e-3  # seconds; less is the noise of a machine
N_BLOCKS, MIN_BLOCK = 6, 10  # parts of the run, and timed batches in each
N_DENSE = 64  # first batches, of which more are inspected
MAX_STEADY = 1.1  # growth of inputs, calls and trained parameters that explains nothing
MAX_JUMP = 0.6  # share of the growth in one part; more is a machine that gets busy
MIN_COUNTS = 5  # of hooks, each at twice the step of the last, so over 8 batches or more
MIN_LOOKS, MIN_BATCHES = 9, 30  # at the size of a batch, and timed ones
N_TRACKED = 60  # batches: the first, and then those of `Run.noting`, as a token takes 20 µs of a small step
KEY = "hookcb"
N_WARM_UP, MIN_STEPS = 10, 50  # first steps, which allocate buffers and optimizer state
MAX_GROWTH, N_SIGMAS = 1e6, 1.96  # bytes per step; standard errors of a 95 % confidence interval
MIN_PART = 0.15  # of the growth, in each half: a single larger batch makes a jump rather than a slope
MAX_BYTES = 1e18  # more cannot be real


@fault("time.growing", Site.RUN, needs="time")
class GrowingBatches(Fault):
    """Steps that take longer and longer, with batches that grow or without.

    Formula: median number of elements in the inputs of the last third of the inspected batches / that of the
    first third, and the same ratio of the time of a batch without its fetch, over all batches. Limit: 2, for
    both. It is a note, as a schedule may have it so.

    Or, at inputs of the same size (a ratio of at most 1.1), as many calls of the model in an inspected batch
    and as many parameters that are trained: the lower quartile of the times in each sixth of the run is above
    that of the sixth before, the last is twice the first and 1 ms more, and no sixth makes 60 % of the
    growth, as a machine that gets busy would. Without the first 64 batches, which are inspected more, if 60
    are left.

    Or, exact and without times: the hooks of others than hookcb on the modules and parameters of the model,
    counted after inspected batches, each at twice the step of the last. In the last five counts there are as
    many more as batches since, or more.

    Source: the limits are choices; a busy machine slows down a training, but not steadily.
    """

    headline = "Steps take longer and longer"
    uses = (Curves, Inputs)
    severity = "info"

    def __init__(self) -> None:
        super().__init__()
        self._calls, self._n_calls = Curve(), 0  # of the model in each batch, of those that are inspected
        self._trained = Curve()  # likewise, number of parameters
        self._hooks = list[tuple[int, int]]()  # steps, and numbers of hooks then
        self._most_hooked = ""  # the module that has the most

    def on_batch(self, run: Run) -> None:
        self._n_calls = 0
        self._trained.add((run.step, float(sum([p.requires_grad for p in all_params(run.loop.model)]))))

    def on_prediction(self, run: Run) -> None:
        self._n_calls += 1

    def on_batch_end(self, run: Run) -> None:
        self._calls.add((run.step, float(self._n_calls)))
        if not self._hooks or run.step >= 2 * self._hooks[-1][0]:
            self._count_hooks(run)

    def _count_hooks(self, run: Run) -> None:
        n_hooks = {m: n for m in modules_in(run.loop.model) if (n := n_others(m))}
        self._hooks.append((run.step, sum(n_hooks.values())))
        if self._are_hooks_added():
            most = max(n_hooks, key=n_hooks.__getitem__)
            names = {m: name for name, m in named_modules(run.loop.model).items()}
            self._most_hooked = names.get(most, "")

    def _are_hooks_added(self) -> bool:
        counts = self._hooks[-MIN_COUNTS:]
        return len(counts) == MIN_COUNTS and all(
            n - before >= now - then for (then, before), (now, n) in pairwise(counts)
        )

    def findings(self, run: Run) -> Iterator[Result]:
        if self._are_hooks_added():
            yield self._of_hooks()
            return
        sizes, curves = run.measured(Inputs).sizes.values, run.measured(Curves)
        waits = dict(curves.waits)
        seconds = [x - waits.get(step, 0.0) for step, x in curves.batches]
        if len(sizes) < MIN_LOOKS or len(seconds) < MIN_BATCHES:
            yield Skipped(f"fewer than {MIN_BATCHES} batches were timed")
            return
        (size, before), (now, earlier) = _thirds(sizes), _thirds(seconds)
        if not (before and earlier > 0):
            yield Skipped(f"the {'times' if before else 'inputs'} of batches were not seen")
            return
        slower = ratio(now, earlier)
        both = min(ratio(size, before), slower)
        if both >= MIN_GROWTH and now - earlier >= MIN_LONGER:
            yield self._of_batches(run, (before, size), (earlier, now), both)
        elif steady := self._steady_growth(sizes, seconds):
            yield self._of_steps(curves, *steady)
        else:
            yield Passed(f"growing batches (×{both:.1f})", both, MIN_GROWTH)

    def _steady_growth(self, sizes: list[float], seconds: list[float]) -> tuple[float, float] | None:
        """Times of a step at the beginning and at the end, if they grow steadily and nothing explains it."""
        for explained in (sizes, self._calls.series().values, self._trained.series().values):
            if len(explained) >= 3 and ratio(*_thirds(explained)) > MAX_STEADY:
                return None
        later = seconds[N_DENSE:] if len(seconds) >= N_DENSE + N_BLOCKS * MIN_BLOCK else seconds
        lows, whole = _lows(later), _lows(seconds)
        if not lows or any(x >= y for x, y in pairwise(lows)):
            return None
        first, last = min(whole[0], lows[0]), lows[-1]
        jump = max(y - x for x, y in pairwise(lows))
        is_steady = jump <= MAX_JUMP * (lows[-1] - lows[0])
        grows = 0 < MIN_GROWTH * first <= last and last - first >= MIN_LONGER
        return (first, last) if is_steady and grows else None

    def _of_hooks(self) -> Finding:
        (first, before), (last, now) = self._hooks[-MIN_COUNTS], self._hooks[-1]
        where = as_layer(self._most_hooked) or "the model itself"
        return self.finding(
            severity="warning",
            at=self._most_hooked,
            when=(first, last),
            value=float(now - before),
            message=f"The model gets hooks in each step, and keeps them: {now:,} at step {last}, {before:,} "
            f"at step {first}, most of them on {where}. All are called in every step, so that steps take "
            "longer and longer.",
            causes=("register_forward_hook or register_hook in forward, or in the loop",),
            next_steps=(
                "Register the hook once, before the training, or call .remove() of the handle it returns",
            ),
        )

    def _of_batches(
        self, run: Run, sizes: tuple[float, float], seconds: tuple[float, float], value: float
    ) -> Finding:
        earlier, now = seconds
        return self.finding(
            when=run.measured(Inputs).sizes,
            value=value,
            limit=MIN_GROWTH,
            message=f"Batches grow, from {sizes[0]:,.0f} to {sizes[1]:,.0f} elements, and take "
            f"{ratio(now, earlier):.1f} times as long: {1e3 * now:.1f} ms instead of {1e3 * earlier:.1f} ms "
            f"(limit {MIN_GROWTH:g}).",
            causes=(
                "inputs that are appended to those of earlier batches",
                "samples that are sorted by length",
            ),
            next_steps=("Print the shape of the inputs in each batch",),
        )

    def _of_steps(self, curves: Curves, earlier: float, now: float) -> Finding:
        return self.finding(
            severity="warning",
            when=curves.batches,
            value=ratio(now, earlier),
            limit=MIN_GROWTH,
            message=f"At inputs of the same size, steps take longer and longer: {1e3 * now:.1f} ms at the "
            f"end instead of {1e3 * earlier:.1f} ms at the beginning, {ratio(now, earlier):.1f} times as "
            f"long (limit {MIN_GROWTH:g}).",
            causes=(
                "a list or a state that grows in each step, and is gone through again in each",
                "hooks, losses or parameters that are added in each step and never removed",
            ),
            next_steps=(
                "Look for what the loop or forward appends to, and keep .item() or .detach() of it, or the "
                "last values only",
            ),
        )


def _lows(values: list[float]) -> list[float]:
    """Lower quartile of each sixth; empty if these are too short."""
    n = len(values) // N_BLOCKS
    blocks = [sorted(values[i * n : (i + 1) * n]) for i in range(N_BLOCKS)]
    return [block[n // 4] for block in blocks] if n >= MIN_BLOCK else []


def _thirds(values: list[float]) -> tuple[float, float]:
    """Medians of the last and of the first third."""
    n = len(values) // 3
    return median(values[-n:]), median(values[:n])


class _Token:
    """Lives as long as the graph node that holds it."""


@fault("memory.graphs_kept", Site.RUN, needs="batches", leads_to="memory.growth time.growing", exact=True)
class GraphsKept(Fault):
    """The autograd graphs of past batches stay in memory, one more with each batch.

    Formula: the nodes of the last 60 losses, other than the last two, are all still alive.
    """

    headline = "The graphs of past batches stay in memory"
    cadences: ClassVar = {"on_loss": NOTES}
    severity = "warning"
    passed = "retained graphs"
    unless = "too little was seen of the graphs of 60 losses"

    def __init__(self) -> None:
        super().__init__()
        self._tokens: deque[tuple[int, ReferenceType[_Token]]] = deque(maxlen=N_TRACKED)

    def on_loss(self, run: Run) -> None:
        """Puts a token on the node of a loss, which lives as long as any tensor computed from that."""
        if (node := run.loop.loss_node) is not None:
            token = _Token()
            node.metadata[KEY] = token
            self._tokens.append((run.step, ref(token)))
            if len(self._tokens) == N_TRACKED:
                self.unless = ""

    def on_batch_end(self, run: Run) -> None:
        if self.seen:
            return
        past = list(self._tokens)[:-2]  # the last two may be in use
        alive = [step for step, token in past if token() is not None]
        if len(past) >= N_TRACKED - 2 and len(alive) == len(past):
            self.see(
                f"The graphs of {len(alive)} batches since step {alive[0]} are all still in memory, and each "
                "batch adds one.",
                when=alive[0],
                value=float(len(alive)),
                causes=("losses or outputs are collected or summed with their graph",),
                next_steps=("Collect numbers: losses.append(loss.item()), or loss.detach()",),
            )

    def freeze(self) -> None:
        self._tokens.clear()


@fault("memory.growth", Site.RUN, needs="memory")
class GrowingMemory(Fault):
    """Memory that grows from step to step until it runs out.

    Formula: slope by least squares over 50 steps or more after the first ten. Limit: 1 MB per step, with a
    95 % confidence interval above zero, and growth in both halves of the run. Not judged if LBFGS alone
    trains the model: its history of up to `history_size` steps grows at first.

    Source: Draper & Smith, "Applied Regression Analysis", 1998, for the standard error of a slope; the
    PyTorch FAQ, "My model reports cuda runtime error(2): out of memory", for losses that are kept.
    """

    headline = "Memory grows with each step"
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
        in_mb = Series(memory.steps, [x / 1e6 for x in memory.values])
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
            figure=over_steps(f"memory in MB, which grows by {slope / 1e6:.1f} per step", {"memory": in_mb}),
        )


def _is_steady(values: list[float]) -> bool:
    """Whether memory grows from the first third to the second, and from the second to the last."""
    n = len(values) // 3
    first, second, third = map(median, (values[:n], values[n : 2 * n], values[2 * n :]))
    return min(second - first, third - second) > max(0.0, MIN_PART * (third - first))
