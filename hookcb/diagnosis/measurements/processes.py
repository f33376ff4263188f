"""Processes: which ones train beside this one, and what keeps their weights alike."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import ReferenceType, ref

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hookcb.core.torch_private import calling_replica, communication_hooks, replicated_parameters
from hookcb.diagnosis.fault import EVERY, Measurement
from hookcb.diagnosis.measurements.steps import Steps
from hookcb.diagnosis.run import Absent, Run
from hookcb.processes.groups import is_sharded

T = TypeVar("T")

NO_REPLICAS = Absent("there are no replicas of the model")
NO_OTHERS = Absent("there is no other process")


@dataclass(frozen=True, slots=True)
class Role:
    """The part of a process in the training.

    Attributes:
        rank: number of the process.
        replicas: numbers of the processes that DistributedDataParallel keeps alike with it; none without one.
        is_sharded: whether it has a part of the parameters only.
        is_periodic: whether a communication hook averages weights from time to time, and not each gradient.
        hooks: names of the communication hooks.
        n_raw: batches whose forward did not go through DistributedDataParallel.
        n_replaced: parameters that came into the model after it was wrapped.
    """

    rank: int = 0
    replicas: Sequence[int] = ()
    is_sharded: bool = False
    is_periodic: bool = False
    hooks: tuple[str, ...] = ()
    n_raw: int = 0
    n_replaced: int = 0


class Processes(Measurement):
    """Finds the other processes at the first batch, and the DistributedDataParallel of the model.

    That is the model, is in it, or is around it: Lightning, Accelerate and the Trainer of transformers show
    the model inside, and a loop of one's own may wrap the model after it is watched.

    Attributes:
        world: number of processes.
        own: the role of this one.
        roles: those of all that have told theirs, in that order.
    """

    cadence = EVERY
    uses = (Steps,)

    def __init__(self) -> None:
        self.world, self.own, self.roles = 1, Role(), list[Role]()
        self.sends_buffers = False
        self._is_known = False
        self._ddp: ReferenceType[DistributedDataParallel] | None = None
        self._is_around = False
        self._n_raw = self._n_replaced = 0

    @property
    def has_replicas(self) -> bool:
        """Whether this process trains a replica of DistributedDataParallel, as others do."""
        return len(self.own.replicas) > 1

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DistributedDataParallel that replicates the model, if there is one."""
        return None if self._ddp is None else self._ddp()

    def on_batch(self, run: Run) -> None:
        if not self._is_known:
            self._find(run.loop)
        if self._is_around:
            self._n_raw += calling_replica() is None
        self.done = not self._is_around

    def _find(self, loop: Any) -> None:
        self._is_known, self.world = True, loop.world
        if self.world == 1:
            return
        self.own = Role(loop.rank, is_sharded=is_sharded(loop.model))
        if (ddp := ddp_of(loop.model)) is not None:
            self._ddp, self.sends_buffers = ref(ddp), ddp.broadcast_buffers
            replicas = _as_range(distributed.get_process_group_ranks(ddp.process_group))
            hooks = tuple(communication_hooks(ddp))
            is_periodic = any("localsgd" in hook.lower() for hook in hooks)
            self.own = Role(loop.rank, replicas, self.own.is_sharded, is_periodic, hooks)
            # a loop that is watched from the model inside sees the calls that go around it
            is_inside = any(m is ddp for m in loop.model.modules())
            self._is_around = loop.is_external and loop.way == "watch" and not is_inside

    def count_replaced(self) -> None:
        """Counts the trained parameters that DistributedDataParallel does not know."""
        if (ddp := self.ddp) is not None:
            known = {id(p) for p in replicated_parameters(ddp)}
            ignored = ddp.parameters_to_ignore
            named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
            self._n_replaced = sum(id(p) not in known and name not in ignored for name, p in named)

    def lack(self, run: Run) -> None:
        """Tells a run which checks of several processes this training does not need."""
        if self.world == 1:
            run.lack(NO_OTHERS, "processes")
        if not self.has_replicas:
            run.lack(NO_REPLICAS, "replicas", "buffers")
        elif self.sends_buffers:
            run.lack(Absent("rank 0 sends its buffers to all replicas"), "buffers")

    def state(self, run: Run) -> Role:
        # of calls around a model that is watched with its wrapper, only the steps that follow are seen
        n_raw = self._n_raw if self._is_around else run.measured(Steps).n_alone
        return replace(self.own, n_raw=n_raw, n_replaced=self._n_replaced)

    def merge(self, run: Run, of_ranks: Sequence[Role], rank: int) -> None:
        self.roles = list(of_ranks)

    def freeze(self) -> None:
        self._ddp = None

    def numbers(self, n: int) -> list[int]:
        """Numbers of the `n` ranks that have told what they have seen."""
        return [role.rank for role in self.roles] or list(range(n))

    def groups(self, by_rank: Sequence[T]) -> Iterator[tuple[list[int], list[T]]]:
        """Numbers of ranks that hold replicas of each other, two or more, and what is given of them."""
        roles = self.roles or [Role(rank) for rank in range(len(by_rank))]
        for replicas in dict.fromkeys(role.replicas for role in roles) if by_rank else ():
            pairs = [
                (role.rank, x) for role, x in zip(roles, by_rank, strict=True) if role.replicas == replicas
            ]
            if len(pairs) > 1:
                yield [rank for rank, _ in pairs], [x for _, x in pairs]

    def ranks_alike(self, by_rank: Sequence[Any]) -> tuple[int, ...]:
        """Numbers of replicas that have what another replica has, too; the items are those of `roles`."""
        every = self.groups(by_rank)
        return tuple(n for ranks, xs in every for n, x in zip(ranks, xs, strict=True) if xs.count(x) > 1)


def _as_range(ranks: Sequence[int]) -> Sequence[int]:
    """Ranks as a range if they are one, which is small to send, however many they are."""
    first, step = ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1
    whole = range(first, first + step * len(ranks), step)
    return whole if list(whole) == list(ranks) else tuple(ranks)


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that a model is, that is in it, or that it is in; None without one."""
    inside = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if inside is not None or not (distributed.is_available() and distributed.is_initialized()):
        return inside
    calling = calling_replica()
    # objects refer to their class; a walk over all objects, which takes 40 ms, is made once
    candidates = [calling] if calling is not None else gc.get_referrers(DistributedDataParallel)
    # never isinstance, which may run code of a proxy
    found: list[Any] = [m for m in candidates if issubclass(type(m), DistributedDataParallel)]
    return next((m for m in found if any(x is model for x in m.modules())), None)
