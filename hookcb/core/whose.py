"""Owners of code, by its file: the user, a package, torch, Python, or hookcb; and lines of running code."""

import gc
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

OURS = str(Path(__file__).parents[1]) + os.sep
_torch = find_spec("torch")  # which is not imported here, as it takes seconds
TORCH = (os.path.dirname(_torch.origin) if _torch and _torch.origin else "no torch") + os.sep
PYTHON = str(Path(os.__file__).parent) + os.sep
MADE = "<frozen", "<eval_with_key>"  # code that Python and torch.fx make
INSTALLED = tuple(
    {sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def is_of_program(file: str) -> bool:
    """Whether a file is of the user, or of a package that builds on torch: not of torch, hookcb or Python."""
    if file.startswith((OURS, TORCH, *MADE)):
        return False
    return not file.startswith(PYTHON) or "site-packages" in file


@lru_cache(maxsize=4096)
def is_of_user(file: str) -> bool:
    """Whether a file is a program of the user, and not of any package."""
    return not file.startswith((*INSTALLED, OURS, "<frozen"))


def in_package(file: str) -> str:
    """Path of an installed file from its package on, "transformers/trainer.py"; "" of any other file."""
    starts = [start for start in INSTALLED if file.startswith(start)]
    return file.removeprefix(max(starts, key=len)).replace(os.sep, "/") if starts else ""


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Keeps garbage collections from starting, while frames of another thread are read.

    Until Python 3.12 `sys._current_frames` and `f_back` can start one. A finalizer that lets the thread run
    then makes the process hang (github.com/python/cpython/issues/106883), or leaves `f_back` a frame that is
    gone, which ends the process.
    """
    is_paused = sys.version_info < (3, 12) and gc.isenabled()
    if is_paused:
        gc.disable()
    try:
        yield
    finally:
        if is_paused:
            gc.enable()


def frames_of(frame: FrameType | None, is_wanted: Callable[[str], bool]) -> Iterator[FrameType]:
    """Frames whose file is wanted, from one of running code outward."""
    while frame is not None:
        if is_wanted(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def line_in(frame: FrameType) -> int:
    """Line in progress; at an instruction that has none, as a jump to the begin of a loop, the one before."""
    if frame.f_lineno is not None:
        return frame.f_lineno
    lines = [line for start, _, line in frame.f_code.co_lines() if line and start <= frame.f_lasti]
    return lines[-1] if lines else frame.f_code.co_firstlineno
