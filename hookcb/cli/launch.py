"""Runs a script or a module as Python itself does."""

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

OURS = (
    str(Path(__file__).parent) + os.sep,
    str(Path(__file__).parents[1] / "diagnosis") + os.sep,
    str(Path(__file__).parents[1] / "core" / "call_hook.py"),
    "<frozen runpy>",
)  # hidden in tracebacks


def launch(path: str, args: list[str], is_module: bool, keep: Callable[[object], None]) -> None:
    """Runs a script to its end; what it raises, SystemExit included, is raised.

    Args:
        path: the script, or the name of a module.
        args: its arguments.
        is_module: whether it is a module.
        keep: called with the variables of a script, before it runs.
    """
    if is_module:
        with _with_arguments(path, args, os.getcwd()):
            runpy.run_module(path, run_name="__main__", alter_sys=True)
        return
    with _as_main(path, args) as main:
        keep(main)
        exec(compile(Path(path).read_bytes(), main["__file__"], "exec"), main)


def is_module_name(text: str) -> bool:
    """Whether `text` may name a module, such as package.train, and no file."""
    return all(map(str.isidentifier, text.split("."))) and not text.endswith(".py")


def has_module(name: str) -> bool:
    """Whether a module of that name can be run from this folder; imports the packages around it."""
    with _with_arguments(name, [], os.getcwd()):
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False


@contextmanager
def _as_main(path: str, args: list[str]) -> Iterator[dict[str, Any]]:
    """Makes the script's module `__main__`, with the arguments and import path that Python would give it."""
    module = ModuleType("__main__")
    # absolute since Python 3.9; multiprocessing starts its processes with this path
    vars(module).update(__file__=os.path.abspath(path), __builtins__=__builtins__)
    before, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        with _with_arguments(path, args, os.path.dirname(os.path.realpath(path))):
            yield vars(module)
    finally:
        sys.modules["__main__"] = before


@contextmanager
def _with_arguments(path: str, args: list[str], folder: str) -> Iterator[None]:
    """Gives the script its arguments, and the folder that Python would import from first."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [path, *args], folder
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def hide_own_frames(error: BaseException | None) -> None:
    """Removes hookcb's frames from the tracebacks of an error and its causes."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        if (now := waiting.pop()) is None or id(now) in seen:
            continue
        seen.add(id(now))
        now.__traceback__ = _without_own_frames(now.__traceback__)
        waiting += [now.__cause__, now.__context__]
        waiting += now.exceptions if isinstance(now, BaseExceptionGroup) else ()


def _without_own_frames(tb: TracebackType | None) -> TracebackType | None:
    kept = []
    while tb is not None:
        if not tb.tb_frame.f_code.co_filename.startswith(OURS):
            kept.append(tb)
        tb = tb.tb_next
    for i, this in enumerate(kept):
        this.tb_next = kept[i + 1] if i + 1 < len(kept) else None
    return kept[0] if kept else None
