"""Runs an unmodified training script, and prints a verdict on each model that it trains."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from hookcb.cli.hints import NotFoundError, no_module, similar_files
from hookcb.cli.model_tracker import ModelTracker
from hookcb.cli.ranks import INTERRUPTED, own_rank
from hookcb.core.console import attempt, safe_console, show, show_error
from hookcb.distributed.process_group import n_processes
from hookcb.report.page import Page

WRONG = 2  # exit code for what is given on the command line
OURS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "diagnosis"))  # hidden in tracebacks


@dataclass(frozen=True, slots=True)
class Options:
    """How a script is run, and how its verdicts are shown.

    Attributes:
        html: file for a page of what was recorded; a second model gets `run-2.html` beside `run.html`.
        as_json: whether standard output gets the verdicts as JSON, and standard error all that is printed.
        coverage: whether to list all that was and that could not be inspected.
        is_module: whether the script is named as a module, as after `python -m`.
    """

    html: Path | None = None
    as_json: bool = False
    coverage: bool = False
    is_module: bool = False


def why_not_run(script: str, is_module: bool) -> str:
    """Message for a script that is not there; "" if it may be."""
    if not is_module:
        return "" if Path(script).is_file() else f"there is no file {script!r}{similar_files(script)}"
    if script.endswith(".py"):
        return f"-m takes the name of a module, such as {Path(script).stem}; for a file, leave out -m"
    return ""


def run_script(path: str | Path, args: Sequence[str] = (), options: Options | None = None) -> int:
    """Runs a script as `python path args…` does, watches what it trains, and prints the verdicts.

    The script needs no change. A model is the outermost module with trainable parameters that is called with
    gradients enabled, itself or by one of its own methods that calls its parts; its loss is the tensor that
    `backward` is called on. A `Learner` gets a `Diagnose` callback. At most 4 models are watched at a time;
    when there is a fifth, the least recently called one gets its verdict.

    Args:
        path: the script.
        args: its arguments.
        options: what to show, and whether `path` is a module.

    Returns:
        Exit code: 0 if all models are healthy; 1 if one is suspect or sick, if one has an optimizer but no
        training of it was seen, if nothing was trained, or if the script raised; the script's own if that is
        not 0; 130 after Ctrl-C; 2 if there is no such module. Under torchrun, the verdicts of rank 0 decide:
        the others show theirs if they are their own and not healthy, and exit with the code of the script.
    """
    options = options or Options()
    if not options.as_json:
        return _run_and_show(os.fspath(path), list(args), options)[0]
    with _output_to_errors():
        code, result = _run_and_show(os.fspath(path), list(args), options)
    if result is not None:
        attempt(lambda: print(json.dumps(result), flush=True))  # noqa: T201  # rich would replace :names:
    return code


def _run_and_show(path: str, args: list[str], options: Options) -> tuple[int, dict[str, Any] | None]:
    """Runs a script and shows the verdicts; returns the exit code, and on rank 0 the result."""
    html = None if own_rank() else options.html
    tracker = ModelTracker(makes_pages=html is not None)
    try:
        code, has_failed = _run(path, args, tracker, options.is_module)
    except NotFoundError as error:
        show_error(f"hookcb diagnose: {error}")
        return WRONG, None
    shown = tracker.verdicts()
    for title, verdict, _ in [] if options.as_json and not own_rank() else shown:
        is_shared = f"{n_processes()} ranks" in verdict.looked
        if own_rank() and (is_shared or verdict):
            continue  # rank 0 shows the same, or is healthy too
        of = f", on rank {own_rank()} of {n_processes()}" if n_processes() > 1 and not is_shared else ""
        until = ", until the script failed" if has_failed else ""
        show(f"\n{title}{of}{until}", style="bold", highlight=False, markup=False, soft_wrap=True)
        show(verdict, soft_wrap=True)
        if options.coverage:
            lines = ["Coverage:", *(f"  {line}" for line in verdict.coverage)]
            show("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    if own_rank():
        return code, None  # if it were not 0, torchrun would end rank 0 before that has shown its verdicts
    notes = [*([] if shown else [_no_training_in(path)]), *tracker.notes]
    for note in notes:
        show(f"hookcb diagnose: {note}", soft_wrap=True, highlight=False, markup=False)
    if html is not None:
        _write_pages(html, tracker)
    counted = [verdict for _, verdict, counts in shown if counts]
    code = code or (0 if counted and all(counted) else 1)
    models = [{"model": title, "counts": counts, **verdict.to_dict()} for title, verdict, counts in shown]
    return code, {"exit_code": code, "script_failed": has_failed, "models": models, "notes": notes}


@contextmanager
def _output_to_errors() -> Iterator[None]:
    """Sends standard output to standard error, also that of C code and of processes that are started."""
    for file in (sys.stdout, sys.__stdout__):
        _flush(file)
    try:
        saved = os.dup(1)
    except OSError:  # it is closed
        saved = None
    try:
        if saved is not None:
            os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _flush(sys.__stdout__)
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)


def _flush(file: Any) -> None:
    with suppress(OSError, ValueError, AttributeError):  # it is closed, full, or missing
        file.flush()


def _write_pages(html: Path, tracker: ModelTracker) -> None:
    for i, (title, data) in enumerate(tracker.pages(), 1):
        file = html if i == 1 else html.with_stem(f"{html.stem}-{i}")
        data.title = title
        try:
            said = f"{title}: {Page(data).save(file)}"
        except OSError as error:
            said = f"the page of {title} cannot be written: {error}"
        show(f"hookcb diagnose: {said}", soft_wrap=True, highlight=False, markup=False)


def _no_training_in(path: str | Path) -> str:
    return (
        f"no training was seen in {os.fspath(path)}; a model counts as trained if it is called in the main "
        "thread with gradients enabled, and an optimizer or the script itself updates its parameters"
    )


def _run(path: str, args: list[str], tracker: ModelTracker, is_module: bool) -> tuple[int, bool]:
    """Runs the script to its end; returns the exit code Python would give, and whether the script raised."""
    try:
        with tracker.watching(), _as_main(path, args, is_module) as main:
            file = main["__file__"]
            exec(compile(Path(file).read_bytes(), file, "exec"), main)
    except NotFoundError:
        raise
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0, False
        safe_console().file.flush()
        show_error(f"{ended.code}")
        return 1, False
    except BaseException as error:
        safe_console().file.flush()  # what the script has printed comes first
        _hide_own_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, True
    return 0, False


@contextmanager
def _as_main(path: str, args: list[str], is_module: bool) -> Iterator[dict[str, Any]]:
    """Makes the script `__main__`, with the arguments and import path that Python would give it."""
    module = ModuleType("__main__")
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv, sys.modules["__main__"] = [path, *args], module
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(path))
    try:
        spec = _find_spec(path) if is_module else None
        # absolute since Python 3.9; multiprocessing starts its processes with this path
        file = os.path.abspath((spec and spec.origin) or path)
        vars(module).update(__file__=file, __builtins__=__builtins__)
        if spec is not None:
            sys.argv[0] = file
            vars(module).update(__spec__=spec, __package__=spec.parent, __loader__=spec.loader)
        yield vars(module)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


def _find_spec(name: str) -> ModuleSpec:
    """Specification of the file that `python -m name` runs; imports the packages that contain it.

    Raises:
        NotFoundError: If there is none, or it is not a file of Python.
    """
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            return _find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the package imports is missing
        spec = None
    except ValueError as error:  # "", "a..b" and the like
        raise NotFoundError(f"there is no module {name!r}: {error}") from None
    if spec is None:
        raise NotFoundError(no_module(name))
    if not f"{spec.origin}".endswith(".py"):
        raise NotFoundError(f"module {name!r} is not a file of Python, but {spec.origin}")
    return spec


def _hide_own_frames(error: BaseException | None) -> None:
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
