"""Ranks: the processes that train one model together, and the only place that lets them communicate."""

import math
import pickle
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain, islice
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from hookcb.core.console import warn
from hookcb.core.fetches import FetchListener
from hookcb.core.shards import is_fully_sharded
from hookcb.core.text import join_names
from hookcb.core.torch_private import group_timeout, is_joining, make_store

T = TypeVar("T")

MAX_SHOWN = 4  # ranks named in a message
PATIENCE = 20.0  # seconds of waiting for a rank until it is told
GRACE = 2.0  # seconds in which ranks that still run say so, after one was missed
MAX_FAREWELL = 3.0  # seconds in which the others learn of a failure before rank 0 ends
POLL = 0.01  # seconds between looks for other ranks
MAX_BLOCKED = timedelta(seconds=0.5)  # in a collective, until it looks whether another rank has failed
MAX_WAIT = timedelta(seconds=60)  # for ranks that begin a validation; that of the group if it is less


class RankError(RuntimeError):
    """An error of another rank, or a disagreement between ranks; the message names them."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note("see docs/guide/processes.md")


class Ranks:
    """The processes that train one model together: `learn.ranks`.

    All communication of hookcb goes through here, and happens only at points that every rank reaches: never
    in a hook, a signal handler or an error path, or behind an `if` on what one rank knows. It uses a group of
    its own, on the CPU, with the timeout of the model's group, so that it never mixes with the training's.

    A process that trains alone has rank 0 of 1; every method then returns what it was given, at no cost.

    Args:
        model: a model wrapped in DistributedDataParallel or FullyShardedDataParallel, or with sharded
            parameters; any other is trained alone.
        group: instead of a model, the process group.

    Attributes:
        rank: index of this process, from 0.
        world: number of processes.
        group: their process group; None if alone.

    >>> from hookcb import synth_learner
    >>> ranks = synth_learner().ranks
    >>> ranks.rank, ranks.world, ranks.is_main, ranks.sum([1.5])
    (0, 1, True, [1.5])
    """

    def __init__(self, model: nn.Module | None = None, *, group: Any = None) -> None:
        self.group = group if model is None else group_of(model)
        self.rank, self.world = 0, 1
        self.is_sharded = False  # whether a forward needs all ranks
        self.failure = ""  # what is known of a rank that failed
        self._control: _Control | None = None  # before `join`, and if alone
        self._run, self._n_met = 0, 0
        self._marks: dict[str, object] = {}  # at which this rank was
        self._wait_listeners: tuple[FetchListener, ...] = ()
        if self.group is not None:
            self.rank, self.world = distributed.get_rank(self.group), distributed.get_world_size(self.group)
            self.is_sharded = model is not None and is_sharded(model)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, ()  # a copy of a loop is alone until it trains

    def __repr__(self) -> str:
        return f"Ranks(rank={self.rank}, world={self.world})"

    # ---- collectives

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, element by element; all of them give as many."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Maxima over all ranks, element by element; all of them give as many."""
        return self._reduced(values, distributed.ReduceOp.MAX)

    def mean(self, value: float, n: float) -> float:
        """Mean over all ranks of a value that is a mean over `n` samples on this one; NaN without samples."""
        if self._control is None:
            return value
        total, n = self.sum([value * n if n else 0.0, n])
        return total / n if n else math.nan

    def _reduced(self, values: Sequence[float], op: Any) -> list[float]:
        if self._control is None or not values:
            return list(values)
        x = torch.tensor(values, dtype=torch.float64, device="cpu")
        self.wait(self.start(x, op))
        return list(x.tolist())

    def start(self, x: Tensor, op: Any = None) -> Any:
        """Begins to replace `x`, on the CPU, by its reduction over all ranks, the maxima by default.

        Returns:
            What `wait` waits for.
        """
        self.check_failure()
        group = self._control.group if self._control else None
        return distributed.all_reduce(x, op or distributed.ReduceOp.MAX, group=group, async_op=True)

    def wait(self, work: Any) -> None:
        """Waits for a collective that was begun.

        Raises:
            RankError: If a rank does not take part; the message names it.
        """
        self.check_failure()
        listeners = self._wait_listeners
        for listener in listeners:
            listener.begin()
        try:
            while not self._is_done(work):
                self.find_failure()
                self.check_failure()
        except RuntimeError as error:  # torch's errors name an address, not a rank
            raise RankError(self.failure or self.describe_loss()) from error
        finally:
            for listener in listeners:
                listener.end()

    def follow_waits(self, listener: FetchListener) -> None:
        """Notifies `listener` when a wait for other ranks begins and ends; alone, there are none."""
        if self.world > 1:
            self._wait_listeners += (listener,)

    def leave_waits(self, listener: FetchListener) -> None:
        """Undoes `follow_waits`; a second call does nothing."""
        self._wait_listeners = tuple(x for x in self._wait_listeners if x is not listener)

    def _is_done(self, work: Any) -> bool:
        """Waits for a collective, on gloo only for so long; returns whether it has ended."""
        if work is None or self._control is None or not self._control.can_stop_waiting:
            _ = work is None or work.wait()
            return True
        try:
            work.wait(MAX_BLOCKED)
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replaces tensors, on the model's device, by their means over all ranks."""
        if self._control is not None:
            self.check_failure()
            for x in tensors:
                distributed.all_reduce(x, group=self.group)
                x /= self.world

    def share(self, sums: Tensor, maxs: Tensor) -> None:
        """Replaces two tensors by their sums and maxima over all ranks; on a GPU, it waits for nothing."""
        if self._control is not None:
            for x, op in ((sums, distributed.ReduceOp.SUM), (maxs, distributed.ReduceOp.MAX)):
                if x.is_cpu:
                    self.wait(self.start(x, op))
                else:
                    self.check_failure()
                    distributed.all_reduce(x, op, group=self.group)

    def gather(self, item: Any) -> list[Any]:
        """The `item` of each rank, in the order of ranks; on its way it is pickled."""
        if self._control is None:
            return [item]
        data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        sizes = [int(n) for n in self.sum([len(data) * (rank == self.rank) for rank in range(self.world)])]
        parts = torch.zeros(sum(sizes), dtype=torch.uint8, device="cpu")
        begin = sum(sizes[: self.rank])
        parts[begin : begin + len(data)] = data
        self.wait(self.start(parts))
        return [pickle.loads(part.numpy().tobytes()) for part in torch.split(parts, sizes)]

    def of_main(self, make: Callable[[], T]) -> T:
        """Result of `make` on rank 0, for all ranks; on its way it is pickled."""
        if self._control is None:
            return make()
        data = bytearray(pickle.dumps(make())) if self.is_main else bytearray()
        part = torch.zeros(int(self.sum([len(data)])[0]), dtype=torch.uint8, device="cpu")
        if self.is_main:
            part[:] = torch.frombuffer(data, dtype=torch.uint8)
        self.wait(self.start(part))
        item: T = pickle.loads(part.numpy().tobytes())
        return item

    def run(self, call: Callable[[Any], T]) -> T:
        """Calls a function of torch that communicates by itself, in the group on the CPU; None if alone.

        Raises:
            RankError: If a rank does not take part; the message names it.
        """
        self.check_failure()
        try:
            return call(self._control.group if self._control else None)
        except RuntimeError as error:
            if self._control is None:
                raise
            raise RankError(self.failure or self.describe_loss()) from error

    def until_one_ends(self, items: Iterable[T], uneven: Callable[[], None] | None = None) -> Iterator[T]:
        """Items until any rank has no more; ranks wait for each other before each of them.

        Args:
            items: those of this rank.
            uneven: called if other ranks have more.
        """
        waiting = iter(items)
        while True:
            more = [item for item in islice(waiting, 1)]
            has_ended, has_more = self.max([not more, bool(more)])
            if has_ended:
                if has_more and uneven is not None:
                    uneven()
                return
            yield more[0]

    def until_all_end(self, items: Iterable[T]) -> Iterator[T | None]:
        """Items until no rank has more, then None; ranks wait for each other before each of them."""
        waiting = iter(items)
        while True:
            more = [item for item in islice(waiting, 1)]
            if not self.max([bool(more)])[0]:
                return
            yield more[0] if more else None

    # ---- checks

    def are_all_at(self, mark: str) -> bool:
        """Whether all ranks have called this with the same `mark`; does not wait for them."""
        if (control := self._control) is None:
            return True
        count, caller = f"{self._run}/{mark}", object()
        is_new = self._marks.setdefault(mark, caller) is caller  # once, as two threads may ask
        if is_new:
            control.store.set(f"{count}/{self.rank}", "")
        return bool(control.store.add(count, int(is_new)) >= self.world)

    def missing_at(self, mark: str) -> list[int]:
        """Ranks that have not called this or `are_all_at` with the same `mark` yet; asks for each."""
        if (control := self._control) is None or self.are_all_at(mark):
            return []
        keys = [f"{self._run}/{mark}/{rank}" for rank in range(self.world)]
        return [rank for rank, key in enumerate(keys) if not control.store.check([key])]

    @property
    def pause(self) -> float:
        """Seconds between looks at the store, of which all ranks together make at most 10,000 a second."""
        return max(POLL, self.world * 1e-4)

    def join(self, name: str, timeout: timedelta | None = None) -> None:
        """Waits until all ranks are here; only then can they communicate.

        Args:
            name: what begins, for the message: "learn.validate".
            timeout: by default that of the group.

        Raises:
            RankError: If some do not come in time; the message names them.
        """
        if self.group is None:
            return
        self._control = control = _control_of(self.group)
        control.n_runs += 1  # also if it fails, as it then does on all ranks
        self._run = control.n_runs
        first = control.store.compare_set(f"{self._run}/begins", "", f"{self.rank} {name}").decode()
        rank, _, other = first.partition(" ")
        if other != name:
            raise RankError(f"rank {self.rank} called {name}, but rank {rank} {other}; call the same on all")
        self._meet(name, name, timeout)
        with_failure = self._run > 1 and control.store.check([f"{self._run - 1}/failure"])
        control.connect(anew=with_failure)

    def meet(self, name: str, place: str) -> None:
        """Waits until all ranks are at the same point inside a fit, where not all ranks need to come.

        Args:
            name: what begins, for the message: "learn.validate".
            place: where, for the message.

        Raises:
            RankError: If some do not come in time; the message names them.
        """
        if self._control is not None:
            self._n_met += 1
            self._meet(f"{name}, {self._n_met}", f"{name}{place}", MAX_WAIT)

    def _meet(self, mark: str, name: str, timeout: timedelta | None) -> None:
        assert self._control is not None
        limit = self._control.timeout
        begin, is_told = time.monotonic(), False
        until = begin + min(timeout or limit, limit).total_seconds()
        while not self.are_all_at(mark):
            self.check_failure()
            if not is_told and time.monotonic() > begin + PATIENCE:
                is_told = True
                late = name_ranks(self.missing_at(mark))
                warn(f"waiting for {late} to call {name}", is_of_rank=True)
            if time.monotonic() > until and (absent := self.missing_at(mark)):
                raise RankError(
                    f"{name} must be called on all ranks, but {name_ranks(absent)} did not call it"
                )
            time.sleep(self.pause)

    def check_alike(self, facts: Mapping[str, Any], hint: str = "") -> None:
        """Checks that all ranks have the same facts.

        Args:
            facts: values by what they are, such as "callbacks".
            hint: what to do if they differ, the end of the message.

        Raises:
            RankError: On all ranks; the message says which rank has what.
        """
        if self._control is None:
            return
        digest = float(zlib.crc32(repr(dict(facts)).encode()))
        most, least = self.max([digest, -digest])
        if most == -least:
            return
        everyone = self.gather(dict(facts))
        for about in dict.fromkeys(about for theirs in everyone for about in theirs):
            values = [theirs.get(about) for theirs in everyone]
            if any(value != values[0] for value in values):
                raise RankError(f"all ranks need the same {about}, but {_who_has_what(values)}{hint}")

    # ---- failures

    def report_failure(self, text: str) -> None:
        """Lets the other ranks know that this one fails, and why; does not wait for them."""
        if self._control is not None:
            self.failure = f"rank {self.rank} {text}"
            with suppress(RuntimeError):  # the store may be gone
                self._control.store.compare_set(f"{self._run}/failure", "", self.failure)
                self._control.store.set(f"{self._run}/alarm", "")

    def find_failure(self) -> str:
        """Report of the first rank that failed; "" if none has failed."""
        control, key = self._control, f"{self._run}/failure"
        if control is not None and not self.failure and control.store.check([key]):
            text = control.store.get(key).decode()
            self.failure = "" if text.startswith(f"rank {self.rank} ") else text
        return self.failure

    def answer_alarm(self) -> str:
        """Says that this rank runs if another one asks; returns the report of a rank that failed, or ""."""
        if self._control is None or not self._control.store.check([f"{self._run}/alarm"]):
            return ""
        self.are_all_at("here")
        return self.find_failure()

    def wait_for_others(self) -> None:
        """Waits on rank 0, which may host the store, until the others know of a failure; not for long."""
        with suppress(RuntimeError):
            self.are_all_at("known")
            until = time.monotonic() + MAX_FAREWELL
            while self._control is not None and self.is_main and time.monotonic() < until:
                if self.are_all_at("known"):
                    return
                time.sleep(self.pause)

    def check_failure(self) -> None:
        """Raises a RankError if another rank is known to have failed, as it would wait for that in vain."""
        if self.failure:
            raise RankError(self.failure)

    def describe_loss(self) -> str:
        """Why a collective has failed or timed out: a rank that failed, or the ranks that no longer run."""
        if self.failure:  # the store may be gone
            return self.failure
        try:
            if self._control is not None:
                self._control.store.set(f"{self._run}/alarm", "")
            if failure := self.answer_alarm():
                return failure
            time.sleep(GRACE + self.world * 1e-3)  # in which a thread of each rank that runs answers
            if failure := self.answer_alarm():
                return failure
            missing = self.missing_at("here")
        except RuntimeError:
            return (
                "the process that hosts the store through which ranks meet, usually that of rank 0, has ended"
            )
        if not missing:
            return "all ranks run, but they are at different points of the training"
        text = f"{name_ranks(missing)} did not take part: the process has ended, or left the training"
        with suppress(
            RuntimeError
        ):  # others may notice it only once this rank, and perhaps the store, is gone
            if self._control is not None:
                self._control.store.compare_set(f"{self._run}/failure", "", text)
            time.sleep(GRACE / 2)
        return text


ALONE = Ranks()


def ranks_of(model: nn.Module) -> Ranks:
    """The ranks that train a model; `ALONE` if this process trains it alone."""
    return ALONE if group_of(model) is None else Ranks(model)


def name_own_rank() -> str:
    """Names this process among those of the open group, "rank 0"; "" if there is no other."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return ""
    return name_ranks([distributed.get_rank()])


def describe_alone(model: nn.Module, group: Any) -> str:
    """Describes whose numbers this rank shows, where a group does not communicate; "" without a group."""
    if group is None:
        return ""
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    what = "its batches and its shards of the parameters" if is_sharded(model) else "its batches"
    return f"numbers are those of rank {rank} of {world}, from {what}; only Diagnose joins those of all ranks"


def group_of(model: nn.Module) -> Any:
    """Process group in which a model is replicated or sharded, None if this process has it alone.

    Inside of `with model.join():` there is none: ranks may end at different batches, and do not wait there.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    replicas = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if any(is_joining(m) for m in replicas):
        return None
    group = next((m.process_group for m in replicas), None)
    if group is None and is_sharded(model):
        group = distributed.group.WORLD
    return None if group is None or distributed.get_world_size(group) <= 1 else group


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks have different parts of the parameters; checks names, as importing classes takes time."""
    if any(map(is_fully_sharded, model.modules())):  # its parameters may be gathered now
        return True
    kinds = {type(m).__name__ for m in model.modules()} | {type(p).__name__ for p in model.parameters()}
    return bool(kinds & {"DTensor", "FullyShardedDataParallel"})


def send_from_main(model: nn.Module) -> None:
    """Gives all ranks the parameters and buffers that rank 0 has, unless they have no values yet."""
    for x in chain(model.parameters(), model.buffers()):
        if not (is_lazy(x) or x.is_meta):
            distributed.broadcast(x.data, 0)


def without_replicas(model: nn.Module) -> nn.Module:
    """The model of which a DistributedDataParallel keeps replicas; any other as it is."""
    inside: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inside


def set_sync(model: nn.Module, is_on: bool) -> bool:
    """Has a DistributedDataParallel reduce gradients in its next backwards, or not.

    Returns:
        Whether gradients stay on this rank.
    """
    replicas = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    for m in replicas:
        m.require_backward_grad_sync = is_on
    return bool(replicas) and not is_on


def name_ranks(ranks: Sequence[int]) -> str:
    """Names ranks: "rank 1", or "ranks 0, 2, 3"."""
    names = join_names([str(rank) for rank in ranks], MAX_SHOWN)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def _who_has_what(values: Sequence[Any]) -> str:
    owners: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        owners.setdefault(str(value), []).append(rank)
    each = [
        f"{name_ranks(ranks)} ha{'ve' if len(ranks) > 1 else 's'} {what}" for what, ranks in owners.items()
    ]
    return "; ".join(each[:MAX_SHOWN])


class _Control:
    """A group on the CPU for what hookcb says to the other ranks, and a part of the store.

    Attributes:
        n_runs: number of fits and validations so far, the same on all ranks.
        group: the group, once all ranks were here.
        can_stop_waiting: whether the group can wait for a collective for a given time.
    """

    def __init__(self, group: Any) -> None:
        self._of, self._ranks = group, distributed.get_process_group_ranks(group)
        self.timeout, self.n_runs = group_timeout(group), 0
        self.group: Any = None
        backend = distributed.get_backend(group)
        self._backend = backend if backend in ("fake", "threaded") else "gloo"
        self.can_stop_waiting = self._backend == "gloo"
        name = f"hookcb/{len(self._ranks)}-{zlib.crc32(repr(self._ranks).encode())}"
        own = f"{name}/{distributed.get_rank()}"  # threads can be ranks
        _made[own] += 1  # the store may outlive a group, and keep what was said in it
        self.store = make_store(f"{name}/{_made[own]}")

    def connect(self, anew: bool = False) -> None:
        """Makes the group, once; waits for all ranks.

        Args:
            anew: whether to replace the group, in which a rank that failed has left a collective unfinished.
        """
        if self.group is None or anew:
            # the name of a group of all ranks must not depend on how many other groups each is in
            is_part = len(self._ranks) < distributed.get_world_size()
            self.group = distributed.new_group(
                self._ranks, timeout=self.timeout, backend=self._backend, use_local_synchronization=is_part
            )


_made: Counter[str] = Counter()  # controls that this process has made, by name and rank
_controls: WeakKeyDictionary[Any, _Control] = WeakKeyDictionary()


def _control_of(group: Any) -> _Control:
    """The control group beside a process group, made once."""
    if group not in _controls:
        _controls[group] = _Control(group)
    return _controls[group]
