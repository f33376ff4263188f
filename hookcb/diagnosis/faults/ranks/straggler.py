"""time.straggler: a rank that all the others wait for."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.processes.stragglers import MAX_EXCESS, MIN_EXCESS, Straggler

MIN_BLOCKS, MAX_CHANCE = 5, 0.05  # of steps; probability of ranks that take turns


@fault("time.straggler", Site.RUN, needs="ranks", subject="ranks")
class SlowRank(Fault):
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

    headline = "The other ranks wait for one"
    severity = "warning"
    slowest: Straggler | None = None  # with most work of its own, if a `StepTimer` has compared ranks

    def findings(self, run: Run) -> Iterator[Result]:
        found = self.slowest
        if found is None or found.n_blocks < MIN_BLOCKS:
            yield Skipped(f"ranks were compared in fewer than {MIN_BLOCKS} blocks of steps")
            return
        n = found.n_blocks  # as often as a fair coin shows heads
        is_chronic = sum(math.comb(n, i) for i in range(found.n_slowest, n + 1)) / 2**n < MAX_CHANCE
        if not (found.share > MAX_EXCESS and found.excess >= MIN_EXCESS and is_chronic):
            more = f"{found.share:.0%} more work at most" if is_chronic else "not always the same one"
            yield Passed(f"a rank that the others wait for ({more})", found.share, MAX_EXCESS)
            return
        yield self.finding(
            value=found.share,
            limit=MAX_EXCESS,
            message=f"The other ranks wait for rank {found.rank} (host {found.host}) {found.share:.0%} of "
            f"the time: it works {1e3 * found.seconds:.1f} ms in a step, the others "
            f"{1e3 * found.usual:.1f} ms; its {found.phase} takes {1e3 * found.extra:.1f} ms more "
            f"(limit {MAX_EXCESS:.0%}).",
            causes=_causes_of_lag(found.phase),
            next_steps=(run.advise("straggler"), "Give its shard as much work as the others have"),
            ranks=(found.rank,),
        )


def _causes_of_lag(phase: str) -> tuple[str, ...]:
    machine = "a slower or busy machine or GPU"
    if phase == "data":
        return "samples that are slower to read there, as from another disk", machine
    if phase == "callbacks":
        return "work that only this rank does, such as logging or writing files", machine
    return machine, "batches that are longer than those of the other ranks"
