"""Hangs: notices that the ranks of a training get no further, and says where each of them is."""

import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

from torch import distributed

from hookcb.core.console import show_error
from hookcb.core.failures import is_from_others
from hookcb.core.threads import known_to_python
from hookcb.core.torch_private import group_timeout
from hookcb.core.whose import frames_of, garbage_kept
from hookcb.processes.board import Board
from hookcb.processes.farewell import Farewell
from hookcb.processes.positions import LOADING, VALIDATES, Position, describe, position_in

SHARE = 0.8  # of the group's timeout, after which a rank that makes no step hangs
LOOKS = 16  # looks in that time
MIN_PAUSE, MAX_PAUSE = 0.25, 5.0  # seconds between looks
STILL = 0.25  # share of that time, after which the line in progress is noted
WHERE = "where"  # the notes
PATIENCE = 1.0  # seconds in which ranks learn where the others are
MAX_TEXT = 200  # characters of an error


class Terminated(Exception):
    """What has ended a training that SIGTERM ends."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A loop that is followed.

    Attributes:
        loop: the loop, None once it is gone.
        names: names of the modules of its model, by id.
        end: ends it, and tells its verdict.
    """

    loop: Callable[[], Any]
    names: Mapping[int, str]
    end: Callable[[], object]

    @property
    def batch(self) -> int:
        """Number of its training batch; 0 if it is gone."""
        return getattr(self.loop(), "train_iter", 0)


class Lookout:
    """A thread that notes where this rank is, and tells once it makes no step any more; see `follow`.

    The clock runs from the second batch on. It starts again with each batch, and while the training validates,
    compiles, reads or writes a checkpoint, is being debugged or was suspended. What the thread reads it only
    reads: the loop does nothing for it.

    Args:
        rank, world: number of this process, and of all.
        limit: gives the seconds without a batch that are a hang; None if nothing is.
    """

    def __init__(self, rank: int, world: int, limit: Callable[[], float | None]) -> None:
        self.rank, self.world, self._limit = rank, world, limit
        self.process = os.getpid()
        self._board = Board("hangs", rank, world)
        self._farewell = Farewell()
        self._followed: list[Followed] = []
        self._batches: list[int] = []
        self._last: Followed | None = None  # the loop that began a batch last
        self._moved = self._since = self._looked = time.monotonic()
        self._report = ""  # where the ranks are, while they get no further
        self._is_closed = False
        threading.Thread(target=self._run, daemon=True, name="hookcb lookout").start()

    def add(self, followed: Followed) -> None:
        """Follows a loop, too."""
        self._followed = [x for x in self._followed if x.loop() is not None] + [followed]
        self._last = followed

    # ---- the end of a loop

    def end(self, loop: Any, error: BaseException | None) -> str:
        """Notes the end of a loop, and why; where the ranks are if they have got no further, else ""."""
        self._farewell.hold()  # as a verdict is made now
        own = next((x for x in self._followed if x.loop() is loop), None)
        if isinstance(error, Terminated):
            return self._report
        if error is None:
            self._post(Position(batch=loop.train_iter, end="has ended its training"))
            return ""
        names = own.names if own is not None else {}
        position = position_in([x for x, _ in traceback.walk_tb(error.__traceback__)][::-1], names)
        text = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        short = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
        is_alone = not is_from_others(error) or position.doing == LOADING
        how = f"raised {short}" if is_alone else "waited in vain"
        self._post(replace(position, batch=loop.train_iter, end=how))
        if is_alone and not self._report:
            self._board.flush(PATIENCE)
            return ""
        return self._told(f"{short}; ")

    def leave(self, loop: Any) -> None:
        """Follows a loop no more, whose verdict was told."""
        self._followed = [x for x in self._followed if x.loop() not in (None, loop)]
        if not self._followed and not _kept:
            self.close()

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed = True
        self._board.flush(PATIENCE)
        self._farewell.close()

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._is_closed:
                pause = self._pause
                self._looked = time.monotonic()
                select.select([self._farewell.bell], [], [], pause)
                if self._farewell.heard():
                    self._take_leave()
                elif not self._is_closed:
                    self._look(is_late=time.monotonic() > self._looked + 2 * pause + 1)
        except Exception as error:  # nobody else sees it in a thread
            show_error(f"hookcb: rank {self.rank} looks for hangs no more: {error!r}")

    @property
    def _pause(self) -> float:
        return min(MAX_PAUSE, max(MIN_PAUSE, (self._limit() or MAX_PAUSE * LOOKS) / LOOKS))

    def _look(self, is_late: bool) -> None:
        now, limit = time.monotonic(), self._limit()
        if self._has_moved():
            if self._report:
                show_error(f"hookcb: rank {self.rank} goes on, in batch {self._batch}")
            self._report, self._moved, self._since = "", now, now
        position = self._position(is_still=now > self._moved + STILL * (limit or MAX_PAUSE))
        if is_late or position.excuse or not self._batch:
            self._since = now
        self._post(position)
        if limit is not None and now > self._since + limit and not self._report:
            self._alarm(position)

    def _has_moved(self) -> bool:
        batches = [x.batch for x in self._followed]
        changed = [x for x, n in zip(self._followed, self._batches, strict=False) if x.batch != n]
        self._last = changed[-1] if changed else self._last
        has_moved, self._batches = batches != self._batches, batches
        return has_moved

    @property
    def _batch(self) -> int:
        return 0 if self._last is None else self._last.batch

    def _position(self, is_still: bool) -> Position:
        """Position of the loop that moved last; with the line if it is still."""
        followed = self._last
        loop = None if followed is None else followed.loop()
        position = Position()
        if followed is not None and loop is not None and is_still:
            with garbage_kept():
                frame = sys._current_frames().get(known_to_python(loop._thread))
                position = position_in(list(frames_of(frame, bool)), followed.names)
        excuse = position.excuse or ("" if loop is None or loop.training else VALIDATES)
        return replace(position, batch=self._batch, excuse=excuse)

    def _post(self, position: Position) -> None:
        idle = time.monotonic() - self._moved
        self._board.post(WHERE, replace(position, rank=self.rank, host=socket.gethostname(), idle=idle))

    # ---- what it tells

    def _alarm(self, own: Position) -> None:
        """Tells that this rank makes no step, unless another one may take long, or tells it."""
        idle = time.monotonic() - self._moved
        if self.rank and (first := self._board.wait(WHERE, [0], PATIENCE).get(0)) is not None:
            if first.place and not (first.excuse or first.end):  # then rank 0 tells it
                self._report = describe([first, replace(own, rank=self.rank)], self.world)
                return
        found = self._read()
        if any(x.excuse and x.place for x in found.values()):
            self._since = time.monotonic()
            return
        self._report = describe(found.values(), self.world)
        show_error(f"hookcb: no training batch for {idle:.0f} s: {self._report}")

    def _read(self) -> dict[int, Position]:
        """Where the ranks are; rank 0 asks for all, the others too if they do not hear of rank 0."""
        self._board.flush(PATIENCE)
        return self._board.wait(WHERE, range(self.world), 0)

    def _told(self, why: str) -> str:
        """Where the ranks are, once all of them have noted it, or time is up."""
        until = time.monotonic() + PATIENCE
        while True:
            found = self._read()
            is_known = len(found) == self.world and all(x.end or x.place for x in found.values())
            if is_known or time.monotonic() > until or self._board.failure:
                break
            time.sleep(0.1)
        where = describe(found.values(), self.world)
        return f"{where} ({self._board.failure})" if self._board.failure else where

    def _take_leave(self) -> None:
        """Notes that SIGTERM ends this rank; rank 0 tells where all are, and what is known of the training."""
        ...


_own: Lookout | None = None
_kept: list[Callable[[], object]] = []
