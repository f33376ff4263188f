"""The ranks of a Learner: they meet, decide and fail together."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from hookcb.core.alone import ALONE, Ranks
from hookcb.core.callback import Callback
from hookcb.core.console import shown_once
from hookcb.core.events import BATCH_EVENTS, CancelException
from hookcb.processes.exchange import MAX_WAIT, Exchange
from hookcb.processes.failures import blame, shared_failures
from hookcb.processes.groups import group_of, is_sharded
from hookcb.processes.votes import Votes


class SeveralRanks(Exchange):
    """Several processes that train one model together: what a loop asks is answered for all of them."""

    _votes: Votes | None = None  # while they are together

    @contextmanager
    def together(self, name: str, where: Callable[[], str]) -> Iterator[None]:
        """See `Ranks`."""
        with shared_failures(self, where):
            self.join(name, MAX_WAIT)
            self._votes, self.is_together = Votes(self), True
            try:
                with shown_once(self.rank):
                    yield
            finally:
                self._votes, self.is_together = None, False

    def decide(
        self, event: str, cbs: Iterable[Callback], cancels: list[CancelException], training: bool
    ) -> list[CancelException]:
        """See `Ranks`."""
        cbs = list(cbs)
        is_due = cancels or event not in BATCH_EVENTS or any(cb.may_cancel for cb in cbs)
        if self._votes is None or not is_due:
            return cancels
        return self._votes.decide(event, cbs, cancels, training)

    def end_batch(self, is_last: bool = False) -> None:
        """See `Ranks`."""
        if self._votes is not None:
            self._votes.end_batch(is_last)

    @property
    def signal(self) -> int:
        """See `Ranks`."""
        return 0 if self._votes is None else self._votes.agreed_signal

    def note_signal(self, number: int) -> None:
        """See `Ranks`."""
        if self._votes is not None:
            self._votes.signal = number

    def agree_on_alarm(self, noticed: bool) -> bool:
        """See `Ranks`."""
        if (votes := self._votes) is None:
            return noticed
        votes.is_alarmed |= noticed
        is_agreed, votes.is_alarm_agreed = votes.is_alarm_agreed, False
        return is_agreed

    def blame(self, error: BaseException, where: str) -> BaseException:
        """See `Ranks`."""
        return blame(self, error, where)


def ranks_of(model: nn.Module) -> Ranks:
    """The ranks that train a model; `ALONE` if this process trains it alone."""
    group = group_of(model)
    return ALONE if group is None else SeveralRanks(group, is_sharded(model))
