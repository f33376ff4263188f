"""Board: what the ranks of a loop leave for each other in a store, without a collective."""

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from hookcb.core.torch_private import store_client
from hookcb.processes.patience import PATIENCE

TIMEOUT = timedelta(seconds=3)  # of one answer of the store
POLL = 0.01  # seconds between looks for what others have not posted yet


class Board:
    """Notes that each rank posts in the store of the process group, and that the others read.

    No collective is issued, so the watched loop communicates as it would without us. All traffic is that of a
    thread with a connection of its own, begun by the first note: a post takes some microseconds, and nothing
    but `wait` waits for another process, for as long as it is told to. Once the process that hosts the store
    has ended, or in a forked process, posts go nowhere and reads find nothing.

    Notes are pickled, one a rank and key; a later one replaces an earlier one.

    Args:
        name: what all ranks call this board.
        rank, world: number of this process, and of all.
        connect: makes the connection to the store, None if there is none.

    Attributes:
        failure: why no note is read or written any more; "" as long as they are.

    >>> board = Board("example", rank=0, world=1, connect=lambda: None)
    >>> _ = board.post("seen", 1)
    >>> board.wait("seen", [0], seconds=1), board.failure
    ({}, 'there is no store through which ranks meet')
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        connect: Callable[[], Any] = lambda: store_client(TIMEOUT),
    ) -> None:
        self.rank, self.world, self.failure = rank, world, ""
        # processes that torchrun starts again after a failure find notes of those before
        self._prefix = f"hookcb/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{name}"
        self._connect, self._process = connect, os.getpid()
        self._jobs: SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(self, key: str, item: Any) -> "Future[Any]":
        """Leaves a note for the other ranks; returns at once what ends when it is written."""
        data = pickle.dumps(item)
        return self._do(lambda store: store.set(self._at(key, self.rank), data))

    def read(self, key: str, ranks: Iterable[int] | None = None) -> "Future[dict[int, Any]]":
        """Asks for the notes of ranks, by default of all; returns at once what will have those there are."""
        asked = range(self.world) if ranks is None else list(ranks)

        def found(store: Any) -> dict[int, Any]:
            there = [rank for rank in asked if store.check([self._at(key, rank)])]  # as `get` waits
            return {rank: pickle.loads(store.get(self._at(key, rank))) for rank in there}

        return self._do(found)

    def there(self, key: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """Notes of ranks that have posted, by rank; waits for the store only, at most so long."""
        if threading.current_thread() is self._thread:  # a collection of garbage there ends a loop
            return {}
        try:
            return self.read(key, ranks).result(seconds)
        except NotInTime:
            return {}

    def wait(self, key: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """Notes of ranks by rank; waits for those that have not posted yet, at most so long."""
        found: dict[int, Any] = {}
        missing, until = set(ranks), time.monotonic() + seconds
        while missing and not self.failure:
            found |= self.there(key, sorted(missing), max(0.0, until - time.monotonic()))
            missing -= found.keys()
            if not missing or time.monotonic() > until:
                break
            time.sleep(POLL)
        return found

    def wait_patiently(self, key: str, ranks: Iterable[int], share: float = 1.0) -> dict[int, Any]:
        """Notes as of `wait`, for at most a share of what `PATIENCE` has left."""
        with PATIENCE.waiting(share) as seconds:
            return self.wait(key, ranks, seconds)

    def flush(self, seconds: float) -> bool:
        """Waits until all notes so far are written, at most so long; returns whether they are."""
        try:
            self._do(lambda store: None).result(seconds)
        except NotInTime:
            return False
        return not self.failure

    # ---- the thread

    def _at(self, key: str, rank: int) -> str:
        return f"{self._prefix}/{key}/{rank}"

    def _do(self, job: Callable[[Any], Any]) -> "Future[Any]":
        done: Future[Any] = Future()
        if os.getpid() != self._process:
            self.failure = "this process was forked from one that trains"
        if self.failure:
            done.set_result({})
            return done
        self._jobs.put((job, done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="hookcb board")
            try:
                self._thread.start()
            except RuntimeError as error:  # the interpreter ends
                self.failure = f"no note was posted: {error}"
                done.set_result({})
        return done

    def _run(self) -> None:
        store: Any = None
        while True:
            job, done = self._jobs.get()
            result: Any = {}
            try:
                if store is None and not self.failure:
                    store = self._connect()
                    self.failure = "" if store is not None else "there is no store through which ranks meet"
                if not self.failure:
                    result = job(store)
            except Exception as error:  # nobody else sees it in a thread
                self.failure = f"the store through which ranks meet does not answer: {error}".split("\n")[0]
            done.set_result(result)
