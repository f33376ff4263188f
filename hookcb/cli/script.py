"""Runs an unmodified training script, and prints a verdict on each model that it trains."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from hookcb.cli.model_tracker import ModelTracker
from hookcb.cli.ranks import INTERRUPTED, own_rank
from hookcb.core.console import safe_console, show, show_error
from hookcb.distributed.process_group import n_processes
from hookcb.report.page import Page

OURS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "diagnosis"))  # hidden in tracebacks


def run_script(path: str | Path, args: Sequence[str] = (), html: Path | None = None) -> int:
    """Runs a script as `python path args…` does, watches what it trains, and prints the verdicts.

    The script needs no change. A model is the outermost module with trainable parameters that is called with
    gradients enabled, itself or by one of its own methods that calls its parts; its loss is the tensor that
    `backward` is called on. A `Learner` gets a `Diagnose` callback. At most 4 models are watched at a time;
    when there is a fifth, the least recently called one gets its verdict.

    Args:
        path: the script.
        args: its arguments.
        html: file for a page of what was recorded; a second model gets `run-2.html` beside `run.html`.

    Returns:
        Exit code: 0 if all models are healthy; 1 if one is suspect or sick, if one has an optimizer but no
        training of it was seen, if nothing was trained, or if the script raised; the script's own if that is
        not 0; 130 after Ctrl-C. Under torchrun, the verdicts of rank 0 decide: the others show theirs if they
        are their own and not healthy, and exit with the code of the script.
    """
    tracker = ModelTracker(makes_pages=html is not None and not own_rank())
    code, has_failed = _run(os.fspath(path), list(args), tracker)
    shown = tracker.verdicts()
    for title, verdict, _ in shown:
        is_shared = f"{n_processes()} ranks" in verdict.looked
        if own_rank() and (is_shared or verdict):
            continue  # rank 0 shows the same, or is healthy too
        of = f", on rank {own_rank()} of {n_processes()}" if n_processes() > 1 and not is_shared else ""
        until = ", until the script failed" if has_failed else ""
        show(f"\n{title}{of}{until}", style="bold", highlight=False, markup=False, soft_wrap=True)
        show(verdict, soft_wrap=True)
    if own_rank():
        return code  # if it were not 0, torchrun would end rank 0 before that has shown its verdicts
    for note in [*([] if shown else [_no_training_in(path)]), *tracker.notes]:
        show(f"hookcb diagnose: {note}", soft_wrap=True, highlight=False, markup=False)
    if html is not None:
        _write_pages(html, tracker)
    counted = [verdict for _, verdict, counts in shown if counts]
    is_well = bool(counted) and all(counted)
    return code or (0 if is_well else 1)


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


def _run(path: str, args: list[str], tracker: ModelTracker) -> tuple[int, bool]:
    """Runs the script to its end; returns the exit code Python would give, and whether the script raised."""
    try:
        with tracker.watching(), _as_main(path, args) as main:
            exec(compile(Path(path).read_bytes(), main["__file__"], "exec"), main)
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
def _as_main(path: str, args: list[str]) -> Iterator[dict[str, Any]]:
    """Makes the script's module `__main__`, with the arguments and import path that Python would give it."""
    module = ModuleType("__main__")
    # absolute since Python 3.9; multiprocessing starts its processes with this path
    vars(module).update(__file__=os.path.abspath(path), __builtins__=__builtins__)
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv, sys.modules["__main__"] = [path, *args], module
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    try:
        yield vars(module)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


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
