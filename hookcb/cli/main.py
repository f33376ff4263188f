"""The command line: what `hookcb` does with its arguments.

Each command imports what it needs, so that none waits for torch unless it trains or reads tensors.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hookcb.cli.parser import Parser, make_parser

if TYPE_CHECKING:
    from hookcb.activations.callback import ActivationStats

PICTURE = "activations.png"
TRACE = "trace.json"
FOLDER = "hookcb-demo"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in `argv`, by default `sys.argv`.

    Returns:
        Exit code: 0, or 1 if the demo cannot run, for example because a package is missing; for `diagnose`
        see `run_script`, for `demo --ranks` see `run_on_ranks`. An invalid option exits with 2 at once.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser()
    args = parser.parse_args(given)
    return COMMANDS[args.command](args, parser, given)


def _diagnose(args: argparse.Namespace, parser: Parser, given: list[str]) -> int:
    from hookcb.cli.script import Options, has_module, is_module_name, run_script

    start = len(given) - len(args.args)
    start -= given[start - 1] == "--"  # argparse drops a leading "--" of the script's arguments
    if not (args.is_module or Path(args.script).is_file()):
        hint = f"; for a module: hookcb diagnose -m {args.script}" if is_module_name(args.script) else ""
        parser.error(f"there is no file {args.script!r}{hint}")
    if args.is_module and not has_module(args.script):
        parser.error(f"there is no module {args.script!r} to be had from {Path.cwd()}")
    limits = args.steps, args.minutes, args.strict, tuple(args.ignore)
    options = Options(args.html, args.json, args.coverage, args.is_module, *limits, args.trace_nan)
    return run_script(args.script, given[start:], options)


def _summary(args: argparse.Namespace, *_: object) -> int:
    from hookcb.cli.summary import summarize

    return summarize(args.model, args.input, args.depth)


def _tail(args: argparse.Namespace, *_: object) -> int:
    from hookcb.cli.tail import tail

    return tail(args.file, args.n, follow=not args.once)


def _explain(args: argparse.Namespace, *_: object) -> int:
    from hookcb.core.console import show

    show(args.text, soft_wrap=True, highlight=False, markup=False)
    return 0


def _compare(args: argparse.Namespace, *_: object) -> int:
    from hookcb.cli.compare import compare_runs

    return compare_runs(args.runs, args.output, args.fail_if)


def _demo(args: argparse.Namespace, _: Parser, given: list[str]) -> int:
    from hookcb.cli.faults import fault_lines
    from hookcb.cli.ranks import run_on_ranks
    from hookcb.core.console import show
    from hookcb.processes.process_group import n_processes

    if args.list_faults:
        show("\n".join(fault_lines()), soft_wrap=True, highlight=False, markup=False)
        return 0
    if args.ranks > 1 and n_processes() == 1:
        return run_on_ranks(args.ranks, given)
    return _train(args)


def _train(args: argparse.Namespace) -> int:
    from hookcb.cli.demo import train_digits
    from hookcb.cli.ranks import own_rank
    from hookcb.core.console import show
    from hookcb.processes.exchange import RankError

    try:
        trace = TRACE if args.profile else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ERROR", UserWarning)  # the verdict is shown at the end
            learn = train_digits(args.model, args.epochs, args.seed, FOLDER, args.resume, trace, args.fault)
    except (ModuleNotFoundError, FileNotFoundError, RankError, ValueError) as error:
        return _fail(args, error)
    if own_rank():
        return 0  # rank 0 shows what all of them have
    if args.fault is not None:
        show(f"planted fault: {args.fault.about}", soft_wrap=True, highlight=False)
        show(learn.diagnose(), soft_wrap=True)
        return 0
    show(learn.activation_stats.report())
    show(learn.gradient_health.report())
    show(_picture(learn.activation_stats), highlight=False, markup=False)
    if args.profile:
        show(learn.profiler.layers())
        show(learn.profiler.report())
        show(f"timeline of the profiled steps: {TRACE}; open it at ui.perfetto.dev", highlight=False)
    last = learn.recorder.rows[-1]
    show(f"validation accuracy {last['accuracy']:.1%} after {args.epochs} epochs, on digits never trained on")
    verdict = learn.diagnose()
    show(verdict.headline if verdict else verdict, soft_wrap=True)
    return 0


def _picture(stats: "ActivationStats") -> str:
    if find_spec("matplotlib") is None:
        return f"{PICTURE} was not drawn, because matplotlib is not installed; pip install 'hookcb[plot]'"
    stats.color_dim().savefig(PICTURE)
    return f"histograms of every layer, batch by batch: {PICTURE}"


def _complete(args: argparse.Namespace, parser: Parser, _: list[str]) -> int:
    try:
        import shtab
    except ModuleNotFoundError:
        return _fail(args, "shtab is not installed; pip install 'hookcb[completion]'")
    print(shtab.complete(parser, args.shell))  # noqa: T201  # a script for a shell
    return 0


def _export(args: argparse.Namespace, *_: object) -> int:
    from hookcb.cli.export import export

    return _told(args, lambda: export(args.checkpoint, args.file))


def _report(args: argparse.Namespace, *_: object) -> int:
    from hookcb.core.console import show
    from hookcb.report.foreign_facts import facts_of
    from hookcb.report.page import Page
    from hookcb.report.saved import load_run

    try:
        if (facts := facts_of(args.run)) is None:
            page = Page(load_run(args.run))
            beside = args.run.with_suffix(".html") if args.run.is_file() else Path(f"{args.run}.html")
            said = f"{page.save(args.output or beside)}: {page.data.headline}"
            show(said, soft_wrap=True, highlight=False, markup=False)
            return 0
        show(facts, highlight=False, markup=False)
        if args.output is not None:
            show(
                f"page: {Page(facts.page()).save(args.output)}", soft_wrap=True, highlight=False, markup=False
            )
    except (ModuleNotFoundError, OSError, ValueError) as error:
        _fail(args, error)
        return 2
    return int(facts.has_error)


def _told(args: argparse.Namespace, act: Callable[[], str]) -> int:
    """Shows what an act says, or why it failed."""
    from hookcb.core.console import show

    try:
        said = act()
    except (ModuleNotFoundError, OSError, ValueError) as error:
        return _fail(args, error)
    show(said, soft_wrap=True, highlight=False, markup=False)
    return 0


def _fail(args: argparse.Namespace, why: object) -> int:
    from hookcb.core.console import show_error

    show_error(f"hookcb {args.command}: {why}")
    return 1


COMMANDS: Mapping[str, Callable[[argparse.Namespace, Parser, list[str]], int]] = {
    "demo": _demo,
    "diagnose": _diagnose,
    "summary": _summary,
    "tail": _tail,
    "explain": _explain,
    "report": _report,
    "compare": _compare,
    "export": _export,
    "completion": _complete,
}
