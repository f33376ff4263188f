"""Farewell: SIGTERM waits until something was said, and then acts as it would have."""

import os
import select
import signal
import sys
import time

import pytest

from hookcb.processes.farewell import MAX_DELAY, Farewell
from tests.support import start

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to handle")

SCRIPT = """
import ctypes, select, signal, sys, threading, time
from hookcb.processes import farewell as module
from hookcb.processes.farewell import Farewell

def say():
    print("said")
    if "hang" in sys.argv:
        time.sleep(60)

def listen():
    while not (farewell.heard() and farewell.is_due):
        select.select([farewell.bell], [], [], 1)
    farewell.speak(say)

if "hang" in sys.argv:
    module.MAX_DELAY = 2.0
if "own" in sys.argv:
    def own(*_):
        print("own"); sys.exit(3)
    signal.signal(signal.SIGTERM, own)
farewell = Farewell()
threading.Thread(target=listen, daemon=True).start()
if "held" in sys.argv:
    farewell.hold()
print("ready", flush=True)
if "blocked" in sys.argv:  # in C, where no signal handler of Python runs
    lock, libc = ctypes.create_string_buffer(128), ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)
if "held" in sys.argv:
    try:
        while not farewell.is_due:
            time.sleep(0.05)
    finally:
        print("told")
        farewell.close()
time.sleep(60)
"""


@pytest.fixture
def ended(tmp_path):
    """The exit code of a process that gets SIGTERM, what it wrote, and the seconds it took."""

    def ended(*words):
        log = tmp_path / "log"
        process = start("-c", SCRIPT, *words, log=log)
        until = time.monotonic() + 30
        while not (log.exists() and "ready" in log.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        began = time.monotonic()
        process.terminate()
        process.join(30)
        seconds = time.monotonic() - began
        return process.exitcode, log.read_text().split()[1:], seconds

    return ended


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["sleeps"], -signal.SIGTERM, ["said"]),
        (["blocked"], -signal.SIGTERM, ["said"]),
        (["held"], -signal.SIGTERM, ["told"]),
        (["own"], 3, ["own"]),
    ],
)
def test_what_is_to_be_said_is_said_and_the_process_ends_as_it_would(ended, words, code, said):
    assert ended(*words)[:2] == (code, said)


@pytest.mark.slow
def test_what_hangs_does_not_keep_the_process(ended):
    code, _, seconds = ended("blocked", "hang")
    assert code == -signal.SIGTERM
    assert 1.9 < seconds < 10
    assert MAX_DELAY == 10.0  # without the change of the script


@pytest.fixture
def handled():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_a_handler_of_the_user_is_called_at_once_and_is_there_again(handled):
    own = signal.getsignal(signal.SIGTERM)
    farewell = Farewell()
    os.kill(os.getpid(), signal.SIGTERM)
    assert handled == [signal.SIGTERM]
    assert select.select([farewell.bell], [], [], 5)[0]
    assert farewell.heard()
    assert not farewell.is_due
    farewell.close()
    farewell.dispose()
    assert signal.getsignal(signal.SIGTERM) is own
    assert signal.set_wakeup_fd(-1) == -1


def test_wakeups_of_other_code_stay_with_it(handled):
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    try:
        farewell = Farewell()
        os.kill(os.getpid(), signal.SIGTERM)
        assert os.read(read, 1) == bytes([signal.SIGTERM])
        assert farewell.heard()  # as the handler runs
        farewell.close()
        farewell.dispose()
    finally:
        assert signal.set_wakeup_fd(-1) == write
        os.close(read), os.close(write)


def test_handlers_that_are_closed_in_either_order_still_reach_the_user(handled):
    first, second = Farewell(), Farewell()
    first.close()
    os.kill(os.getpid(), signal.SIGTERM)
    second.close()
    assert handled == [signal.SIGTERM]
    first.dispose(), second.dispose()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_its_signals_as_before():
    before = signal.getsignal(signal.SIGTERM)
    farewell = Farewell()
    if not (child := os.fork()):
        is_back = signal.getsignal(signal.SIGTERM) == before and signal.set_wakeup_fd(-1) == -1
        os._exit(0 if is_back else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not farewell.heard()
    farewell.close()
    farewell.dispose()
