"""Farewell: lets a thread have its say when SIGTERM comes, also while the main thread waits in torch."""

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from hookcb.core.threads import in_each_fork

MAX_DELAY = 10.0  # seconds by which SIGTERM is delayed at most, if what is said hangs
SIGTERM = int(signal.SIGTERM)


class Farewell:
    """Delays a SIGTERM that would end the process until a thread that listens to `bell` has had its say.

    The main thread runs no handler of Python while it waits in a collective, so the bell is rung by
    `signal.set_wakeup_fd`, unless other code uses that; it is then rung by the handler. A handler of the user
    is called at once, and decides what happens. Nothing is done if SIGTERM is ignored or handled by code that
    is not Python, or outside of the main thread, where Python allows no handlers.

    Attributes:
        bell: a socket that receives the number of each signal.
        is_due: whether SIGTERM has come, and ends the process.
    """

    def __init__(self) -> None:
        self.bell, self._rope = socket.socketpair()
        self.bell.setblocking(False)
        self._rope.setblocking(False)
        self.is_due = self._is_held = self._has_bell = False
        self._said = threading.Event()
        self._before = signal.getsignal(SIGTERM) if _in_main() else None
        self._ends = self._before is signal.SIG_DFL
        if self._ends or callable(self._before):
            signal.signal(SIGTERM, self._come)
            self._has_bell = _take_wakeups(self._rope.fileno())
        _open.add(self)

    def ring(self, number: int = 0) -> None:
        """Rings the bell."""
        with suppress(OSError):  # it is full, and so rings, or it is closed
            self._rope.send(bytes([number]))

    def heard(self) -> bool:
        """Listens to the bell; returns whether SIGTERM has come since it last did."""
        try:
            has_come = SIGTERM in self.bell.recv(4096)
        except BlockingIOError:
            return False
        self.is_due |= has_come and self._ends
        return has_come

    def hold(self, is_held: bool = True) -> None:
        """Tells that the main thread is having the say, which then ends by `close`."""
        self._is_held = is_held

    def speak(self, say: Callable[[], object]) -> None:
        """Calls `say`, unless the main thread is having its say, and ends the process, also if that hangs."""
        if not self._is_held:
            threading.Thread(target=self._speak, args=(say,), daemon=True, name="hookcb farewell").start()
        self._said.wait(MAX_DELAY)
        self._said.set()
        # from here, as the main thread may not come to run any Python
        ctypes.pythonapi.PyOS_setsig(SIGTERM, ctypes.c_void_p(0))
        os.kill(os.getpid(), SIGTERM)

    def _speak(self, say: Callable[[], object]) -> None:
        try:
            say()
            sys.stdout.flush()
        finally:
            self._said.set()

    def close(self) -> None:
        """Gives SIGTERM back; one that has come meanwhile acts now. A second call does nothing."""
        if self not in _open:
            return
        if self.is_due:
            sys.stdout.flush()
        self._said.set()
        if not _in_main():  # which cannot give it back; the handler passes it on
            return
        _open.discard(self)
        self._give_back()
        if self.is_due:
            signal.raise_signal(SIGTERM)

    def dispose(self) -> None:
        """Closes the bell, unless signals may still be written to it."""
        if self not in _open:
            self.bell.close()
            self._rope.close()

    def _give_back(self) -> None:
        if signal.getsignal(SIGTERM) == self._come:
            signal.signal(SIGTERM, self._before)
        if self._has_bell:
            _leave_wakeups(self._rope.fileno())
            self._has_bell = False

    def _come(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGTERM in the main thread, which goes no further while another thread has its say."""
        self.ring(number)  # other code may have taken the wakeups meanwhile
        if callable(self._before):
            self._before(number, frame)
            return
        self.is_due = True
        if not self._is_held:
            self._said.wait(MAX_DELAY)
            signal.signal(SIGTERM, signal.SIG_DFL)
            signal.raise_signal(number)


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _take_wakeups(fd: int) -> bool:
    """Has the numbers of signals written to a socket, unless they are written elsewhere already."""
    before = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
    return before == -1


def _leave_wakeups(fd: int) -> None:
    now = signal.set_wakeup_fd(-1)
    if now not in (fd, -1):  # that of other code, such as asyncio
        signal.set_wakeup_fd(now)


_open: set[Farewell] = set()


def _forget() -> None:
    """Leaves the signals of a forked process to it: its socket is that of the process it is from."""
    for farewell in list(_open):
        farewell._give_back()
    _open.clear()


in_each_fork(_forget)
