"""Whose code runs, told by its file."""

import gc
import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hookcb.core import loop, whose
from tests.core.support import without_lines
from tests.support import in_turn

OTHER = torch.__file__.replace("torch/__init__", "torchvision/models/resnet")
LIKE_OURS = loop.__file__.replace("hookcb/core", "hookcb_experiments")


@in_turn(
    ("file", "is_of_program", "is_of_user"),
    [
        (torch.nn.functional.__file__, False, False),
        (loop.__file__, False, False),
        (inspect.__file__, False, False),
        ("<frozen importlib._bootstrap>", False, False),
        (OTHER, True, False),
        ("/tmp/ipykernel_1/2.py", True, True),
        ("<stdin>", True, True),
        (LIKE_OURS, True, True),
        (__file__, True, True),
    ],
)
def test_a_file_is_of_the_program_the_user_or_neither(file, is_of_program, is_of_user):
    assert whose.is_of_program(file) == is_of_program
    assert whose.is_of_user(file) == is_of_user


def test_an_instruction_without_a_line_counts_for_the_one_before():
    def here():
        return sys._getframe()

    first = here.__code__.co_firstlineno
    assert whose.line_in(here()) == here().f_lineno == first + 1
    frame = without_lines(here)()
    assert frame.f_lineno is None
    assert whose.line_in(frame) == first
    code = SimpleNamespace(
        co_lines=lambda: [(0, 4, 7), (4, 8, 8), (8, 12, None), (12, 16, 9)], co_firstlineno=6
    )
    jump = SimpleNamespace(f_lineno=None, f_lasti=10, f_code=code)
    assert whose.line_in(jump) == 8


BUSY = """
import gc, sys, threading, time
from hookcb.core.whose import garbage_kept

class Cycle:
    def __init__(self):
        self.own = self

    def __del__(self):
        time.sleep(0)  # another thread runs

functions = []

def make(n):  # a function with n local variables, which is gone when the next ones are made
    names = "".join(f"v{i}," for i in range(n))
    code = f"def f(n):\\n {names}b = range({n + 1})\\n Cycle(); return n and functions[n * 7 % 6](n - 1)"
    space = {"Cycle": Cycle, "functions": functions}
    exec(code, space)
    return space["f"]

def sample(thread):
    while threading.main_thread().is_alive():
        names = []
        with garbage_kept():
            frame = sys._current_frames()[thread]
            while frame is not None:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
        counts.append(len(names))
        time.sleep(1e-5)

counts = []
gc.set_threshold(50)
sys.setswitchinterval(1e-5)
threading.Thread(target=sample, args=(threading.get_ident(),), daemon=True).start()
began = time.monotonic()
while len(counts) < 10_000 and time.monotonic() - began < 10:
    functions[:] = map(make, range(6))
    for n in range(10):
        functions[n % 6](n)
assert gc.isenabled()
print("through")
"""


@pytest.mark.slow  # ten seconds, in which it sometimes crashes if nothing is kept
def test_frames_of_a_running_thread_are_read_while_garbage_is_collected():
    shown = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120)
    assert (shown.stdout, shown.stderr) == ("through\n", "")


def test_garbage_collections_are_as_before():
    with whose.garbage_kept():
        assert gc.isenabled() == (sys.version_info >= (3, 12))
    assert gc.isenabled()
    gc.disable()
    try:
        with whose.garbage_kept():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
