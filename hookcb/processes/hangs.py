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

import torch
from torch import distributed, nn

from hookcb.core.console import show_error
from hookcb.core.threads import known_to_python
from hookcb.core.torch_private import group_timeout
from hookcb.core.whose import frames_of, garbage_kept
from hookcb.processes.board import Board
from hookcb.processes.exchange import RankError
from hookcb.processes.failures import is_from_others
from hookcb.processes.farewell import Farewell
from hookcb.processes.patience import PATIENCE
from hookcb.processes.positions import (
    BY_SIGNAL,
    FAILED,
    IN_VAIN,
    LOADING,
    VALIDATES,
    Position,
    describe,
    position_in,
)

SHARE = 0.8  # of the group's timeout, after which a rank that makes no step hangs
LOOKS = 16  # looks in that time
MIN_PAUSE, MAX_PAUSE = 0.25, 5.0  # seconds between looks
STILL = 0.25  # share of that time, after which the line in progress is noted
NOTE = "where"  # name of the notes
ANSWER = 1.0  # seconds in which the store is to answer
POLL = 0.1  # seconds between looks for what others have not posted yet
MANY = 64  # ranks, from which on only rank 0 reads where all of them are
MAX_TEXT = 100  # characters of an error


class Terminated(Exception):
    """The end of a training that SIGTERM ends."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A loop that is followed.

    Attributes:
        loop, model: the loop and its model, None once they are gone.
        names: names of the modules of its model, by id.
        end: ends it, and tells its verdict.
    """

    loop: Callable[[], Any]
    model: Callable[[], nn.Module | None]
    names: Mapping[int, str]
    end: Callable[[], object]

    @property
    def batch(self) -> int:
        """Number of its training batch; 0 if it is gone."""
        return getattr(self.loop(), "train_iter", 0)

    @property
    def validates(self) -> bool:
        """Whether it is in a validation, or its model is in eval mode, maybe without its wrapper."""
        loop, model = self.loop(), self.model()
        parts = [] if model is None else list(model.modules())
        return (loop is not None and not loop.training) or not any(x.training for x in parts[1:] or parts)


class Lookout:
    """A thread that notes where this rank is, and tells once it trains no batch any more; see `follow`.

    The clock runs from the second batch on. It starts again with each batch, and while the training
    validates, compiles, reads or writes a checkpoint, is being debugged or was suspended. The loop does
    nothing for it, as the thread only reads.

    Args:
        rank, world: number of this process, and of all.
        limit: gives the seconds without a batch that are a hang; None if none are.
    """

    def __init__(self, rank: int, world: int, limit: Callable[[], float | None]) -> None:
        self.rank, self.world, self._limit = rank, world, limit
        self.process = os.getpid()
        # one of many reads only what it needs, as all ask at once
        self._asked = range(world) if rank == 0 or world <= MANY else (0, rank)
        self._board, self._farewell = Board("hangs", rank, world), Farewell()
        self._followed: list[Followed] = []
        self._batches: list[int] = []
        self._last: Followed | None = None  # the loop that began a batch last
        self._moved = self._since = time.monotonic()
        self._report = ""  # where the ranks are, while they get no further
        self.is_closed = self._is_leaving = self._has_failed = False
        self._post(Position())  # connects it to the store while that is there
        threading.Thread(target=self._run, daemon=True, name="hookcb lookout").start()

    def add(self, followed: Followed) -> None:
        """Follows a loop, too."""
        self._drop(None)
        self._followed, self._last = [*self._followed, followed], followed
        self.hold(False)

    def hold(self, is_held: bool = True) -> None:
        """Lets SIGTERM wait for a moment, as a verdict is being told."""
        self._farewell.hold(is_held)

    # ---- the end of a loop

    def end(self, loop: Any, error: BaseException | None) -> str:
        """Notes the end of a loop; returns where the ranks are if they have got no further, else "".

        Waits for notes of other ranks, not for long, if the error says that one of them is missing.
        """
        self.hold()
        if self._is_leaving:
            return self._report
        names = next((x.names for x in self._followed if x.loop() is loop), {})
        self._drop(loop)
        self._has_failed = error is not None
        if error is None:
            self._post(Position(batch=loop.train_iter, end="has ended its training"))
            return ""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
        position = position_in(frames, names)
        is_of_others = is_from_others(error) or isinstance(error, RankError)
        is_own = not is_of_others or position.doing == LOADING
        end = f"{FAILED}{_text_of(error)}" if is_own else IN_VAIN
        self._post(replace(position, batch=loop.train_iter, end=end))
        if is_own and not self._report:
            self._board.flush(ANSWER)
            return ""
        return self._described(self._read_all())

    def leave(self, loop: Any) -> None:
        """Follows a loop no more, whose verdict was told."""
        if self._is_leaving:
            return
        if self._followed or _enders:
            self.hold(self._has_failed)
        else:
            self.close()

    def close(self) -> None:
        """Ends the thread."""
        self._board.flush(ANSWER)
        self._farewell.close()
        self.is_closed = True  # only now, as the thread that ends closes the bell if no signal rings it
        self._farewell.ring()

    def _drop(self, loop: Any) -> None:
        self._followed = [x for x in self._followed if x.loop() not in (None, loop)]

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self.is_closed:
                pause, began = self._pause(), time.monotonic()
                select.select([self._farewell.bell], [], [], pause)
                if self._farewell.heard() and self._farewell.is_due:
                    self._take_leave()
                elif not self.is_closed:
                    self._look(is_late=time.monotonic() > began + 2 * pause + 1)
        except Exception as error:  # nobody else sees it in a thread
            show_error(f"hookcb: rank {self.rank} looks for hangs no more: {error!r}")
        finally:
            self._farewell.dispose()

    def _pause(self) -> float:
        limit = self._limit()
        return MAX_PAUSE if limit is None else min(MAX_PAUSE, max(MIN_PAUSE, limit / LOOKS))

    def _look(self, is_late: bool) -> None:
        now, limit = time.monotonic(), self._limit()
        if not self._followed:  # the store may be gone, which torch would complain about
            return
        if self._has_moved():
            if self._report:
                show_error(f"hookcb: rank {self.rank} goes on, in batch {self._batch}")
            self._report, self._moved, self._since = "", now, now
        position = self._position(
            is_still=now > self._moved + (MAX_PAUSE if limit is None else STILL * limit)
        )
        if is_late or position.excuse or not self._batch:
            self._since = now
        self._post(position)
        if limit is not None and now > self._since + limit and not self._report:
            self._alarm(position)

    def _has_moved(self) -> bool:
        before, self._batches = self._batches, [x.batch for x in self._followed]
        if len(before) == len(self._batches):
            moved = [x for x, old in zip(self._followed, before, strict=True) if x.batch != old]
            self._last = moved[-1] if moved else self._last
        return before != self._batches

    @property
    def _batch(self) -> int:
        return 0 if self._last is None else self._last.batch

    def _position(self, is_still: bool) -> Position:
        """Position of the loop that has moved last; with its line if it is still."""
        position, followed = Position(batch=self._batch), self._last
        loop = None if followed is None else followed.loop()
        if followed is None or loop is None or not is_still:
            return position
        with garbage_kept():
            frame = sys._current_frames().get(known_to_python(loop._thread))
            position = position_in(list(frames_of(frame, lambda file: True)), followed.names)
        excuse = position.excuse or (VALIDATES if followed.validates else "")
        return replace(position, batch=self._batch, excuse=excuse)

    # ---- notes

    def _post(self, position: Position) -> None:
        self._board.post(NOTE, replace(position, rank=self.rank, host=socket.gethostname()))

    def _read(self) -> dict[int, Position]:
        return self._board.there(NOTE, self._asked, ANSWER)

    def _read_all(self) -> dict[int, Position]:
        """Positions of ranks, once each of them has told its own, or in a moment."""
        with PATIENCE.waiting(1 / 3) as seconds:
            until = time.monotonic() + seconds
            found = self._read()
            while time.monotonic() < until and not self._board.failure:
                if len(found) == len(self._asked) and all(x.end or x.place for x in found.values()):
                    break
                time.sleep(POLL)
                found = self._read() or found
        return found

    def _described(self, found: Mapping[int, Position]) -> str:
        where = describe(found.values(), self._asked)
        return f"{where} ({self._board.failure})" if self._board.failure else where

    # ---- what is told

    def _alarm(self, own: Position) -> None:
        """Tells that this rank trains no batch, unless that may take long, or rank 0 tells it."""
        found = {self.rank: replace(own, rank=self.rank)} | self._read()
        may_last = any(x.excuse for x in found.values())
        on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # any code may wait
        if may_last or not (on_device or any(x.waits for x in found.values())):
            self._since = time.monotonic()
            return
        first = found.get(0)
        self._report = self._described(found)
        is_told = self.rank > 0 and first is not None and first.place and not first.end
        if not is_told:
            idle = time.monotonic() - self._moved
            show_error(f"hookcb: no training batch for {idle:.0f} s: {self._report}")

    def _take_leave(self) -> None:
        """Notes that SIGTERM ends this rank, has its say, and lets it end."""
        self._is_leaving = True
        self._post(replace(self._position(is_still=True), end=BY_SIGNAL))
        self._farewell.speak(self._say_why)

    def _say_why(self) -> None:
        """Ends all loops, or what is kept, and so tells where the ranks are in the verdict."""
        self._report = self._described(self._read_all())
        for end in _enders[:1] or [x.end for x in self._followed]:
            end()


def _text_of(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".removesuffix(": ").split("\n")[0]
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


# ---- the lookout of this process

_own: Lookout | None = None
_enders: list[Callable[[], object]] = []


def follow(loop: Any, names: Mapping[int, str], end: Callable[[], object]) -> Lookout | None:
    """Has the lookout of this process follow a loop; returns it, None if the process trains alone.

    Args:
        loop: the loop, which it does not keep alive.
        names: names of the modules of its model, by id.
        end: ends the loop and tells its verdict, when SIGTERM ends the process.
    """
    global _own
    if loop.world == 1:
        return None
    if _own is None or _own.is_closed or _own.process != os.getpid():
        _own = Lookout(loop.rank, loop.world, limit_of_group)
    _own.add(Followed(ref(loop), ref(loop.model), names, end))
    return _own


@contextmanager
def lookout_kept(end: Callable[[], object]) -> Iterator[None]:
    """Keeps the lookout, once there is one, until the block ends; SIGTERM calls `end` instead of theirs."""
    _enders.append(end)
    try:
        yield
    finally:
        _enders.remove(end)
        if _own is not None and not _enders:
            _own.close()


def hold_farewell() -> None:
    """Lets SIGTERM wait for a moment, as verdicts are being told."""
    if _own is not None:
        _own.hold()


def limit_of_group() -> float | None:
    """Seconds without a batch that are a hang: a share of the default group's timeout; None without one."""
    is_open = distributed.is_initialized()
    group = distributed.group.WORLD if is_open else None
    return None if group is None else SHARE * group_timeout(group).total_seconds()
