"""Stragglers: which of several ranks has most work of its own, so that the others wait for it."""

import math
import socket
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hookcb.core.alone import Ranks
from hookcb.core.console import printable
from hookcb.core.fetches import FetchListener
from hookcb.core.text import duration
from hookcb.hooks.modules import device_of
from hookcb.records.printing import Printed
from hookcb.records.tables import Column, fitted

BLOCK = 100  # steps of all ranks that are compared at once
MAX_LATEST = 64  # blocks that are kept one by one
MIN_BLOCK = 10  # fewer, at the end of an epoch, are not compared
MAX_EXCESS = 0.1  # share of a step by which a rank may have more work than the others usually have
MIN_EXCESS = 3e-3  # seconds; less is the noise of a machine
OWN, WAITING = "own work", "other"  # hookcb's waits for other ranks are a phase of their own
BEFORE_FORWARD = ("data", "optimizer", "callbacks")  # work since ranks have last waited for each other


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that the others wait for; prints as a sentence. Seconds are those of a mean step.

    Attributes:
        rank: its number.
        host: name of its machine.
        seconds: its own work: all phases in which ranks do not wait for each other.
        usual: median of the own work of the other ranks.
        excess: how much more it works, `seconds - usual`.
        share: the same, relative to the whole step.
        phase: the phase in which it exceeds the median of the other ranks by most.
        extra: by how many seconds.
        n_slowest: number of blocks of 100 steps in which it had most work of all.
        n_blocks: number of all blocks.
    """

    rank: int
    host: str
    seconds: float
    usual: float
    excess: float
    share: float
    phase: str
    extra: float
    n_slowest: int
    n_blocks: int

    @property
    def is_chronic(self) -> bool:
        """Whether it was the slowest in more than half of the blocks."""
        return 2 * self.n_slowest > self.n_blocks

    def __str__(self) -> str:
        blocks = f"{self.n_slowest} of {self.n_blocks} block{'s' * (self.n_blocks != 1)} of steps"
        return printable(
            f"the others wait for rank {self.rank} ({self.host}): its own work takes "
            f"{duration(self.seconds)} a step, {duration(self.excess)} more than that of the others; "
            f"{self.phase} takes {duration(self.extra)} more; it was the slowest in {blocks}"
        )


class RankTimes(Printed):
    """Own work of each rank, summed up over blocks of steps; prints as a table of phases.

    Ranks wait for each other in the backward, in which they average gradients, and so their steps take
    equally long. Which of them the others wait for shows in the other phases only.

    Args:
        rank: number of this rank.
        hosts: names of the machines of all ranks.
        phases: all phases of a step.
        waiting: phases of the model in which ranks wait for each other.
        waits_for_main: whether the others wait for rank 0 when the forward begins.
        main_waits: whether rank 0 then waits for them, too.

    Attributes:
        n_blocks: number of blocks.
        n_steps: number of steps in them.
        n_slowest: for each rank, in how many blocks it was the slowest.
        latest: of the last 64 blocks the number of steps until its end, and the own work of each rank.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        phases: Sequence[str],
        waiting: Sequence[str],
        waits_for_main: bool,
        main_waits: bool = False,
    ) -> None:
        self.rank, self.hosts, self.waiting = rank, tuple(hosts), tuple(waiting)
        self._all = list(phases)
        self._waits_for_main, self._main_waits = waits_for_main, main_waits
        self.n_blocks = self.n_steps = 0
        self.n_slowest = [0] * len(self.hosts)
        self.latest = deque[tuple[int, list[float]]](maxlen=MAX_LATEST)
        self._sums = torch.zeros(len(self.hosts), len(self._all), dtype=torch.float64, device="cpu")
        self._whole = 0.0  # seconds of all steps, of a mean rank

    @property
    def phases(self) -> list[str]:
        """Phases that are compared."""
        return [phase for phase in self._all if phase not in (*self.waiting, WAITING)]

    def add(self, table: Tensor) -> None:
        """Adds a block: for each rank the seconds in each phase, and the number of steps."""
        n = table[:, -1:]
        if (n < 1).any():
            return  # a device has not finished a single step
        seconds = table[:, :-1] / n
        whole = seconds.sum(1).mean()
        if self._waits_for_main:
            before = seconds[:, [self._all.index(phase) for phase in BEFORE_FORWARD]].sum(1)
            forward = seconds[:, self._all.index("forward")]
            # on a CPU, rank 0 waits for the others too, until they take its buffers
            late = before.max() if self._main_waits else before[0]
            forward -= torch.minimum((late - before).clamp_min(0.0), forward)
        steps = int(n.max())
        self._sums += seconds * steps
        self._whole += float(whole) * steps
        self.n_steps, self.n_blocks = self.n_steps + steps, self.n_blocks + 1
        own = seconds[:, self._columns()].sum(1)
        self.n_slowest[int(own.argmax())] += 1
        self.latest.append((self.n_steps, own.tolist()))

    @property
    def straggler(self) -> Straggler | None:
        """The rank with most work of its own, if it exceeds that of the others by a tenth of a step."""
        found = self.slowest
        if found is None or not found.is_chronic or found.excess < MIN_EXCESS:
            return None
        return found if found.share > MAX_EXCESS else None

    @property
    def slowest(self) -> Straggler | None:
        """The rank with most work of its own, however little more it is; None before the first block."""
        if not self.n_blocks:
            return None
        rank, seconds, usual = self._compared(self._columns())
        extra = {phase: self._excess(phase, rank) for phase in self.phases}
        phase = max(extra, key=lambda phase: extra[phase])
        excess, step = seconds - usual, self._whole / self.n_steps
        return Straggler(
            rank,
            self.hosts[rank],
            seconds,
            usual,
            excess,
            excess / step if step else 0.0,
            phase,
            extra[phase],
            self.n_slowest[rank],
            self.n_blocks,
        )

    def lines(self) -> list[str]:
        """Sentences for a report."""
        where = f"{', '.join(self.waiting)} and {WAITING}"
        waits = f"ranks wait for each other in {where}: what a rank takes longer only there cannot be told"
        found = self.straggler
        if found is None:
            limit = f"{MAX_EXCESS:.0%} of a step, and {duration(MIN_EXCESS)}"
            least = f"no rank usually has {limit}, more work than the others"
            return [least if self.n_blocks else f"ranks are compared after {MIN_BLOCK} steps", waits]
        return [str(found), waits]

    def _columns(self, phases: Sequence[str] = ()) -> list[int]:
        return [self._all.index(phase) for phase in phases or self.phases]

    def _compared(self, columns: Sequence[int]) -> tuple[int, float, float]:
        """The slowest rank, its seconds, and the median of those of the others."""
        seconds = (self._sums[:, columns].sum(1) / self.n_steps).tolist()
        rank = max(range(len(seconds)), key=seconds.__getitem__)
        return rank, seconds[rank], _median_of_others(seconds, rank)

    def _excess(self, phase: str, rank: int) -> float:
        seconds = (self._sums[:, self._all.index(phase)] / self.n_steps).tolist()
        return float(seconds[rank] - _median_of_others(seconds, rank))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.n_blocks:
            shown = [phase for phase in self.phases if float(self._sums[:, self._all.index(phase)].max())]
            rows = {phase: self._compared(self._columns([phase])) for phase in shown}
            rows[OWN] = self._compared(self._columns())
            title = f"work of {len(self.hosts)} ranks without waiting, {self.n_steps:,} steps"
            names = list(rows)
            table = fitted(names, names, self._table(rows), options, title=title, head="phase")
            if shown:
                table.rows[-2].end_section = True
            yield table

    def _table(self, rows: dict[str, tuple[int, float, float]]) -> list[Column[Any]]:
        return [
            Column("others", lambda name: duration(rows[name][2])),
            Column("slowest", lambda name: duration(rows[name][1])),
            Column("more", lambda name: duration(rows[name][1] - rows[name][2])),
            Column("rank", lambda name: str(rows[name][0])),
            Column("host", lambda name: self.hosts[rows[name][0]], 1, is_text=True),
        ]


class RankGather:
    """Adds up the steps of this rank, and gathers those of all ranks in `RankTimes`, block by block.

    All ranks gather at the same batches: one reduction of 8 numbers a rank for 100 steps, which runs while
    the next ones are trained. The last block of an epoch is waited for.

    Args:
        ranks: the ranks; all of them make one of these at the same time.
        model: their model.
        phases: phases of a step, in the order in which `add` gets them.
        waits: notified when a wait for other ranks begins and ends, which is the phase `WAITING`.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, phases: Sequence[str], waits: FetchListener) -> None:
        self._ranks = ranks
        in_forward = waits_in_forward(ranks, model)
        waiting = ("forward", "backward") if in_forward == "all" else ("backward",)
        hosts = ranks.gather(socket.gethostname())
        on_cpu = device_of(model).type == "cpu"
        self.times = RankTimes(ranks.rank, hosts, phases, waiting, in_forward == "main", on_cpu)
        self._sums = [0.0] * (len(phases) + 1)
        self._n_batches = 0  # since the last block
        self._pending: tuple[Any, Tensor] | None = None
        self._waits = waits
        ranks.follow_waits(self._waits)

    def add(self, seconds: Sequence[float]) -> None:
        """Adds the seconds of each phase of a step."""
        self._sums = [total + x for total, x in zip(self._sums, (*seconds, 1.0), strict=True)]

    def end_batch(self) -> None:
        """Ends a batch of the training, on all ranks."""
        self._n_batches += 1
        if self._n_batches >= BLOCK:
            self._collect()
            self._start()

    def end_training(self) -> None:
        """Ends a training, on all ranks."""
        self._collect()
        if self._n_batches >= MIN_BLOCK:
            self._start()
            self._collect()

    def close(self) -> None:
        """Ends the fit; gathers nothing, as other ranks may have failed."""
        self._ranks.leave_waits(self._waits)
        self._pending = None

    def _start(self) -> None:
        table = torch.zeros(self._ranks.world, len(self._sums), dtype=torch.float64, device="cpu")
        table[self._ranks.rank] = torch.tensor(self._sums, dtype=torch.float64, device="cpu")
        self._sums, self._n_batches = [0.0] * len(self._sums), 0
        self._pending = self._ranks.start(table), table  # the maxima: the others have zeros there

    def _collect(self) -> None:
        if self._pending is not None:
            (work, table), self._pending = self._pending, None
            self._ranks.wait(work)
            self.times.add(table)


def waits_in_forward(ranks: Ranks, model: nn.Module) -> str:
    """Who waits for whom in the forward: "all" for all, "main" if all wait for rank 0 at its start, or "".

    Parameters that are sharded are gathered there, and SyncBatchNorm averages; buffers come from rank 0.
    """
    if ranks.is_sharded or any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        return "all"
    replicas = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    return "main" if any(m.broadcast_buffers and any(True for _ in m.buffers()) for m in replicas) else ""


def _median_of_others(values: Sequence[float], rank: int) -> float:
    others = [x for i, x in enumerate(values) if i != rank]
    return statistics.median(others) if others else math.nan
