"""Parser of the command line: commands, options, and what is said if one is wrong."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hookcb.cli.completion import SHELLS
from hookcb.cli.faults import Fault, find_fault
from hookcb.cli.hints import similar, similar_files
from hookcb.cli.summary import InputSpec
from hookcb.core.version import __version__
from hookcb.diagnosis.explain import explain

EXIT_CODES = """exit codes:
  0    success; diagnose: all models are healthy; compare: no condition is met
  1    the command failed; diagnose: a model is not healthy, nothing was trained, or the script raised;
       compare: a condition is met
  2    a command, option, file or name is wrong
  3    compare: the noise within the runs does not allow to say
  130  Ctrl-C ended the script or the demo
  If the script of diagnose ends with a code of its own, diagnose ends with it.

`hookcb COMMAND --help` shows the options of a command."""


class Parser(argparse.ArgumentParser):
    """Parser whose errors about commands end in what to type."""

    def error(self, message: str) -> NoReturn:
        """Exits with 2, after the message and the command that shows all options."""
        super().error(f"{message}; try: {self.prog} --help")

    def check_command(self, given: str) -> None:
        """Exits with 2 if `given` is not a command, and names those like it."""
        names = command_names(self)
        if not given.startswith("-") and given not in names:
            self.error(f"there is no command {given!r}{similar(given, names)}; commands: {', '.join(names)}")


def command_names(parser: argparse.ArgumentParser) -> list[str]:
    """Names of the commands of a parser."""
    commands: Any = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return list(commands.choices)


def build_parser() -> Parser:
    """Parser of the command `hookcb`."""
    parser = Parser(
        prog="hookcb",
        description="See inside a PyTorch training run.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hookcb {__version__}")
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
    script.add_argument(
        "--json",
        action="store_true",
        help="print the verdicts as JSON, and all that the script prints to standard error",
    )
    script.add_argument(
        "--coverage", action="store_true", help="list all that was and that could not be inspected"
    )
    script.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    script.add_argument(
        "script", metavar="SCRIPT", help="file, or with -m module; it does not have to import hookcb"
    )
    script.add_argument(
        "args", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script, which come last"
    )
    script.set_defaults(wrong=script.error)
    net = commands.add_parser(
        "summary",
        help="list the layers of a model, with their parameters and output shapes",
        description="Make a model, run its forward once on inputs of the given sizes, and show what each "
        "layer has and returns. Inputs are ones, or zeros if they are whole numbers.",
    )
    net.add_argument(
        "model",
        metavar="MODEL",
        help="module:name or file.py:name of a model, or of a function without arguments that makes one",
    )
    net.add_argument(
        "--input",
        action="append",
        default=[],
        type=_spec,
        metavar="SIZES",
        help="sizes of an input, such as 1,3,224,224, and its dtype if it is not float32, such as "
        "1,77:int64; once for each input",
    )
    net.add_argument("--depth", type=_depth, metavar="N", help="deepest rows to show; 0 is the whole model")
    follow = commands.add_parser(
        "tail",
        help="show the records of a JSONLLogger as they are written",
        description="Show the last records of a file of JSONLLogger, and each new one as it is written, "
        "until Ctrl-C, which exits with 0.",
    )
    follow.add_argument("file", type=_file, help="file of a JSONLLogger")
    follow.add_argument(
        "-n", "--lines", type=_count("lines"), default=10, metavar="N", help="past records to show first"
    )
    follow.add_argument("--once", action="store_true", help="show these, and exit")
    shell = commands.add_parser(
        "completion",
        help="print the completion script for a shell",
        description="Print a script that completes commands and options. In bash: "
        'eval "$(hookcb completion bash)". Needs the extra completion.',
    )
    shell.add_argument("shell", choices=SHELLS)
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
        raise argparse.ArgumentTypeError(f"there is no file {path!r}{similar_files(path)}")
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


def _depth(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"depth must be a whole number, 0 or more, got {text!r}")
    return int(text)


def _spec(text: str) -> InputSpec:
    try:
        return InputSpec.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
