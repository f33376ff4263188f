"""Exchange: the only place that lets the ranks of a Learner communicate."""

import math
import pickle
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from hookcb.core.alone import Ranks
from hookcb.core.console import warn
from hookcb.core.fetches import FetchListener
from hookcb.core.torch_private import group_timeout, make_store
from hookcb.processes.groups import MAX_SHOWN, name_ranks

T = TypeVar("T")

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


class Exchange(Ranks):
    """The communication of several ranks: by collectives, and by notes in the store of their group.

    It uses a group of its own, on the CPU, with the timeout of the model's group, so that it never mixes with
    the training's. Before `join`, every method returns what it was given, as that of a process alone.

    Args:
        group: the process group.
        is_sharded: whether ranks have different parts of the parameters, so that a forward needs all.

    Attributes:
        failure: what is known of a rank that failed; "" if nothing is.
    """

    def __init__(self, group: Any = None, is_sharded: bool = False) -> None:
        self.group, self.is_sharded = group, is_sharded
        self.failure = ""
        self._control: _Control | None = None  # before `join`
        self._run, self._n_met = 0, 0
        self._marks: dict[str, object] = {}  # at which this rank was
        self._wait_listeners: tuple[FetchListener, ...] = ()
        if group is not None:
            self.rank, self.world = distributed.get_rank(group), distributed.get_world_size(group)

    # ---- collectives

    def sum(self, values: Sequence[float]) -> list[float]:
        """See `Ranks`."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """See `Ranks`."""
        return self._reduced(values, distributed.ReduceOp.MAX)

    def mean(self, value: float, n: float) -> float:
        """See `Ranks`."""
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
        """See `Ranks`."""
        self.check_failure()
        group = self._control.group if self._control else None
        return distributed.all_reduce(x, op or distributed.ReduceOp.MAX, group=group, async_op=True)

    def wait(self, work: Any) -> None:
        """See `Ranks`."""
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
        """See `Ranks`."""
        self._wait_listeners += (listener,)

    def leave_waits(self, listener: FetchListener) -> None:
        """See `Ranks`."""
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
        """See `Ranks`."""
        if self._control is not None:
            self.check_failure()
            for x in tensors:
                distributed.all_reduce(x, group=self.group)
                x /= self.world

    def share(self, sums: Tensor, maxs: Tensor) -> None:
        """See `Ranks`."""
        if self._control is not None:
            for x, op in ((sums, distributed.ReduceOp.SUM), (maxs, distributed.ReduceOp.MAX)):
                if x.is_cpu:
                    self.wait(self.start(x, op))
                else:
                    self.check_failure()
                    distributed.all_reduce(x, op, group=self.group)

    def gather(self, item: Any) -> list[Any]:
        """See `Ranks`."""
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
        """See `Ranks`."""
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
        """See `Ranks`."""
        self.check_failure()
        try:
            return call(self._control.group if self._control else None)
        except RuntimeError as error:
            if self._control is None:
                raise
            raise RankError(self.failure or self.describe_loss()) from error

    def until_one_ends(self, items: Iterable[T], uneven: Callable[[], None] | None = None) -> Iterator[T]:
        """See `Ranks`."""
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
        """See `Ranks`."""
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
        """See `Ranks`."""
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
        """See `Ranks`."""
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
        """See `Ranks`."""
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
