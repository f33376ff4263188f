"""Runs an unmodified training script, and prints a verdict on each model that it trains."""

import argparse
import atexit
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import NoReturn

from rich.text import Text

from hookcb.cli import INTERRUPTED
from hookcb.cli.annotations import annotations
from hookcb.cli.config import Config
from hookcb.cli.launch import hide_own_frames, launch
from hookcb.cli.limits import Limit
from hookcb.cli.model_tracker import ModelTracker, Result
from hookcb.cli.ranks import own_rank
from hookcb.cli.second_run import SecondRun
from hookcb.core.console import safe_console, show, show_error
from hookcb.core.switch import OFF
from hookcb.diagnosis.verdict import Verdict
from hookcb.processes.hangs import Terminated, hold_farewell, lookout_kept
from hookcb.processes.process_group import n_processes
from hookcb.report.live import LiveServer
from hookcb.report.page import Page


class ScriptRun:
    """Runs a script as `python path args…` does, watches what it trains, and prints the verdicts.

    The script needs no change. A model is the outermost module with trainable parameters that is called with
    gradients enabled, itself or by one of its own methods that calls its parts; a module that is made anew
    around it for each call is not one of its own. Its loss is the tensor that `backward` is called on. A
    `Learner` gets a `Diagnose` callback. At most 4 models are watched at a time; when there is a fifth, one
    gets its verdict: one without an optimizer if there is one, else the least recently called one.

    Args:
        path: the script, or the name of a module.
        args: its arguments.
        options: the options of `hookcb diagnose`, as its parser returns them.
        config: habits of the project; none by default.

    Raises:
        OSError: If the live page cannot be served on the port of `--port`.
    """

    def __init__(
        self, path: str, args: Sequence[str], options: argparse.Namespace, config: Config | None = None
    ) -> None:
        self._path, self._args, self._options = path, list(args), options
        self._config = config = config or Config()
        self._is_strict = config.strict if options.strict is None else options.strict
        self._start = Path.cwd()
        limit = Limit(options.steps, options.minutes)
        limit.give_up = self._exit
        live = LiveServer(options.port) if options.live and not own_rank() else None
        makes_pages = (options.html is not None and not own_rank()) or live is not None
        self._tracker = ModelTracker(makes_pages, limit, options.ignore, live, config)
        if live is not None:
            show_error(f"hookcb diagnose: live at {live.address}")
        self._again = None
        if options.trace_nan:
            self._again = SecondRun(path, self._args, options.is_module, options.json)
        self._stdout = ExitStack()  # closed once what is written is ours

    def run(self) -> int:
        """Runs it to its end.

        Returns:
            Exit code: 0 if all models are healthy, or only slow; 1 if one is suspect or sick, if one has an
            optimizer but no training of it was seen, if nothing was trained, or if the script raised; the
            script's own if that is not 0; 130 after Ctrl-C. Once a limit has ended the script, only the
            verdicts decide. Under torchrun it is that of the worst of all processes, once rank 0 has shown
            the verdicts on all of them; a process that rank 0 does not hear of in time shows its own if that
            is not healthy, and exits with the code of the script.
        """
        with lookout_kept(self._end_by_signal), self._stdout:
            if self._options.json:
                self._stdout.enter_context(_stdout_as_stderr())
            code, has_failed = run_watched(self._path, self._args, self._tracker, self._options.is_module)
            if self._tracker.limit.is_over:
                self._tracker.notes += ["what the script raised after its limit does not count"] * has_failed
                code, has_failed = 0, False
            if self._tracker.begin_anew():
                return code  # a process that the script has forked, and that trains nothing
            self._stdout.close()
            return self._tell(code, has_failed)

    def _exit(self) -> NoReturn:
        """Gives the verdicts, and ends the process within the script, which catches all exceptions."""
        self._tracker.close()
        self._stdout.close()
        code = self._tell(0, False)
        atexit._run_exitfuncs()
        for file in sys.stdout, sys.stderr:
            with suppress(OSError, ValueError, AttributeError):  # it is closed, full, or missing
                file.flush()
        os._exit(code)

    def _end_by_signal(self) -> None:
        """Gives the verdicts so far as SIGTERM ends the process; in another thread than the script's."""
        self._tracker.close(Terminated("SIGTERM"))
        self._stdout.close()
        self._tell(0, True)

    # ---- the verdicts

    def _tell(self, code: int, has_failed: bool) -> int:
        """Prints the verdicts; returns the exit code, which is the same for all processes under torchrun."""
        hold_farewell()
        self._run_again()
        tracker, shown = self._tracker, self._tracker.results()
        if own_rank():
            return self._tell_alone(shown, code, has_failed)
        for rank, other in tracker.exit.others().items():
            if other and not code:
                tracker.notes.append(f"rank {rank} ends with exit code {other}")
            code = code or other
        exit_code = _exit_code(code, shown, self._is_strict)
        if not self._options.json:
            self._show(shown, has_failed)
        # the last ones are about pages, which this writes
        nothing = [] if shown else [f"no training was seen in {self._path}{self._why_none(has_failed)}"]
        notes = [*nothing, *tracker.notes, *self._write_pages(shown)]
        if self._options.json:
            self._write_json(shown, notes, exit_code)
        else:
            for note in notes:
                show(f"hookcb diagnose: {note}", soft_wrap=True, highlight=False, markup=False)
        safe_console().file.flush()
        settled = tracker.exit.settle(exit_code)
        tracker.end_live(*nothing or [""])
        return settled

    def _run_again(self) -> None:
        """Runs the script a second time if that was asked for, and adds what it finds."""
        if self._again is not None and n_processes() > 1:
            self._tracker.notes.append("--trace-nan was left out, as it runs one process only")
        elif self._again is not None:
            self._tracker.explain(self._again.explain)
            self._tracker.notes += self._again.notes

    def _tell_alone(self, shown: list[Result], code: int, has_failed: bool) -> int:
        """Prints the verdicts that rank 0 does not have, but no healthy one; returns the exit code of all."""
        own = [result for result in shown if _is_own(result.verdict)]
        if not self._options.json:
            self._show([result for result in own if not result.verdict], has_failed)
            safe_console().file.flush()
        own_code = _exit_code(code, own, self._is_strict) if own else code
        return self._tracker.exit.settle(own_code, otherwise=code)

    def _show(self, shown: list[Result], has_failed: bool) -> None:
        for title, verdict, *_ in shown:
            of = f", on rank {own_rank()} of {n_processes()}" if _is_own(verdict) else ""
            until = ", until the script failed" if has_failed else ""
            heading = Text(f"\n{title}{of}{until}", style="bold")
            coverage = [Text("\n".join(verdict.coverage))] if self._options.coverage else []
            show(heading, verdict, *coverage, soft_wrap=True)  # at once, as ranks write to one terminal
            if self._options.github:
                for line in annotations(verdict, title, self._path):
                    show(line, soft_wrap=True, highlight=False, markup=False)

    def _write_json(self, shown: list[Result], notes: list[str], exit_code: int) -> None:
        """Writes the verdicts to stdout as JSON."""
        models = [
            {"title": title, "counts": counts, "verdict": verdict.to_dict()}
            for title, verdict, counts, _ in shown
        ]
        state = {"schema": 1, "exit_code": exit_code, "models": models, "notes": notes}
        ignored = list(dict.fromkeys([*self._options.ignore, *self._config.ignore]))
        state |= {"steps": self._tracker.limit.ended_after, "ignored": ignored}
        sys.stdout.write(json.dumps(state, ensure_ascii=False, allow_nan=False) + "\n")

    def _write_pages(self, shown: list[Result]) -> Iterator[str]:
        """Writes the page of each model; a sentence about each."""
        if (html := self._options.html) is None:
            return
        html = html if self._is_at_start() else self._start / html
        pages = [(title, page) for title, *_, page in shown if page is not None]
        for i, (title, data) in enumerate(pages, 1):
            file = html if i == 1 else html.with_stem(f"{html.stem}-{i}")
            data.title = title
            try:
                yield f"{title}: {Page(data).save(file)}"
            except OSError as error:
                yield f"the page of {title} cannot be written: {error}"

    def _is_at_start(self) -> bool:
        """Whether the script has left the current folder as it was."""
        try:
            return Path.cwd() == self._start
        except FileNotFoundError:  # it was deleted
            return False

    def _why_none(self, has_failed: bool) -> str:
        """Why no training was seen, as the end of a sentence; "" if the notes of the tracker say it."""
        if has_failed:
            return ", until it failed"
        if any(self._tracker.unseen.values()):
            return ""
        if n := self._tracker.n_losses_of_none:
            return (
                f": backward was run {n:,} time{'s' * (n != 1)}, but on parameters of no nn.Module that is "
                "called; put them in a module, as only modules are watched"
            )
        return (
            "; a model counts as trained if it is called in the main thread of this process with gradients "
            "enabled, and an optimizer or the script itself updates its parameters"
        )


def _is_own(verdict: Verdict) -> bool:
    """Whether a verdict is of this rank only."""
    return n_processes() > 1 and verdict.of_rank == f"rank {own_rank()}"


def _exit_code(code: int, shown: list[Result], is_strict: bool = False) -> int:
    counted = [result.verdict for result in shown if result.counts]
    is_well = bool(counted) and all(counted)
    if is_strict:  # neither is a training that is only slow
        is_well = is_well and all(f.severity == "info" for result in shown for f in result.verdict.findings)
    return code or (0 if is_well else 1)


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


def run_watched(path: str, args: list[str], tracker: ModelTracker, is_module: bool) -> tuple[int, bool]:
    """Runs the script to its end; returns the exit code Python would give, and whether the script raised."""

    def run() -> None:
        with tracker.watching():
            launch(path, args, is_module, tracker.exit.keep)

    return _run(run, lambda: tracker.limit.is_over)


def run_unwatched(path: str, args: list[str], is_module: bool) -> int:
    """Runs the script with nothing attached, as Python does; returns the exit code Python would give."""
    show_error(f"hookcb diagnose: {OFF}, so the script just runs")
    return _run(lambda: launch(path, args, is_module, lambda main: None), lambda: False)[0]


def _run(run: Callable[[], None], is_over: Callable[[], bool]) -> tuple[int, bool]:
    try:
        run()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0, False
        safe_console().file.flush()
        show_error(f"{ended.code}")
        return 1, False
    except BaseException as error:
        if is_over() and isinstance(error, KeyboardInterrupt):
            return 0, False
        safe_console().file.flush()  # what the script has printed comes first
        hide_own_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, True
    return 0, False
