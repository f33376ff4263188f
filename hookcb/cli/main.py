"""The command line: `hookcb demo`, `diagnose`, `report`, `compare`, `explain` and `export`."""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from hookcb.activations.callback import ActivationStats
from hookcb.cli.compare import compare_runs
from hookcb.cli.demo import train_digits
from hookcb.cli.export import export
from hookcb.cli.faults import Fault, fault_lines, find_fault
from hookcb.cli.ranks import own_rank, run_on_ranks
from hookcb.cli.script import run_script
from hookcb.core.console import show, show_error
from hookcb.core.ranks import RankError
from hookcb.diagnosis.explain import explain
from hookcb.distributed.process_group import n_processes
from hookcb.report.page import Page
from hookcb.report.saved import load_run

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
    args = _parser().parse_args(given)
    if args.command == "diagnose":
        start = len(given) - len(args.args)
        start -= given[start - 1] == "--"  # argparse drops a leading "--" of the script's arguments
        return run_script(args.script, given[start:], args.html)
    if args.command == "explain":
        show(args.text, soft_wrap=True, highlight=False, markup=False)
        return 0
    if args.command in ("export", "report"):
        return _convert(args)
    if args.command == "compare":
        return compare_runs(args.runs, args.output, args.fail_if)
    if args.list_faults:
        show("\n".join(fault_lines()), soft_wrap=True, highlight=False, markup=False)
        return 0
    if args.ranks > 1 and n_processes() == 1:
        return run_on_ranks(args.ranks, given)
    return _demo(args)


def _demo(args: argparse.Namespace) -> int:
    try:
        trace = TRACE if args.profile else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ERROR", UserWarning)  # the verdict is shown at the end
            learn = train_digits(args.model, args.epochs, args.seed, FOLDER, args.resume, trace, args.fault)
    except (ModuleNotFoundError, FileNotFoundError, RankError, ValueError) as error:
        show_error(f"hookcb {args.command}: {error}")  # as argparse does
        return 1
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


def _convert(args: argparse.Namespace) -> int:
    try:
        if args.command == "export":
            said = export(args.checkpoint, args.file)
        else:
            page = Page(load_run(args.run))
            beside = args.run.with_suffix(".html") if args.run.is_file() else Path(f"{args.run}.html")
            said = f"{page.save(args.output or beside)}: {page.data.headline}"
    except (ModuleNotFoundError, OSError, ValueError) as error:
        show_error(f"hookcb {args.command}: {error}")
        return 1
    show(said, soft_wrap=True, highlight=False, markup=False)
    return 0


def _picture(stats: ActivationStats) -> str:
    if find_spec("matplotlib") is None:
        return f"{PICTURE} was not drawn, because matplotlib is not installed; pip install 'hookcb[plot]'"
    stats.color_dim().savefig(PICTURE)
    return f"histograms of every layer, batch by batch: {PICTURE}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hookcb",
        description="See inside a PyTorch training run.",
    )
    parser.add_argument("--version", action="version", version=f"hookcb {version('hookcb')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train on real handwritten digits, and show what each layer does",
        description="Train a small network on 1,437 real handwritten digits, validate it on 360 others after "
        "each epoch, and show tables of its activations and gradients; if matplotlib is installed, also draw "
        "activations.png. Checkpoints are written to hookcb-demo/.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--model", choices=["mlp", "cnn"], default="cnn", help="what to train")
    demo.add_argument("--epochs", type=_count("epochs"), default=10, help="passes over the training digits")
    demo.add_argument(
        "--resume", action="store_true", help="continue from the last checkpoint in hookcb-demo/"
    )
    demo.add_argument(
        "--profile", action="store_true", help="show the time of each layer and phase, and write trace.json"
    )
    demo.add_argument("--seed", type=_seed, default=0, help="seed of the weights, split and order of batches")
    demo.add_argument(
        "--fault", type=_fault, metavar="NAME", help="plant a fault, and show the verdict on it"
    )
    demo.add_argument(
        "--ranks", type=_count("ranks"), default=1, metavar="N", help="train on N processes, by torchrun"
    )
    demo.add_argument("--list-faults", action="store_true", help="list the faults, and exit")
    script = commands.add_parser(
        "diagnose",
        help="run a training script, and report whether its models train well",
        description="Run a training script as `python SCRIPT ARGS...` does, watch each model that it trains, "
        "and print the verdicts: sick, suspect, healthy or unknown, the cause, and what to do. The exit code "
        "is 0 if all models are healthy, 1 if not, or the script's own if that is not 0.",
    )
    script.add_argument(
        "--html", type=Path, metavar="FILE", help="write what was recorded as a page, too; one for each model"
    )
    script.add_argument("script", type=_file, help="the script; it does not have to import hookcb")
    script.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    check = commands.add_parser(
        "explain",
        help="explain the check behind a finding",
        description="Print what a check looks for, its formula and limit, their source, and what a finding "
        "may lead to. CODE is in the first line of a finding, such as unit.dead.",
    )
    check.add_argument("text", type=_explained, metavar="CODE", help="code of a finding, such as unit.dead")
    page = commands.add_parser(
        "report",
        help="write saved records, or a checkpoint, as a page",
        description="Write what files have of a run as one HTML page: records.save(), a checkpoint, or a "
        "folder of them, of which the newest checkpoint is read.",
    )
    page.add_argument("run", type=Path, help="file or folder")
    page.add_argument("-o", "--output", type=Path, metavar="FILE", help="what to write, by default RUN.html")
    several = commands.add_parser(
        "compare",
        help="lay two to eight runs over one another",
        description="Compare pages, saved records or checkpoints: what the runs end with, which layer "
        "departs first and at which step, and how their configurations differ. With --fail-if the exit code "
        "is 1 if a condition is met, 0 if none is, 3 if the noise within the runs does not allow to say, and "
        "2 if a run or a condition cannot be read.",
    )
    several.add_argument(
        "runs", nargs="+", metavar="RUN", help="file or folder; the first one is the reference"
    )
    several.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the comparison as a page")
    several.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help='on the ratio of the last run to the first, such as "step_time > 1.1" or "accuracy < 0.99"',
    )
    weights = commands.add_parser(
        "export",
        help="write the weights in a checkpoint as one plain file",
        description="Write the weights that the training validated, by plain names, from a checkpoint of one "
        "or several processes, or from a file of learn.save.",
    )
    weights.add_argument("checkpoint", type=Path, help="file or folder of a Checkpoint, or of several")
    weights.add_argument("file", type=Path, help="what to write: .safetensors, or else as torch.save does")
    return parser


def _explained(code: str) -> str:
    try:
        return explain(code)
    except LookupError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _fault(name: str) -> Fault:
    try:
        return find_fault(name)
    except LookupError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file(path: str) -> str:
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path!r}")
    return path


def _count(what: str) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{what} must be a whole number, 1 or more, got {text!r}")
        return int(text)

    return count


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"seed must be a whole number from 0 to 2**63 - 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
