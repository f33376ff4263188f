"""StopSignals: defers Ctrl-C and SIGTERM to the end of the batch."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from hookcb.core.state import TrainingState

CHILD_ENDED: int | None = getattr(signal, "SIGCHLD", None)  # missing on Windows


class StopSignals:
    """Holds back Ctrl-C and SIGTERM from `open` to `close`, until `obey`.

    A second signal acts at once. Does nothing outside the main thread, where Python allows no handlers.
    """

    def __init__(self) -> None:
        self._noted: int | None = None
        self._has_obeyed = False
        self._handlers: dict[int, Any] = {}
        self._child_handler: Any = None  # its errors are held back once a signal has come
        self._process = 0  # the process of the fit
        self._loop: TrainingState | None = None

    def open(self, loop: TrainingState) -> None:
        """Installs the handlers; `loop.stop_requested` is set at the first signal."""
        self._noted, self._has_obeyed, self._process, self._loop = None, False, os.getpid(), loop
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                self._handlers[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # a loader's worker, forked meanwhile, must end on SIGTERM, but Ctrl-C is for the fit to handle
        is_worker = os.getpid() != self._process
        if self._noted is not None or (is_worker and number == signal.SIGTERM):
            self._restore_handlers()
            signal.raise_signal(number)
        self._noted = number
        if not is_worker and self._loop is not None:
            self._loop.note_signal(number)
            self._hold_errors_of_children()

    def _hold_errors_of_children(self) -> None:
        """A terminal signals the workers of a loader too, and torch raises for their end in any code."""
        if CHILD_ENDED is not None and callable(handler := signal.getsignal(CHILD_ENDED)):
            self._child_handler = handler
            signal.signal(CHILD_ENDED, self._child_ended)

    def _child_ended(self, number: int, frame: FrameType | None) -> None:
        try:
            self._child_handler(number, frame)
        except RuntimeError:
            # raising would lose the batch in progress, or the file being written; after `close`, the handler
            # of another StopSignals may still call this one
            if self._loop is None or _is_in_loader(frame):
                raise

    @property
    def requested(self) -> bool:
        """Whether a signal has come; on several ranks, once all of them know of it."""
        return self._number is not None

    @property
    def _number(self) -> int | None:
        """Number of the signal to obey."""
        if self._loop is None or self._loop.ranks.world == 1:
            return self._noted
        return None if self._has_obeyed else self._loop.ranks.signal or None

    def obey(self) -> None:
        """Ends the fit as the signal would have, if one has come."""
        if (number := self._number) is None:
            return
        self._noted, self._has_obeyed = None, True
        handler = self._handlers[number]
        self._restore_handlers()
        if handler is signal.SIG_DFL:  # it would end the process before any after_fit
            raise SystemExit(128 + number)
        signal.raise_signal(number)

    def close(self) -> None:
        """Obeys a pending signal, and restores all handlers."""
        try:
            self.obey()
        finally:
            self._restore_handlers()
            self._loop = None
            # the handlers of two checkpoints in a fit are stacked, and may be closed in either order
            if CHILD_ENDED is not None and signal.getsignal(CHILD_ENDED) == self._child_ended:
                signal.signal(CHILD_ENDED, self._child_handler)

    def __reduce__(self) -> tuple[type["StopSignals"], tuple[()]]:
        return type(self), ()  # a copy has no handlers

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


def _is_in_loader(frame: FrameType | None) -> bool:
    """Whether a signal interrupted code that was called by torch's DataLoader."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.data.dataloader":
            return True
        frame = frame.f_back
    return False
