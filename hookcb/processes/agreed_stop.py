"""AgreedStop: the end of a loop that hookcb does not run, at the same step on all ranks."""

from contextlib import suppress
from typing import Any

from torch import distributed

from hookcb.core.console import warn
from hookcb.core.torch_private import make_store
from hookcb.processes.groups import name_ranks

RANKS_PER_LOOK = 16  # with more ranks, each looks after every second, third … step only


class AgreedStop:
    """A request to stop, which takes effect after the same optimizer step on all ranks, without a collective.

    Ranks wait for each other in the backward of each step. So what is in the store when this rank begins the
    backward of a step is seen by all others at the end of that step. The step after which they stop is the
    first one whose backward this rank has not begun yet.

    Args:
        group: group of the ranks, None if this process is alone: it then stops at once.
        name: what all ranks call it.

    Attributes:
        is_due: whether to stop now.
        is_main: whether this is rank 0, the one that prints.
    """

    def __init__(self, group: Any, name: str) -> None:
        self.is_due, self.is_main = False, True
        self._n_steps, self._is_asked = 0, False
        self._store: Any = None
        if group is not None:
            self._rank, self._world = distributed.get_rank(group), distributed.get_world_size(group)
            self.is_main = self._rank == 0
            self._every = 1 + (self._world - 1) // RANKS_PER_LOOK
            self._store = make_store(f"hookcb/stop-{name}")
            self._store.set(f"here-{self._rank}", "")

    def request(self) -> None:
        """Asks for the end; ranks that do not look for it would hang, so it then takes no effect."""
        if self._store is None:
            self.is_due = True
        elif not self._is_asked:
            self._is_asked = True
            if missing := self.missing():
                warn(
                    f"rank {self._rank} requests the end of the training, but {name_ranks(missing)} would "
                    "not notice and wait for it; open the same watch on all ranks"
                )
            else:
                first = self._n_steps + 2  # it may be in the step that ends next
                self._store.compare_set("step", "", str(-(-first // self._every) * self._every))

    def missing(self) -> list[int]:
        """Ranks that do not look for a request."""
        ranks = range(self._world) if self._store is not None else ()
        return [rank for rank in ranks if not self._store.check([f"here-{rank}"])]

    def end_step(self) -> None:
        """Looks for a request of any rank, after a step."""
        self._n_steps += 1
        if self._store is None or self.is_due or self._n_steps % self._every:
            return
        with suppress(RuntimeError):  # the process that hosts the store has ended
            if self._store.check(["step"]):
                self.is_due = self._n_steps >= int(self._store.get("step"))
