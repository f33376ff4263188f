"""The command line: what `hookcb` does with its arguments.

Each command imports what it needs, so that none waits for torch unless it trains or reads tensors.
"""

import argparse
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hookcb.cli.config import find_config
from hookcb.cli.faults import fault_lines
from hookcb.cli.launch import has_module, is_module_name
from hookcb.cli.parser import make_parser
from hookcb.core.console import show, show_error
from hookcb.core.switch import is_off


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in `argv`, by default `sys.argv`.

    Returns:
        Exit code: 0, or 1 if the demo cannot run, for example because a package is missing; for `diagnose`
        see `ScriptRun.run`, for `demo --ranks` see `run_on_ranks`. An invalid option exits with 2 at once.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    args = make_parser().parse_args(given, argparse.Namespace(given=given))
    return COMMANDS[args.command](args)


def _diagnose(args: argparse.Namespace) -> int:
    if not (args.is_module or Path(args.script).is_file()):
        hint = f"; for a module: hookcb diagnose -m {args.script}" if is_module_name(args.script) else ""
        make_parser().error(f"there is no file {args.script!r}{hint}")
    if args.is_module and not has_module(args.script):
        make_parser().error(f"there is no module {args.script!r} to be had from {Path.cwd()}")
    if args.port and not args.live:
        make_parser().error("--port is for --live; give both, or none")
    folders = [] if args.is_module else [Path(args.script).resolve().parent]
    try:
        config = find_config(*folders, Path.cwd())
    except (LookupError, TypeError, ValueError) as error:
        _fail(args, error.args[0])
        return 2
    from hookcb.cli.ranks import own_rank
    from hookcb.cli.script import ScriptRun, run_unwatched

    start = len(args.given) - len(args.args)
    start -= args.given[start - 1] == "--"  # argparse drops a leading "--" of the script's arguments
    try:
        if is_off():
            return run_unwatched(args.script, args.given[start:], args.is_module)
    except ValueError as error:
        make_parser().error(f"{error}")
    if (misplaced := args.misplaced(args.given[start:])) and not own_rank():
        names = ", ".join(arg.partition("=")[0] for arg in misplaced if arg.startswith("--"))
        right = shlex.join([*misplaced, *["-m"][: args.is_module], args.script])
        show_error(
            f"note: {names} after the script was given to the script; hookcb's options stand before it: "
            f"hookcb diagnose {right}"
        )
    try:
        script = ScriptRun(args.script, args.given[start:], args, config)
    except OSError as error:
        make_parser().error(f"--port: {error}")
    return script.run()


def _summary(args: argparse.Namespace) -> int:
    from hookcb.cli.summary import summarize

    return summarize(args.model, args.input, args.depth)


def _tail(args: argparse.Namespace) -> int:
    from hookcb.cli.tail import tail

    return tail(args.file, args.n, follow=not args.once)


def _explain(args: argparse.Namespace) -> int:
    return _say(args.text)


def _compare(args: argparse.Namespace) -> int:
    from hookcb.cli.compare import compare_runs

    return compare_runs(args.runs, args.output, args.fail_if)


def _demo(args: argparse.Namespace) -> int:
    if args.list_faults:
        return _say("\n".join(fault_lines()))
    from hookcb.cli.demo import FOLDER, TRACE, show_training, train_digits
    from hookcb.cli.ranks import run_on_ranks
    from hookcb.processes.exchange import RankError
    from hookcb.processes.process_group import n_processes

    if args.ranks > 1 and n_processes() == 1:
        return run_on_ranks(args.ranks, args.given)
    try:
        trace = TRACE if args.profile else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ERROR", UserWarning)  # the verdict is shown at the end
            learn = train_digits(args.model, args.epochs, args.seed, FOLDER, args.resume, trace, args.fault)
    except (ModuleNotFoundError, FileNotFoundError, RankError, ValueError) as error:
        return _fail(args, error)
    try:
        show_training(learn, args.fault, args.profile, args.html)
    except OSError as error:  # the page cannot be written
        return _fail(args, error)
    return 0


def _complete(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError:
        return _fail(args, "shtab is not installed; pip install 'hookcb[completion]'")
    print(shtab.complete(make_parser(), args.shell))  # noqa: T201  # a script for a shell
    return 0


def _export(args: argparse.Namespace) -> int:
    from hookcb.cli.export import export

    try:
        return _say(export(args.checkpoint, args.file))
    except (ModuleNotFoundError, OSError, ValueError) as error:
        return _fail(args, error)


def _replay(args: argparse.Namespace) -> int:
    from hookcb.cli.replay import replay

    try:
        return replay(args.folder, args.step, args.script)
    except (OSError, ValueError) as error:
        return _fail(args, error)


def _report(args: argparse.Namespace) -> int:
    from hookcb.report.foreign_facts import facts_of
    from hookcb.report.page import Page
    from hookcb.report.saved import load_run

    try:
        if (facts := facts_of(args.run)) is None:
            page = Page(load_run(args.run))
            beside = args.run.with_suffix(".html") if args.run.is_file() else Path(f"{args.run}.html")
            return _say(f"{page.save(args.output or beside)}: {page.data.headline}")
        show(facts, highlight=False, markup=False)
        if args.output is not None:
            _say(f"page: {Page(facts.page()).save(args.output)}")
    except (ModuleNotFoundError, OSError, ValueError) as error:
        _fail(args, error)
        return 2
    return int(facts.has_error)


def _say(text: str) -> int:
    show(text, soft_wrap=True, highlight=False, markup=False)
    return 0


def _fail(args: argparse.Namespace, why: object) -> int:
    show_error(f"hookcb {args.command}: {why}")
    return 1


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "demo": _demo,
    "diagnose": _diagnose,
    "summary": _summary,
    "tail": _tail,
    "explain": _explain,
    "report": _report,
    "compare": _compare,
    "export": _export,
    "replay": _replay,
    "completion": _complete,
}
