"""Lines of a user's loop in which time is spent between the steps, by samples of what runs; and source."""

import ast
import dis
import inspect
import linecache
import math
import random
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakSet

from torch.optim import LBFGS

from hookcb.core.loop import Loop
from hookcb.core.threads import in_each_fork
from hookcb.core.whose import garbage_kept, is_of_user, line_in

# a function and its line, negative if an `__iter__` runs there; 0 for the function as a whole
Line = tuple[CodeType, int]
FEW, OFTEN, SELDOM = 200, 2e-3, 20e-3  # samples, and seconds between those and between later ones
# seconds of Python code after which a thread that waits may run, ten times as many by default; and of a sleep
# that ends late though nothing holds it up
SWITCH, SLACK = 5e-4, 2.5e-4
MAX_SKID = 1e-3  # seconds by which Python code that has ended can delay a sample: a switch, and as much again
MAX_EARLIER = 2.0  # Python code that is not known by its line, by that which is; for 1 ms at a time
MIN_WAITING = 0.1  # samples in time by late ones; a line with fewer of them does not wait
MAX_WEIGHT = 0.25  # seconds that a sample stands for at most, as a busy machine may stop everything
MIN_SAMPLES = 40  # of fewer, a share of 0.5 has an error above 0.08
# instructions at which Python interrupts code that does not wait for anything
BREAKS = {
    code
    for name, code in dis.opmap.items()
    if name == "RESUME" or ("JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name)
}
KINDS = "waits", "late", "python", "earlier"  # of samples
EVENTS = Loop._call.__code__  # below it, callbacks act
STEP_OF_LBFGS = inspect.unwrap(LBFGS.step).__code__  # it works between the evaluations of its closure
OF_MODULE = "parameters", "buffers", "modules", "children"  # ends of methods of a module, which fetch nothing
SAMPLED: "WeakSet[LineSamples]" = WeakSet()  # those whose thread was started


class LineSamples:
    """Looks again and again, from a thread of its own, at which line of the user's loop runs.

    A sample is the line in progress of the innermost function that is known to make a step, see `note_step`;
    of a line that makes the steps, as that of a trainer, it is the user's function that is called there.
    Nothing is traced: a sample takes the interpreter some 20 µs, every 2 ms at first and then every 20 ms.

    The thread gets the interpreter once the loop waits, as for a disk or an operation of torch, or after some
    Python code. So a sample in time is of a line that waits. One that comes late was held up by Python code:
    by the line in progress if that is interrupted there or never waits, else by an earlier one, which is one
    of those that are interrupted at other times; or by the machine, if none ever is.
    """

    def __init__(self, is_open: Callable[[], bool]) -> None:  # which tells whether to sample now
        self.n, self.is_running = 0, False  # samples in batches that count; whether the thread runs, or ran
        self.failure: Exception | None = None  # which has ended the thread
        self._is_open, self._thread_id = is_open, threading.get_ident()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: set[CodeType] = set()  # functions of the user that lead to a step
        self._on_way: set[Line] = set()  # their lines that do
        self._steps: set[Line] = set()  # those of the innermost ones
        self._n_batches = 0
        self._pending: list[tuple[Line, str, float]] = []  # samples since the last batch that has ended
        self._seconds = {kind: defaultdict[Line, float](float) for kind in KINDS}

    def note_step(self) -> None:
        """Notes who leads to a part of a step; called in the thread of the loop while that part is made."""
        frame: FrameType | None = sys._getframe(1)
        lines: list[Line] = []  # innermost first
        n_inside = 0  # of them are inside a step of LBFGS
        while frame is not None:
            if is_of_user(frame.f_code.co_filename):
                lines.append((frame.f_code, line_in(frame)))
            elif frame.f_code is STEP_OF_LBFGS:
                n_inside = len(lines)
            frame = frame.f_back
        self._loop.update(code for code, _ in lines)
        self._on_way.update(lines)
        self._steps.update(lines[:1], lines[n_inside : n_inside + 1])

    def start(self) -> None:
        if not self.is_running:
            self.is_running, self._usual_switch = True, sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH, self._usual_switch))
            self._thread = threading.Thread(target=self._run, name="hookcb-lines", daemon=True)
            self._thread.start()
            SAMPLED.add(self)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._forget_thread()

    def _forget_thread(self) -> None:
        self._thread = None
        if math.isclose(sys.getswitchinterval(), SWITCH):  # else the user has changed it
            sys.setswitchinterval(self._usual_switch)

    def leave_to_parent(self) -> None:
        """Forgets the thread in a forked process, which lacks it; it may have held the lock of `_stop`."""
        if self._thread is not None:
            self._stop = threading.Event()
            self._forget_thread()

    def end_batch(self, is_counted: bool) -> None:
        pending, self._pending = self._pending, []
        if is_counted and self.is_running:
            self._n_batches, self.n = self._n_batches + 1, self.n + len(pending)
            for line, kind, seconds in pending:
                self._seconds[kind][line] += seconds

    def _run(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:  # nobody else sees it in a thread
            traceback.clear_frames(error.__traceback__)  # which hold frames of the user
            self.failure = error

    def _sample_until_stopped(self) -> None:
        own = random.Random(0)
        while True:
            mean = OFTEN if self.n < FEW else SELDOM
            interval = own.expovariate(1 / mean)  # whatever its length, a sample may come at any moment
            due = time.monotonic() + interval
            if self._stop.wait(interval):
                return
            if self._is_open():
                delay = time.monotonic() - due
                self.sample(min(mean + delay, MAX_WEIGHT), delay)

    def sample(self, seconds: float, delay: float = 0.0) -> None:
        """Takes a sample that stands for `seconds`, and comes `delay` seconds after it was due."""
        with garbage_kept():
            frame = sys._current_frames().get(self._thread_id)
            line = self._line_of(frame)
            if frame is not None and line is not None:
                is_broken_off = frame.f_code.co_code[frame.f_lasti] in BREAKS
                held_up = "python" if is_broken_off else "earlier" if delay <= MAX_SKID else "late"
                self._pending.append((line, "waits" if delay <= SLACK else held_up, seconds))

    def _line_of(self, frame: FrameType | None) -> Line | None:
        called: Line | None = None  # by a package, in the loop
        is_starting = False
        while frame is not None:
            code, caller = frame.f_code, frame.f_back
            if code is EVENTS:
                return None
            is_starting |= code.co_name == "__iter__" and not code.co_flags & inspect.CO_GENERATOR
            if code in self._loop:
                line = code, line_in(frame)
                if is_starting and called is None:
                    return code, -line[1]
                return called if called is not None and line in self._on_way else line
            is_called = caller is not None and not is_of_user(caller.f_code.co_filename)
            if is_called and is_of_user(code.co_filename):
                called = code, 0
            frame = caller
        return None

    def seconds(self) -> dict[str, float]:
        """Mean seconds in a batch by place, `train.py:41, log(loss)` or `train.py:12, on_end()`.

        The start of a loader, by a line that fetches batches, is a place of its own, "". Empty with fewer
        than 40 samples. A statement of several lines is one place, that of its first line.
        """
        found = defaultdict[str, float](float)
        if self.n < MIN_SAMPLES:
            return found
        waits, late, python, earlier = (dict(self._seconds[kind]) for kind in KINDS)
        for line in [line for line, x in earlier.items() if waits.get(line, 0.0) < MIN_WAITING * x]:
            python[line] = python.get(line, 0.0) + earlier.pop(line)
        fetches = self.fetches
        known, unknown = math.fsum(python.values()), math.fsum(earlier.values())
        moved = min(MAX_EARLIER * known, unknown)
        more, less = (moved / x if x else 0.0 for x in (known, unknown))
        for by_line, weight in (waits, 1.0), (late, 1.0), (python, 1 + more), (earlier, 1 - less):
            for line, seconds in by_line.items():
                place = place_of(*line)
                place = "" if line[1] < 0 and place in fetches else place
                found[place] += weight * seconds / self._n_batches
        return found

    @property
    def steps(self) -> set[str]:
        """Places that call the model, its backward or an optimizer."""
        return {place_of(*line) for line in self._steps}

    @property
    def fetches(self) -> set[str]:
        """Places that fetch batches: a `for` around what leads to a step, and sampled calls of `next`.

        A `for` that makes a step in its own line is none, as most of its time is that of the step.
        """
        loops = {
            place_of(code, first)
            for code, line in self._on_way
            for first in source_of(code.co_filename).loops_around(line)
            if (code, first) not in self._steps
        }
        sampled = {line for seconds in self._seconds.values() for line in seconds if line[1] > 0}
        nexts = [line for line in sampled if line[1] in source_of(line[0].co_filename).nexts]
        return loops | {place_of(*line) for line in nexts}


def _leave_all_to_parent() -> None:
    for lines in list(SAMPLED):
        lines.leave_to_parent()


in_each_fork(_leave_all_to_parent)


def code_of(function: Any) -> CodeType | None:
    """Code of a function, a method, or what wraps one; None if it is not in Python."""
    while isinstance(function, partial):
        function = function.func
    return getattr(inspect.unwrap(function), "__code__", None)


def function_place(function: Any) -> str:
    """Place and name of a function, of one without code in Python its name."""
    if (code := code_of(function)) is not None:
        return place_of(code, 0)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def place_of(code: CodeType, line: int) -> str:
    """Text of the statement at a line, with its source; or of a function if it is 0."""
    file = Path(code.co_filename).name
    if not line:
        return f"{file}:{code.co_firstlineno}, {code.co_qualname}()"
    first, text = source_of(code.co_filename).statement(abs(line))
    return f"{file}:{first}, {text:.60}" if text else f"{file}:{first}"


class Source:
    """Statements of a file, found by their lines; without source it knows none."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._first: dict[int, int] = {}  # first line of the innermost statement at a line
        self._loops: list[tuple[range, range]] = []  # head and body of each for statement
        self.nexts: set[int] = set()  # lines of statements that call `next`, except on parameters of a module
        try:
            tree = ast.parse("".join(lines))
        except (SyntaxError, ValueError):  # as of a cell with commands of IPython
            return
        for node in ast.walk(tree):  # outer statements first
            if isinstance(node, ast.stmt):
                self._add(node)

    def _add(self, node: ast.stmt) -> None:
        head = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if body := getattr(node, "body", None):
            head = range(node.lineno, max(node.lineno + 1, body[0].lineno))
            if isinstance(node, ast.For | ast.AsyncFor):
                self._loops.append((head, range(body[0].lineno, (body[-1].end_lineno or head.stop) + 1)))
        elif any(_is_next(part) for part in ast.walk(node)):
            self.nexts.update(head)
        self._first |= dict.fromkeys(head, node.lineno)

    def statement(self, line: int) -> tuple[int, str]:
        """First line of the innermost statement at a line, and its text, of one with a body its head's."""
        first = self._first.get(line, line)
        text = " ".join(self._lines[first - 1].split()) if first <= len(self._lines) else ""
        return first, text.removesuffix(":")

    def loops_around(self, line: int) -> list[int]:
        """First lines of the for statements with a line in their body."""
        return [head.start for head, body in self._loops if line in body]


def _is_next(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next"):
        return False
    source = node.args[0].func if node.args and isinstance(node.args[0], ast.Call) else None
    return not (isinstance(source, ast.Attribute) and source.attr.endswith(OF_MODULE))


@lru_cache(maxsize=64)
def source_of(file: str) -> Source:
    """Statements of a file."""
    return Source(linecache.getlines(file))
