"""time.straggler: a rank that all the others wait for."""

import math
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hookcb.core.clock import DATA, EPOCH, VALIDATION
from hookcb.core.torch_private import n_collectives
from hookcb.diagnosis.fault import NOTES, Fault, Result, Site, fault
from hookcb.diagnosis.measurements.clock import Clock
from hookcb.diagnosis.measurements.processes import Processes
from hookcb.diagnosis.run import Passed, Run, Skipped
from hookcb.hooks.modules import device_of
from hookcb.processes.stragglers import BLOCK, MAX_EXCESS, MIN_EXCESS, RankTimes, Straggler

MIN_BLOCKS, MAX_CHANCE = 5, 0.05  # of steps; probability of ranks that take turns
MAX_BLOCKS = 64  # that are kept; then two make one
FORWARD, REST = "forward", "rest"
Block = list[float]  # seconds of fetches, forwards and the rest, and the number of batches


@fault("time.straggler", Site.RUN, needs="ranks", subject="ranks")
class SlowRank(Fault):
    """One rank that all the others wait for.

    Formula: mean own work of the slowest rank in a step - median of that of the others / mean step, over
    five blocks of up to 100 steps or more; the same rank must be the slowest in so many of them that it
    happens to one of two equal ranks with a probability below 5 %, as in 5 of 5 or 7 of 8. Limit: 0.1, and
    3 ms, as for `time.data_bound`. Own work is the time in data, forward, loss, callbacks and optimizer: in
    the backward, in which gradients are averaged, ranks wait for each other; with sharded parameters or
    SyncBatchNorm also in the forward, which does not count then. A rank that takes longer only there cannot
    be told. Any other loop shows fetches of a DataLoader, and on a CPU the forwards, if no collective begins
    in these; it may wait for other ranks wherever else it communicates, which is not compared.

    Source: Jiang et al., "MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs", 2024,
    which finds stragglers by comparing the times of the same phases between ranks.
    """

    headline = "The other ranks wait for one"
    uses = (Clock, Processes)
    severity = "warning"
    cadence = NOTES

    def __init__(self) -> None:
        super().__init__()
        self.slowest: Straggler | None = None  # with most work of its own, once ranks were compared
        # of a loop that hookcb does not run
        self.is_watched = self.is_on_cpu = False
        self.blocks: list[Block] = []
        self.compared: tuple[str, ...] = ()  # phases
        self._total: Block = [0.0] * 4
        self._n_batches = BLOCK  # of a block
        self._n_begun: int | None = None  # collectives, before the forward
        self._n_forwards_with = 0  # forwards in which one began

    def on_batch(self, run: Run) -> None:
        own, clock = run.measured(Processes).own, run.measured(Clock).split
        if clock is None or not run.loop.is_external or not (len(own.replicas) > 1 or own.is_sharded):
            self.done = True
            return
        if not self.is_watched:
            self.is_watched, self.is_on_cpu = True, device_of(run.loop.model).type == "cpu"
        self._n_begun = n_collectives()
        if clock.n >= self._total[-1] + self._n_batches:
            seconds = {name: x for name, x in clock.seconds.items() if name not in ("", EPOCH, VALIDATION)}
            known = seconds.get(DATA, 0.0), seconds.get(FORWARD, 0.0)
            total = [*known, sum(seconds.values()) - sum(known), float(clock.n)]
            self.blocks.append([x - before for x, before in zip(total, self._total, strict=True)])
            self._total = total
        if len(self.blocks) == MAX_BLOCKS:
            pairs = zip(self.blocks[::2], self.blocks[1::2], strict=True)
            self.blocks = [[x + y for x, y in zip(*pair, strict=True)] for pair in pairs]
            self._n_batches *= 2

    def on_prediction(self, run: Run) -> None:
        self._n_forwards_with += n_collectives() != self._n_begun

    def state(self, run: Run) -> tuple[Any, ...] | None:
        if not self.is_watched:
            return None
        # one is that in which DistributedDataParallel agrees on the order of gradients
        compares_forwards = self.is_on_cpu and self._n_begun is not None and self._n_forwards_with < 2
        return compares_forwards, socket.gethostname(), self.blocks

    def merge(self, run: Run, of_ranks: Sequence[tuple[Any, ...]], rank: int) -> None:
        compare_forwards, hosts, blocks = zip(*of_ranks, strict=True)
        waiting = (REST,) if all(compare_forwards) else (FORWARD, REST)
        times = RankTimes(rank, hosts, (DATA, FORWARD, REST), waiting, waits_for_main=False)
        for of_block in zip(*blocks, strict=False):
            times.add(torch.tensor(of_block, dtype=torch.float64, device="cpu"))
        has_fetches = any(block[0] for of_rank in blocks for block in of_rank)
        self.compared = tuple(x for x in times.phases if x != DATA or has_fetches)
        self.slowest = times.slowest

    def findings(self, run: Run) -> Iterator[Result]:
        found = self.slowest
        if found is None or found.n_blocks < MIN_BLOCKS:
            yield Skipped(f"ranks were compared in fewer than {MIN_BLOCKS} blocks of steps")
            return
        if self.is_watched and not self.compared:
            yield Skipped("no fetch of a DataLoader was seen, and ranks may wait for each other in all else")
            return
        n = found.n_blocks  # as often as a fair coin shows heads
        is_chronic = sum(math.comb(n, i) for i in range(found.n_slowest, n + 1)) / 2**n < MAX_CHANCE
        if not (found.share > MAX_EXCESS and found.excess >= MIN_EXCESS and is_chronic):
            more = f"{found.share:.0%} more work at most" if is_chronic else "not always the same one"
            yield Passed(f"a rank that the others wait for ({more})", found.share, MAX_EXCESS)
            return
        what = " on its " * bool(self.compared) + " and ".join(self.compared)
        yield self.finding(
            value=found.share,
            limit=MAX_EXCESS,
            message=f"The other ranks wait for rank {found.rank} (host {found.host}) {found.share:.0%} of "
            f"the time: it works {1e3 * found.seconds:.1f} ms{what} in a step, the others "
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
