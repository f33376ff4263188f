"""input.repeated: the same inputs again and again in the middle of a training."""

from collections import deque
from collections.abc import Iterator
from itertools import groupby

from torch import Tensor

from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts
from hookcb.diagnosis.fault import NOTES, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.replicas import hash_of
from hookcb.diagnosis.measurements.samples import flat, spread
from hookcb.diagnosis.run import Run, Skipped
from hookcb.diagnosis.verdict import Finding
from hookcb.records.store import Arriving

MIN_SAME, MIN_SPAN, MIN_DIFFERENT = 6, 16, 8  # batches, steps between them, and batches before
N_KEPT = 4_096  # hashes


@fault("input.repeated", Site.INPUT, needs="batches", leads_to="loss.* grad.* update.* valid.*", exact=True)
class RepeatedInputs(Fault):
    """The same inputs in many batches in a row, after batches that all differed.

    Exact: hashes of up to 1,024 elements of each input are the same in six noted batches or more in a row,
    over 16 steps or more, and those of the eight noted batches before are all different. Noted are the
    first 64 batches, and of each eight later ones one at random. A training on one batch from its beginning
    is meant, as are several steps on each batch, as in reinforcement learning.

    Source: a loader that is at its end or stuck gives its last batch again; `next(iter(loader))` without
    shuffling gives the first one.
    """

    headline = "The same batch comes again and again"
    severity = "warning"
    cadence = NOTES
    passed = "the same batch again and again"

    def __init__(self) -> None:
        super().__init__()
        self._read = deque[tuple[int, int]](maxlen=N_KEPT)  # steps and hashes
        self._arriving = Arriving[int](N_KEPT)

    def on_batch(self, run: Run) -> None:
        inputs = [x for _, x in parts(run.loop.xb) if isinstance(x, Tensor) and has_stats(x) and x.numel()]
        if (found := hash_of([spread(flat(x)) for x in inputs])) is None:
            return
        if found.is_cpu:
            self._read.append((run.step, int(found)))
        else:
            self._arriving.add(run.step, found)
            self._read.extend(self._arriving.there())

    def tell(self, run: Run) -> None:
        self._read.extend(self._arriving.rest())

    def freeze(self) -> None:
        self._arriving = Arriving(N_KEPT)

    def findings(self, run: Run) -> Iterator[Result]:
        if len(self._read) < MIN_DIFFERENT + MIN_SAME:
            yield Skipped(f"fewer than {MIN_DIFFERENT + MIN_SAME} batches with inputs were noted")
            return
        runs = [(x, [step for step, _ in same]) for x, same in groupby(self._read, key=lambda x: x[1])]
        for i, (_, steps) in enumerate(runs):
            before = runs[max(0, i - MIN_DIFFERENT) : i]
            is_long = len(steps) >= MIN_SAME and steps[-1] - steps[0] >= MIN_SPAN
            differ = len({x for x, same in before if len(same) == 1}) == MIN_DIFFERENT
            if is_long and differ:
                yield self._found(steps)
                return
        yield from self.told(run, ())

    def _found(self, steps: list[int]) -> Finding:
        return self.finding(
            f"The inputs are the same in all {len(steps)} batches that were noted from step {steps[0]:,} "
            f"to {steps[-1]:,}, while those of the {MIN_DIFFERENT} noted before all differ.",
            when=(steps[0], steps[-1]),
            value=float(len(steps)),
            limit=float(MIN_SAME),
            causes=(
                "a loader or an index that no longer moves on",
                "next(iter(loader)) in the loop, which begins anew each time",
            ),
            next_steps=(f"Look at how the batch of step {steps[0] + 1:,} is chosen",),
        )
