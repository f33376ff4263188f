"""input.repeated: the same inputs again and again in the middle of a training."""

from collections import deque
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from hookcb.activations.stats import has_stats
from hookcb.core.batch import parts
from hookcb.diagnosis.fault import NOTES, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.replicas import hash_of
from hookcb.diagnosis.measurements.samples import flat, spread
from hookcb.diagnosis.run import Run, Skipped
from hookcb.records.store import Transfer

MIN_SAME, MIN_SPAN, MIN_DIFFERENT = 6, 16, 8  # batches, steps between them, and batches before
N_KEPT, N_SENT = 4_096, 16  # hashes that are kept; those that leave a GPU at once


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
        # those that are on their way from a GPU, and that wait there
        self._sent = deque[tuple[list[int], Transfer]]()
        self._waiting: list[tuple[int, Tensor]] = []

    def on_batch(self, run: Run) -> None:
        inputs = [x for _, x in parts(run.loop.xb) if isinstance(x, Tensor) and has_stats(x) and x.numel()]
        if (found := hash_of([spread(flat(x)) for x in inputs])) is None:
            return
        if found.is_cpu:
            self._read.append((run.step, int(found)))
            return
        self._waiting.append((run.step, found))
        if len(self._waiting) >= N_SENT and found.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._send()
        while self._sent and self._sent[0][1].is_there:
            self._receive()

    def _send(self) -> None:
        steps, hashes = zip(*self._waiting, strict=True)
        self._sent.append((list(steps), Transfer(torch.stack(hashes))))
        self._waiting.clear()

    def _receive(self) -> None:
        steps, hashes = self._sent.popleft()
        self._read.extend(zip(steps, hashes.arrived().tolist(), strict=True))

    def tell(self, run: Run) -> None:
        while self._sent:
            self._receive()
        self._read.extend((step, int(x)) for step, x in self._waiting)
        self._waiting.clear()

    def freeze(self) -> None:
        self._waiting.clear()

    def findings(self, run: Run) -> Iterator[Result]:
        runs = [[step for step, _ in same] for _, same in groupby(self._read, key=lambda x: x[1])]
        hashes = [x for x, _ in groupby(x for _, x in self._read)]
        found = [
            self.finding(
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
            for i, steps in enumerate(runs)
            if len(steps) >= MIN_SAME
            and steps[-1] - steps[0] >= MIN_SPAN
            and all(len(x) == 1 for x in runs[max(0, i - MIN_DIFFERENT) : i])
            and len(set(hashes[max(0, i - MIN_DIFFERENT) : i])) == MIN_DIFFERENT
        ]
        few = Skipped(f"fewer than {MIN_DIFFERENT + MIN_SAME} batches with inputs were noted")
        if found:
            yield found[0]
        else:
            yield from self.told(run, (), "" if len(self._read) >= MIN_DIFFERENT + MIN_SAME else few)
