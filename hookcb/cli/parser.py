"""The parser of the command line."""

import argparse
import math
import re
from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hookcb.core.arguments import check_page
from hookcb.diagnosis.explain import check_codes, explain

if TYPE_CHECKING:
    from hookcb.cli.faults import Fault
    from hookcb.cli.summary import Input


class Parser(argparse.ArgumentParser):
    """Parser whose errors end in what to type."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 after a message that names a similar choice, if there is one."""
        if found := re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message):
            similar = get_close_matches(found[1], re.findall(r"[\w.-]+", found[2]), 1)
            message += f"; did you mean {similar[0]}?" if similar else ""
        super().error(f"{message}\nfor what is possible, type: {self.prog} --help")


def make_parser() -> Parser:
    """Parser of the whole command line."""
    parser = Parser(
        prog="hookcb",
        description="See inside a PyTorch training run. Exit codes: 0, 1 if something is wrong, 2 for a "
        "command that cannot be understood, 130 after Ctrl-C.",
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
        "is 0 if all models are healthy, or only slow, 1 if not, or the script's own if that is not 0; after "
        "--steps or --minutes only the verdicts decide. Options stand before SCRIPT.",
    )
    script.add_argument(
        "--steps",
        type=_count("steps"),
        metavar="N",
        help="end the script after N optimizer steps, as by Ctrl-C; of several optimizers, the one with the "
        "most parameters counts",
    )
    script.add_argument(
        "--minutes", type=_minutes, metavar="N", help="end the script N minutes after its first step"
    )
    script.add_argument("--strict", action="store_true", help="exit with 1 for any warning or error")
    script.add_argument(
        "--ignore",
        action="append",
        type=_codes,
        default=[],
        metavar="CODE",
        help="leave out findings of a check, as if it had passed, or of several: 'time.*'; may be repeated",
    )
    script.add_argument(
        "--html", type=_page, metavar="FILE", help="write what was recorded as a page, one for each model"
    )
    script.add_argument(
        "--json", action="store_true", help="write the verdicts as JSON, and nothing else, to stdout"
    )
    script.add_argument(
        "--coverage", action="store_true", help="list what was seen, and what was not and why"
    )
    script.add_argument(
        "--trace-nan",
        action="store_true",
        help="if the script makes a NaN and its line is unknown, run it a second time, with all that it "
        "writes, and name the line; for one process",
    )
    script.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module, as for python -m"
    )
    script.add_argument("script", help="the script; it does not have to import hookcb")
    script.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    model = commands.add_parser(
        "summary",
        help="show the layers of a model",
        description="Show the layers of a model with their parameters, outputs and multiply-adds, after one "
        "forward in eval mode. The exit code is 1 if the model cannot be had or raises.",
    )
    model.add_argument(
        "model",
        metavar="WHERE:NAME",
        help="a model, its class, or a function that makes it: package.module:name or file.py:name",
    )
    model.add_argument(
        "--input",
        action="append",
        type=_input,
        default=[],
        metavar="SIZE",
        help="shape of an input, with the batch: 1,3,224,224, or 1,128:int64; once for each input",
    )
    model.add_argument("--depth", type=_count("depth"), help="depth of the deepest rows, by default all")
    follow = commands.add_parser(
        "tail",
        help="follow the file of a JSONLLogger",
        description="Show the last records in a file of a JSONLLogger, and each new one, until Ctrl-C.",
    )
    follow.add_argument("file", type=Path, help="the file, such as run.jsonl")
    follow.add_argument("-n", type=_count("n"), default=10, help="records to begin with, by default 10")
    follow.add_argument("--once", action="store_true", help="show what is there, and exit")
    check = commands.add_parser(
        "explain",
        help="explain the check behind a finding",
        description="Print what a check looks for, its formula and limit, their source, and what a finding "
        "may lead to. CODE is in the first line of a finding, such as unit.dead.",
    )
    check.add_argument("text", type=_explained, metavar="CODE", help="code of a finding, such as unit.dead")
    page = commands.add_parser(
        "report",
        help="write saved records as a page, or look for faults in weights and curves of any program",
        description="Write what files have of a run as one HTML page: records.save(), a checkpoint, or a "
        "folder of them, of which the newest checkpoint is read. For files of other programs, weights "
        "(.pt, .pth, .bin, .ckpt, .safetensors, or the .index.json of several), a table (.csv) and events "
        "of TensorBoard, print what is wrong with them, and write a page with -o; no code in them is run. "
        "The exit code is 1 if a weight or the end of a loss is NaN or inf, or the index has what its "
        "files lack, and 2 if the file cannot be read.",
    )
    page.add_argument("run", type=Path, help="file or folder")
    page.add_argument("-o", "--output", type=_page, metavar="FILE", help="page to write, by default RUN.html")
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
    several.add_argument("-o", "--output", type=_page, metavar="FILE", help="write the comparison as a page")
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
    shell = commands.add_parser(
        "completion",
        help="print a script that completes commands in your shell",
        description="Print a script for your shell: source <(hookcb completion bash)",
    )
    shell.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="your shell")
    return parser


def _page(text: str) -> Path:
    try:
        return check_page(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _explained(code: str) -> str:
    try:
        return explain(code)
    except LookupError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _codes(pattern: str) -> str:
    try:
        return check_codes(pattern)
    except LookupError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _fault(name: str) -> "Fault":
    from hookcb.cli.faults import find_fault

    try:
        return find_fault(name)
    except LookupError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _input(text: str) -> "Input":
    from hookcb.cli.summary import Input

    size, _, dtype = text.partition(":")
    try:
        return Input(tuple(int(n) for n in size.split(",")), dtype or "float32")
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"an input is whole numbers and perhaps a dtype, such as 1,3,224,224 or 1,128:int64, got {text!r}"
        ) from None


def _count(what: str) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{what} must be a whole number, 1 or more, got {text!r}")
        return int(text)

    return count


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"minutes must be a number above 0, such as 2 or 0.5, got {text!r}")
    return minutes


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"seed must be a whole number from 0 to 2**63 - 1, got {text!r}")
    return int(text)
