"""StopSignals: Ctrl-C and SIGTERM, obeyed when it suits."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from hookcb.core.state import TrainingState

CHILD_ENDED: int | None = getattr(signal, "SIGCHLD", None)  # which Windows does not have


class StopSignals:
    """Takes note of Ctrl-C and SIGTERM from `open` to `close`, instead of letting them in at once.

    A second one is let in. Outside the main thread, where Python allows no handlers, it notes nothing.
    """

    def __init__(self) -> None:
        self._noted: int | None = None
        self._handlers: dict[int, Any] = {}
        self._child_handler: Any = None  # whose errors are held, once a signal has come
        self._process = 0  # whose signals they are
        self._loop: TrainingState | None = None

    def open(self, loop: TrainingState) -> None:
        """Takes the signals; `loop.stop_requested` is set when the first one comes."""
        self._noted, self._process, self._loop = None, os.getpid(), loop
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                self._handlers[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # a loader's worker, forked meanwhile: told to end it must end, but a Ctrl-C is for the fit to decide
        is_worker = os.getpid() != self._process
        if self._noted is not None or (is_worker and number == signal.SIGTERM):
            self._give_back()
            signal.raise_signal(number)
        self._noted = number
        if not is_worker and self._loop is not None:
            self._loop.stop_requested = True
            self._hold_errors_of_children()

    def _hold_errors_of_children(self) -> None:
        """A terminal tells the workers of a loader too, and torch reports their end in whatever code runs."""
        if CHILD_ENDED is not None and callable(handler := signal.getsignal(CHILD_ENDED)):
            self._child_handler = handler
            signal.signal(CHILD_ENDED, self._child_ended)

    def _child_ended(self, number: int, frame: FrameType | None) -> None:
        try:
            self._child_handler(number, frame)
        except RuntimeError:
            # the batch in progress, or the writing of a file, would be lost; once this is closed, another
            # one may still hand on to it
            if self._loop is None or _is_in_loader(frame):
                raise

    @property
    def asked(self) -> bool:
        """Whether one has come."""
        return self._noted is not None

    def obey(self) -> None:
        """Ends the fit, where that was asked for, as the signal would have."""
        if self._noted is None:
            return
        number, self._noted = self._noted, None
        handler = self._handlers[number]
        self._give_back()
        if handler is signal.SIG_DFL:  # which would end the process before any after_fit
            raise SystemExit(128 + number)
        signal.raise_signal(number)

    def close(self) -> None:
        """Obeys a signal that is left, and gives all of them back."""
        try:
            self.obey()
        finally:
            self._give_back()
            self._loop = None
            # two checkpoints of a fit stack theirs, and close in the order in which they opened or the other
            if CHILD_ENDED is not None and signal.getsignal(CHILD_ENDED) == self._child_ended:
                signal.signal(CHILD_ENDED, self._child_handler)

    def __reduce__(self) -> tuple[type["StopSignals"], tuple[()]]:
        return type(self), ()  # a copy takes no signals

    def _give_back(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


def _is_in_loader(frame: FrameType | None) -> bool:
    """Whether the code that a signal has interrupted was called by torch's DataLoader."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.data.dataloader":
            return True
        frame = frame.f_back
    return False
