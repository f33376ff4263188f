"""Ranks: what a loop and its callbacks ask of the processes that train one model; here, of one alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor

from hookcb.core.console import shown_once
from hookcb.core.events import CancelException
from hookcb.core.fetches import FetchListener

T = TypeVar("T")
ELSEWHERE = "a callback of another rank"


class Ranks:
    """The processes that train one model together: `learn.ranks`.

    This is the one of a process that trains alone, rank 0 of 1: every method returns what it was given, at no
    cost. `processes.ranks` has the one of several. All communication of hookcb in a fit goes through it, and
    happens only at points that every rank reaches: never in a hook, a signal handler or an error path, or
    behind an `if` on what one rank knows.

    Attributes:
        rank: index of this process, from 0.
        world: number of processes.
        group: their process group; None if alone.
        is_sharded: whether a forward needs all ranks.
        is_together: whether ranks decide together now, so that the loop asks `decide` at each event.

    >>> from hookcb import synth_learner
    >>> ranks = synth_learner().ranks
    >>> ranks.rank, ranks.world, ranks.is_main, ranks.sum([1.5])
    (0, 1, True, [1.5])
    """

    rank, world = 0, 1
    group: Any = None
    is_sharded = is_together = False

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    @property
    def signal(self) -> int:
        """Number of a signal that ends the training on several ranks, once all know of it; else 0."""
        return 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, ()  # a copy of a loop is alone until it trains

    def __repr__(self) -> str:
        return f"Ranks(rank={self.rank}, world={self.world})"

    # ---- what a loop asks

    def together(self, name: str, where: Callable[[], str]) -> AbstractContextManager[None]:
        """Waits for all ranks, which then decide and fail together in the block.

        Args:
            name: what all ranks must call, "learn.fit".
            where: describes what this rank does, for a message to others.

        Raises:
            RankError: If some ranks did not call it, or another one fails.
        """
        return shown_once(None)

    def meet(self, name: str, place: str) -> None:
        """Waits until all ranks are at the same point inside a fit, where not all ranks need to come.

        Args:
            name: what begins, for the message: "learn.validate".
            place: where, for the message.

        Raises:
            RankError: If some do not come in time; the message names them.
        """

    def decide(
        self, event: str, cbs: Iterable[Any], cancels: list[CancelException], training: bool
    ) -> list[CancelException]:
        """Cancels that take effect at an event, on all ranks.

        Args:
            event: the event at which callbacks have acted.
            cbs: those callbacks.
            cancels: cancels that they raised on this rank.
            training: whether it is training, and not validation.
        """
        return cancels

    def end_batch(self, is_last: bool = False) -> None:
        """Ends a batch of the training on all ranks; raises the cancel that they have decided.

        Args:
            is_last: whether the training has ended, and no batch comes.
        """

    def note_signal(self, number: int) -> None:
        """Lets the other ranks know, with the next decision, of a signal that ends the training."""

    def agree_on_alarm(self, noticed: bool) -> bool:
        """Whether any rank has noticed something that all should look at; they know one batch later.

        Args:
            noticed: whether this rank has, in the batch that ends.
        """
        return noticed

    def blame(self, error: BaseException, where: str) -> BaseException:
        """The error that ends a rank: that of another one if this one only notices it; else its own.

        Args:
            error: what was raised on this rank.
            where: what it did.
        """
        return error

    def gather(self, item: Any) -> list[Any]:
        """The `item` of each rank, in the order of ranks; on its way it is pickled."""
        return [item]

    # ---- what callbacks ask

    def find_failure(self) -> str:
        """Report of the first other rank that failed; "" if none has failed."""
        return ""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, element by element; all of them give as many."""
        return list(values)

    def max(self, values: Sequence[float]) -> list[float]:
        """Maxima over all ranks, element by element; all of them give as many."""
        return list(values)

    def mean(self, value: float, n: float) -> float:
        """Mean over all ranks of a value that is a mean over `n` samples on this one; NaN without samples."""
        return value

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replaces tensors, on the model's device, by their means over all ranks."""

    def share(self, sums: Tensor, maxs: Tensor) -> None:
        """Replaces two tensors by their sums and maxima over all ranks; on a GPU, it waits for nothing."""

    def start(self, x: Tensor, op: Any = None) -> Any:
        """Begins to replace `x`, on the CPU, by its reduction over all ranks, the maxima by default.

        Returns:
            What `wait` waits for.
        """

    def wait(self, work: Any) -> None:
        """Waits for a collective that was begun.

        Raises:
            RankError: If a rank does not take part; the message names it.
        """

    def follow_waits(self, listener: FetchListener) -> None:
        """Notifies `listener` when a wait for other ranks begins and ends; alone, there are none."""

    def leave_waits(self, listener: FetchListener) -> None:
        """Undoes `follow_waits`; a second call does nothing."""

    def of_main(self, make: Callable[[], T]) -> T:
        """Result of `make` on rank 0, for all ranks; on its way it is pickled."""
        return make()

    def run(self, call: Callable[[Any], T]) -> T:
        """Calls a function of torch that communicates by itself, in the group on the CPU; None if alone.

        Raises:
            RankError: If a rank does not take part; the message names it.
        """
        return call(None)

    def until_one_ends(self, items: Iterable[T], uneven: Callable[[], None] | None = None) -> Iterator[T]:
        """Items until any rank has no more; ranks wait for each other before each of them.

        Args:
            items: those of this rank.
            uneven: called if other ranks have more.
        """
        return iter(items)

    def until_all_end(self, items: Iterable[T]) -> Iterator[T | None]:
        """Items until no rank has more, then None; ranks wait for each other before each of them."""
        return iter(items)

    def check_alike(self, facts: Mapping[str, Any], hint: str = "") -> None:
        """Checks that all ranks have the same facts.

        Args:
            facts: values by what they are, such as "callbacks".
            hint: what to do if they differ, the end of the message.

        Raises:
            RankError: On all ranks; the message says which rank has what.
        """


ALONE = Ranks()
