"""Runs an unmodified training script, and prints a verdict on each model that it trains."""

import atexit
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from rich.text import Text

from hookcb.cli import INTERRUPTED
from hookcb.cli.launch import hide_own_frames, launch
from hookcb.cli.limits import Limit
from hookcb.cli.model_tracker import ModelTracker
from hookcb.cli.ranks import own_rank
from hookcb.cli.second_run import SecondRun
from hookcb.core.console import safe_console, show, show_error
from hookcb.diagnosis.verdict import Verdict
from hookcb.processes.hangs import Terminated, hold_farewell, lookout_kept
from hookcb.processes.process_group import n_processes
from hookcb.report.page import Page

Shown = list[tuple[str, Verdict, bool]]  # title, verdict, and whether it counts, of each model


@dataclass(frozen=True)
class Options:
    """Options of `run_script`.

    Attributes:
        html: file for a page of what was recorded; a second model gets `run-2.html` beside `run.html`.
        json: whether stdout gets the verdicts as JSON, and stderr all that the script writes.
        coverage: whether to list what was seen of each model, and what was not.
        is_module: whether to run a module by its name, as `python -m` does.
        steps: number of optimizer steps after which to end the script, see `Limit`.
        minutes: minutes of training after which to end it.
        strict: whether the exit code is 1 for any warning and error.
        ignored: codes of findings to leave out, as `fnmatch` patterns.
        trace_nan: whether to run the script a second time to find the line that makes a NaN.
    """

    html: Path | None = None
    json: bool = False
    coverage: bool = False
    is_module: bool = False
    steps: int | None = None
    minutes: float | None = None
    strict: bool = False
    ignored: tuple[str, ...] = ()
    trace_nan: bool = False


NO_OPTIONS = Options()


def run_script(path: str | Path, args: Sequence[str] = (), options: Options = NO_OPTIONS) -> int:
    """Runs a script as `python path args…` does, watches what it trains, and prints the verdicts.

    The script needs no change. A model is the outermost module with trainable parameters that is called with
    gradients enabled, itself or by one of its own methods that calls its parts; a module that is made anew
    around it for each call is not one of its own. Its loss is the tensor that `backward` is called on. A
    `Learner` gets a `Diagnose` callback. At most 4 models are watched at a time; when there is a fifth, one
    gets its verdict: one without an optimizer if there is one, else the least recently called one.

    Args:
        path: the script, or the name of a module.
        args: its arguments.
        options: what else to do.

    Returns:
        Exit code: 0 if all models are healthy, or only slow; 1 if one is suspect or sick, if one has an
        optimizer but no training of it was seen, if nothing was trained, or if the script raised; the
        script's own if that is not 0; 130 after Ctrl-C. Once a limit has ended the script, only the verdicts
        decide. Under torchrun it is that of the worst of all processes, once rank 0 has shown the verdicts
        on all of them; a process that rank 0 does not hear of in time shows its own if that is not healthy,
        and exits with the code of the script.
    """
    start, makes_pages = Path.cwd(), options.html is not None and not own_rank()
    tracker = ModelTracker(makes_pages, Limit(options.steps, options.minutes), options.ignored)

    again = SecondRun(os.fspath(path), args, options.is_module, options.json) if options.trace_nan else None

    def tell(code: int, has_failed: bool) -> int:
        hold_farewell()
        if again is not None and n_processes() > 1:
            tracker.notes.append("--trace-nan was left out, as it runs one process only")
        elif again is not None:
            tracker.explain(again.explain)
            tracker.notes += again.notes
        file = _from(start, options.html)  # the script may have changed the folder
        return _tell(tracker, code, has_failed, path, replace(options, html=file))

    with ExitStack() as kept, ExitStack() as stack:
        kept.enter_context(lookout_kept(lambda: _end_by_signal(tracker, stack, tell)))
        if options.json:
            stack.enter_context(_stdout_as_stderr())
        tracker.limit.give_up = lambda: _exit(tracker, stack, tell)
        code, has_failed = run_watched(os.fspath(path), list(args), tracker, options.is_module)
        if tracker.limit.is_over:
            tracker.notes += ["what the script raised after its limit does not count"] * has_failed
            code, has_failed = 0, False
        if tracker.begin_anew():
            return code  # a process that the script has forked, and that trains nothing
        stack.close()
        return tell(code, has_failed)


def _exit(tracker: ModelTracker, stack: ExitStack, tell: Callable[[int, bool], int]) -> NoReturn:
    """Gives the verdicts, and ends the process within the script, which catches all exceptions."""
    tracker.close()
    stack.close()
    code = tell(0, False)
    atexit._run_exitfuncs()
    for file in sys.stdout, sys.stderr:
        with suppress(OSError, ValueError, AttributeError):  # it is closed, full, or missing
            file.flush()
    os._exit(code)


def _end_by_signal(tracker: ModelTracker, stack: ExitStack, tell: Callable[[int, bool], int]) -> None:
    """Gives the verdicts so far as SIGTERM ends the process; in another thread than the script's."""
    tracker.close(Terminated("SIGTERM"))
    stack.close()
    tell(0, True)


def _tell(tracker: ModelTracker, code: int, has_failed: bool, path: str | Path, options: Options) -> int:
    """Prints the verdicts; returns the exit code, which is the same for all processes under torchrun."""
    shown = tracker.verdicts()
    if own_rank():
        return _tell_alone(shown, tracker, code, has_failed, options)
    for rank, other in tracker.exit.others().items():
        if other and not code:
            tracker.notes.append(f"rank {rank} ends with exit code {other}")
        code = code or other
    if options.json:
        return tracker.exit.settle(_write_json(shown, tracker, code, path, options, has_failed))
    _show(shown, has_failed, options)
    for note in _notes(shown, tracker, path, options.html, has_failed):
        show(f"hookcb diagnose: {note}", soft_wrap=True, highlight=False, markup=False)
    safe_console().file.flush()
    return tracker.exit.settle(_exit_code(code, shown, options.strict))


def _tell_alone(shown: Shown, tracker: ModelTracker, code: int, has_failed: bool, options: Options) -> int:
    """Prints the verdicts that rank 0 does not have, but no healthy one; returns the exit code of all."""
    own = [(title, verdict, counts) for title, verdict, counts in shown if _is_own(verdict)]
    if not options.json:
        _show([x for x in own if not x[1]], has_failed, options)
        safe_console().file.flush()
    return tracker.exit.settle(_exit_code(code, own, options.strict) if own else code, otherwise=code)


def _is_own(verdict: Verdict) -> bool:
    """Whether a verdict is of this rank only."""
    return n_processes() > 1 and verdict.of_rank == f"rank {own_rank()}"


def _show(shown: Shown, has_failed: bool, options: Options) -> None:
    for title, verdict, _ in shown:
        of = f", on rank {own_rank()} of {n_processes()}" if _is_own(verdict) else ""
        until = ", until the script failed" if has_failed else ""
        heading = Text(f"\n{title}{of}{until}", style="bold")
        coverage = [Text("\n".join(verdict.coverage))] if options.coverage else []
        show(heading, verdict, *coverage, soft_wrap=True)  # at once, as ranks write to one terminal


def _from(folder: Path, file: Path | None) -> Path | None:
    """The file as seen from the current folder, if it was given in another one."""
    try:
        is_there = Path.cwd() == folder
    except FileNotFoundError:  # the current one was deleted
        is_there = False
    return file if file is None or is_there else folder / file


def _exit_code(code: int, shown: Shown, is_strict: bool = False) -> int:
    counted = [verdict for _, verdict, counts in shown if counts]
    is_well = bool(counted) and all(counted)
    if is_strict:  # neither is a training that is only slow
        is_well = is_well and all(f.severity == "info" for _, verdict, _ in shown for f in verdict.findings)
    return code or (0 if is_well else 1)


def _notes(
    shown: Shown, tracker: ModelTracker, path: str | Path, html: Path | None, has_failed: bool
) -> list[str]:
    """Sentences below the verdicts, the last of them about pages, which this writes."""
    return [
        *([] if shown else [f"no training was seen in {os.fspath(path)}{_why_none(tracker, has_failed)}"]),
        *tracker.notes,
        *_write_pages(html, tracker),
    ]


def _write_json(
    shown: Shown, tracker: ModelTracker, code: int, path: str | Path, options: Options, has_failed: bool
) -> int:
    """Writes the verdicts to stdout as JSON; returns the exit code."""
    notes = _notes(shown, tracker, path, options.html, has_failed)
    exit_code = _exit_code(code, shown, options.strict)
    models = [
        {"title": title, "counts": counts, "verdict": verdict.to_dict()} for title, verdict, counts in shown
    ]
    state = {"schema": 1, "exit_code": exit_code, "models": models, "notes": notes}
    state |= {"steps": tracker.limit.ended_after, "ignored": list(options.ignored)}
    sys.stdout.write(json.dumps(state, ensure_ascii=False, allow_nan=False) + "\n")
    safe_console().file.flush()
    return exit_code


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Sends what Python and its child processes write to stdout to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        with suppress(OSError, ValueError, AttributeError):  # it is closed, full, or missing
            sys.__stdout__.flush()  # type: ignore[union-attr]  # what was written to it without redirection
        os.dup2(kept, 1)
        os.close(kept)


def _write_pages(html: Path | None, tracker: ModelTracker) -> Iterator[str]:
    """Writes the page of each model; a sentence about each."""
    if html is None:
        return
    for i, (title, data) in enumerate(tracker.pages(), 1):
        file = html if i == 1 else html.with_stem(f"{html.stem}-{i}")
        data.title = title
        try:
            yield f"{title}: {Page(data).save(file)}"
        except OSError as error:
            yield f"the page of {title} cannot be written: {error}"


def _why_none(tracker: ModelTracker, has_failed: bool) -> str:
    """Why no training was seen, as the end of a sentence; "" if the notes of the tracker say it."""
    if has_failed:
        return ", until it failed"
    if any(tracker.unseen.values()):
        return ""
    if n := tracker.n_losses_of_none:
        return (
            f": backward was run {n:,} time{'s' * (n != 1)}, but on parameters of no nn.Module that is "
            "called; put them in a module, as only modules are watched"
        )
    return (
        "; a model counts as trained if it is called in the main thread of this process with gradients "
        "enabled, and an optimizer or the script itself updates its parameters"
    )


def run_watched(path: str, args: list[str], tracker: ModelTracker, is_module: bool) -> tuple[int, bool]:
    """Runs the script to its end; returns the exit code Python would give, and whether the script raised."""
    try:
        with tracker.watching():
            launch(path, args, is_module, tracker.exit.keep)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0, False
        safe_console().file.flush()
        show_error(f"{ended.code}")
        return 1, False
    except BaseException as error:
        if tracker.limit.is_over and isinstance(error, KeyboardInterrupt):
            return 0, False
        safe_console().file.flush()  # what the script has printed comes first
        hide_own_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, True
    return 0, False
