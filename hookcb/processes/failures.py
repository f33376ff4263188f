"""Failures of ranks: whoever fails says so, and the others end and name it instead of waiting for it."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import distributed

from hookcb.core.events import CancelException
from hookcb.processes.exchange import Exchange, RankError

POLL = 0.5  # seconds between looks for a failure
MAX_PLACE = 100  # length of a note about an error that is told to other ranks
MAX_TEXT = 300  # length of an error's text that is told to other ranks
GRACE = 10.0  # seconds in which a rank that knows of a failure may end by itself


@contextmanager
def shared_failures(ranks: Exchange, where: Callable[[], str]) -> Iterator[None]:
    """Reports an exception of the block to the other ranks; raises theirs if they failed first.

    A thread looks for failures, and tells others that this rank runs. A rank that still waits in a collective
    `GRACE` seconds after another one has failed cannot be freed; its process then says why and ends.

    Args:
        ranks: the ranks; with one only, it does nothing.
        where: describes where this rank is, "in epoch 0, batch 5".

    Raises:
        RankError: If another rank failed first; the message has its number, its error, and where it was.
    """
    if ranks.world == 1:
        yield
        return
    ended = threading.Event()
    threading.Thread(target=_watch, args=(ranks, where, ended), daemon=True, name="hookcb ranks").start()
    try:
        yield
    except CancelException:
        raise
    except BaseException as error:
        cause = blame(ranks, error, where())
        if isinstance(error, Exception):
            ranks.wait_for_others()
        if cause is error:
            raise
        raise cause from error
    finally:
        ended.set()


def blame(ranks: Exchange, error: BaseException, where: str) -> BaseException:
    """The error that ends a rank: that of another rank if this one only notices it; else it is reported."""
    if isinstance(error, RankError) and ranks.failure:
        return error
    if is_from_others(error) and (failure := ranks.describe_loss()):
        ranks.failure = failure
        return RankError(f"{failure}; rank {ranks.rank} was {where}")
    if ranks.failure:  # of this rank, reported already
        return error
    note = next(iter(getattr(error, "__notes__", ())), "")  # "in MyCallback.after_pred, epoch 0, batch 5"
    place = note if note.startswith("in ") and len(note) < MAX_PLACE else where
    ranks.report_failure(f"raised {type(error).__name__} {place}: {_shortened(str(error))}")
    return error


def _shortened(text: str) -> str:
    """The begin and the end of a long text, where a loader's worker puts its error."""
    return (
        text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 3]} … {text[-2 * MAX_TEXT // 3 :].strip()}"
    )


def is_from_others(error: BaseException) -> bool:
    """Whether an error is that of a collective in which another rank did not take part."""
    text = str(error)
    words = ("Connection closed", "Connection reset", "Timed out", "timed out", "Broken pipe", "gloo", "NCCL")
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


def _watch(ranks: Exchange, where: Callable[[], str], ended: threading.Event) -> None:
    while not ended.wait(max(POLL, ranks.world * 5e-4)):  # at most 2,000 looks a second of all together
        try:
            if failure := ranks.answer_alarm():
                ranks.are_all_at("known")  # the rank that failed may wait for that
        except RuntimeError:  # the store is gone, and the next collective says so
            return
        except Exception as error:  # nobody else sees it in a thread
            sys.stderr.write(f"hookcb: rank {ranks.rank} looks for failures of others no more: {error!r}\n")
            return
        if failure:
            if not ended.wait(GRACE):
                try:
                    why = f"hookcb: {failure}; rank {ranks.rank} was {where()}, and ends"
                    sys.stderr.write(why + "\n")
                    sys.stderr.flush()
                finally:
                    os._exit(1)  # the thread that waits in a collective cannot be interrupted
            return
