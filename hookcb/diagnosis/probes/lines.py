"""Lines of a user's loop in which time is spent between the steps."""

import linecache
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from hookcb.core.torch_private import compile_counts

Line = tuple[CodeType, int]  # a function and its line, 0 for the function as a whole
PACKAGES = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[2]),
    "<frozen",
)


class LineTimes:
    """Times the lines that run between two events, of the functions of the user that call the model.

    A trace function is set while it `runs`, from `begin` to `end`. It sees the lines of those functions, and
    which function of the user a package calls, as a trainer calls a callback. Nothing is traced if something
    else is traced already, as in a debugger, or if anything was compiled, as dynamo would compile the trace
    function too.

    Attributes:
        fetches: places of `for` statements, in which batches are fetched; known once `places` is called.
        steps: places that call the model, its backward or an optimizer; likewise.
        n: number of gaps that were traced.
    """

    def __init__(self) -> None:
        self.fetches: set[str] = set()
        self.steps: set[str] = set()
        self._begins: set[Line] = set()
        self.n = 0
        self._thread = threading.get_ident()
        self._frames: list[FrameType] = []  # in which lines are traced
        self._at: Line | None = None  # the line in progress
        self._called: FrameType | None = None  # the function in progress that a package has called
        self._since = 0.0
        self._raw: defaultdict[Line, float] = defaultdict(float)
        self._largest: defaultdict[Line, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._calls: defaultdict[Line, int] = defaultdict(int)  # made by a line; each takes longer if traced
        self._own = self._trace, self._trace_line  # one object each, to know them again

    def begin(self) -> None:
        """Begins to trace, if nothing else does and this is the thread of the loop."""
        if sys.gettrace() is not None or threading.get_ident() != self._thread or compile_counts("frames"):
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if is_of_user(frame.f_code.co_filename) and frame.f_trace is None:
                frame.f_trace = self._own[1]
                self._frames.append(frame)
            frame = frame.f_back
        if self._frames:
            self._at = self._frames[0].f_code, self._frames[0].f_lineno
            self._begins.add(self._at)
            self._since = time.perf_counter()
            sys.settrace(self._own[0])

    def end(self) -> None:
        """Ends it."""
        if not self._frames:
            return
        if sys.gettrace() is self._own[0]:
            sys.settrace(None)
        self._move(None)
        for frame in self._frames:
            if frame.f_trace is self._own[1]:
                frame.f_trace = None
        self._frames, self._called = [], None
        self.n += 1

    def places(self, untraced: float) -> dict[str, float]:
        """Seconds by place, `train.py:41, log(loss)` or `train.py:12, on_end()`, without the two longest.

        Args:
            untraced: seconds that all of it would have taken; what exceeds them is the cost of tracing, which
                is proportional to the number of calls.
        """
        self.steps = {place_of(*line) for line in self._begins}
        found: defaultdict[str, float] = defaultdict(float)
        steady = {line: seconds - sum(self._largest[line]) for line, seconds in self._raw.items()}
        excess = max(0.0, sum(steady.values()) - untraced) / max(1, sum(self._calls.values()))
        for (code, line), seconds in steady.items():
            name = place_of(code, line)
            found[name] += max(0.0, seconds - excess * self._calls[code, line])
            if line and linecache.getline(code.co_filename, line).lstrip().startswith(("for ", "async for ")):
                self.fetches.add(name)
        return dict(found)

    def _move(self, at: Line | None) -> None:
        now = time.perf_counter()
        if self._at is not None:
            self._raw[self._at] += now - self._since
            two = self._largest[self._at]
            if now - self._since > two[0]:
                two[0] = now - self._since
                two.sort()
        self._at, self._since = at, now

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Called when a function is called; follows the outermost one of the user in a package's call."""
        if self._at is not None:
            self._calls[self._at] += 1
        caller = frame.f_back
        is_outer = self._called is None and is_of_user(frame.f_code.co_filename)
        if is_outer and caller is not None and not is_of_user(caller.f_code.co_filename):
            self._called = frame
            self._move((frame.f_code, 0))
            frame.f_trace_lines = False
            return self._own[1]
        return None

    def _trace_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._frames:
            return None
        if frame is self._called:
            if event == "return":
                self._called = None
                self._move(self._line_above(frame))
        elif event == "line":
            self._move((frame.f_code, frame.f_lineno))
        elif event == "return":
            self._move(self._line_above(frame))
        return self._own[1]

    def _line_above(self, frame: FrameType) -> Line | None:
        """Line of the traced function that is in progress when `frame` returns."""
        above = frame.f_back
        while above is not None and above.f_trace is not self._own[1]:
            above = above.f_back
        return None if above is None else (above.f_code, above.f_lineno)


_known: dict[str, bool] = {}


def is_of_user(file: str) -> bool:
    """Whether a file is a program of the user, and not of a package."""
    if file not in _known:
        _known[file] = not file.startswith(PACKAGES)
    return _known[file]


def place_of(code: CodeType, line: int) -> str:
    """Text of a line with its source, or of a function if it is 0."""
    file = Path(code.co_filename).name
    if not line:
        return f"{file}:{code.co_firstlineno}, {code.co_qualname}()"
    source = " ".join(linecache.getline(code.co_filename, line).split())
    return f"{file}:{line}, {source:.60}" if source else f"{file}:{line}"
