"""StopSignals: Ctrl-C and SIGTERM, obeyed when it suits."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """Takes note of Ctrl-C and SIGTERM from `open` to `close`, instead of letting them in at once.

    A second one is let in. Outside the main thread, where Python allows no handlers, it notes nothing.
    """

    def __init__(self) -> None:
        self._noted: int | None = None
        self._handlers: dict[int, Any] = {}
        self._process = 0  # whose signals they are

    def open(self) -> None:
        """Takes the signals."""
        self._noted, self._process = None, os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                self._handlers[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # a loader's worker, forked meanwhile: told to end it must end, but a Ctrl-C is for the fit to decide
        is_worker = os.getpid() != self._process
        if self._noted is not None or (is_worker and number == signal.SIGTERM):
            self.close()
            signal.raise_signal(number)
        self._noted = number

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
        self.close()
        if handler is signal.SIG_DFL:  # which would end the process before any after_fit
            raise SystemExit(128 + number)
        signal.raise_signal(number)

    def close(self) -> None:
        """Gives the signals back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
