"""Votes: the decisions that all ranks take together, so that no rank waits for one that has stopped."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hookcb.core.alone import ELSEWHERE
from hookcb.core.callback import Callback
from hookcb.core.events import BATCH_EVENTS, LEVELS, CancelException, Event, outermost
from hookcb.processes.exchange import Exchange, RankError
from hookcb.processes.groups import name_ranks

MAX_APART = 10.0  # seconds between ranks that cancel the same batch
N_WARM, N_DENSE = 4, 16  # batches that are not timed, and batches that all are voted on
PERIOD, MAX_DOUBLED = 0.025, 4  # seconds between votes, of which each takes up to half a millisecond
INSIDE = ("batch", "backward", "step")  # levels inside a batch


class Votes:
    """Turns cancels of single ranks into cancels of all of them, in the same batch.

    A cancel of the fit, the epoch or the training that is raised at `after_batch` takes effect at the end of
    the next batch: the vote on it runs while that batch is trained, so no rank waits for it. If batches take
    less than 25 ms, ranks vote on every second, fourth, eighth or sixteenth one only, which keeps the cost of
    votes to a few percent. Outside of batches ranks vote at every event, and wait. Inside a batch they vote
    where a callback acts that declares what it `may_cancel`; a cancel that was not declared must be raised by
    all ranks in the same batch.

    Args:
        ranks: the ranks of the fit.
    """

    def __init__(self, ranks: Exchange) -> None:
        self._ranks = ranks
        self._asked: list[CancelException] = []  # by this rank, not voted on yet
        self._vote: tuple[Any, torch.Tensor] | None = None  # the vote that is running
        self._n_batches, self._every, self._began = 0, 1, 0.0
        # by level, where this rank raised what is voted on, and what that was raised with
        self._raised: dict[str, tuple[str, tuple[Any, ...]]] = {}
        self._n_alone = 0  # cancels that were not declared
        self.signal = 0  # number of a signal that came to this rank
        self.agreed_signal = 0  # the same, once all ranks know of it
        self.is_alarmed = self.is_alarm_agreed = False  # the same of what all ranks should look at

    def decide(
        self, event: str, cbs: Iterable[Callback], cancels: Sequence[CancelException], training: bool
    ) -> list[CancelException]:
        """Cancels that take effect at an event, on all ranks; see `Ranks.decide`."""
        if event == Event.AFTER_FIT:
            return list(cancels)
        if event not in BATCH_EVENTS and event != Event.BEFORE_FIT:
            return self.vote(cancels)
        declared: set[str] = set().union(*(cb.may_cancel for cb in cbs)) if training else set()
        if declared:
            if event != Event.AFTER_BATCH:
                self._all_alike(event, [cancel for cancel in cancels if cancel.level not in declared])
            return self.vote(cancels)
        outer = [cancel for cancel in cancels if cancel.level not in INSIDE]
        inner = [cancel for cancel in cancels if cancel.level in INSIDE]
        if event in (Event.BEFORE_FIT, Event.AFTER_BATCH):
            self._asked += outer
            return inner
        if training:
            return self._all_alike(event, cancels)
        if self._ranks.is_sharded and (outer or event == Event.BEFORE_BATCH):
            return self._all_alike(event, cancels)
        self._asked += [cancel for cancel in outer if cancel.level != "validate"]
        return [*inner, *(cancel for cancel in outer if cancel.level == "validate")]

    def end_batch(self, is_last: bool = False) -> None:
        """Raises what the vote of the batch before has decided, and begins the next vote.

        Args:
            is_last: whether the training has ended, so that no vote begins.
        """
        self._raise(self._ended())
        if is_last:
            return
        self._n_batches += 1
        if self._n_batches == N_WARM:
            self._began = time.perf_counter()
        if self._n_batches <= N_DENSE or self._n_batches % self._every == 0:
            flags = self._flags()
            if self._n_batches == N_DENSE:
                flags[-1] = (time.perf_counter() - self._began) / (N_DENSE - N_WARM)
            self._vote = self._ranks.start(flags), flags

    def vote(self, cancels: Sequence[CancelException] = ()) -> list[CancelException]:
        """The cancel that any rank has asked for, in a list, empty if none has; waits for all ranks."""
        self._asked += cancels
        decided = self._ended()
        flags = self._flags()
        self._ranks.wait(self._ranks.start(flags))
        return self._read(torch.maximum(flags, decided) if decided is not None else flags)

    def _all_alike(self, event: str, cancels: Sequence[CancelException]) -> list[CancelException]:
        """Checks that all ranks raise a cancel that was not declared; without one, it costs nothing."""
        if cancels:
            self._n_alone += 1
            cancel, until = outermost(list(cancels)), time.monotonic() + MAX_APART
            mark = f"cancel {self._n_alone} of the {cancel.level}, at {event}"
            while not self._ranks.are_all_at(mark) and time.monotonic() < until:
                time.sleep(self._ranks.pause)
                self._ranks.check_failure()
            if missing := self._ranks.missing_at(mark):
                raise RankError(_undeclared(cancel, self._ranks.rank, missing)) from cancel
        return list(cancels)

    def _flags(self) -> torch.Tensor:
        asked = {cancel.level for cancel in self._asked}
        self._raised = {cancel.level: (cancel.raised_in, cancel.args) for cancel in self._asked}
        self._asked = []
        flags = torch.zeros(len(LEVELS) + 3, device="cpu")  # the last one is for the seconds of a batch
        if asked or self.signal or self.is_alarmed:
            flags[:-1] = torch.tensor(
                [*(level in asked for level in LEVELS), self.signal, self.is_alarmed], device="cpu"
            )
            self.is_alarmed = False
        return flags

    def _ended(self) -> torch.Tensor | None:
        """Flags of the vote that was running, None if none was."""
        if self._vote is None:
            return None
        (work, flags), self._vote = self._vote, None
        self._ranks.wait(work)
        return flags

    def _raise(self, flags: torch.Tensor | None) -> None:
        if flags is not None and (cancels := self._read(flags)):
            raise cancels[0]

    def _read(self, flags: torch.Tensor) -> list[CancelException]:
        *asked, signal, alarm, seconds = flags.tolist()
        if seconds:
            self._every = 2 ** min(MAX_DOUBLED, math.ceil(math.log2(max(1.0, PERIOD / seconds))))
        self.agreed_signal = max(self.agreed_signal, int(signal))
        self.is_alarm_agreed |= bool(alarm)
        for is_asked, (name, level) in zip(asked, LEVELS.items(), strict=True):
            if is_asked:
                raised_in, args = self._raised.get(name, (ELSEWHERE, ()))
                cancel = level.cancel(*args)
                cancel.raised_in = raised_in
                return [cancel]
        return []


def _undeclared(cancel: CancelException, rank: int, missing: Sequence[int]) -> str:
    return (
        f"{type(cancel).__name__} was raised in {cancel.raised_in} by rank {rank}, but not by "
        f"{name_ranks(missing)}, which would wait; a callback that cancels inside a batch on some ranks only "
        f"must declare may_cancel = {{{cancel.level!r}}}, so that all ranks vote"
    )
