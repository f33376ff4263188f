"""The parser of the command line."""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NoReturn

from hookcb.cli.faults import find_fault
from hookcb.core.arguments import check_page
from hookcb.diagnosis.explain import check_codes, explain

AddCommand = Callable[..., "Parser"]


class Parser(argparse.ArgumentParser):
    """Parser whose errors end in what to type."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 after a message that names a similar choice, if there is one."""
        if found := re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message):
            similar = get_close_matches(found[1], re.findall(r"[\w.-]+", found[2]), 1)
            message += f"; did you mean {similar[0]}?" if similar else ""
        super().error(f"{message}\nfor what is possible, type: {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses what is not known here: else the parser above would, which has other options."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            wrong = unknown[0].partition("=")[0]
            similar = get_close_matches(wrong, self._option_string_actions, 1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def misplaced(self, given: Sequence[str]) -> list[str]:
        """Long options of this parser, with their values, among arguments that belong to something else."""
        found: list[str] = []
        own = [*takewhile(lambda arg: arg != "--", given), "--"]
        for arg, following in pairwise(own):
            name, _, value = arg.partition("=")
            action = self._option_string_actions.get(name)
            if name.startswith("--") and name != "--help" and action is not None:
                takes_next = action.nargs is None and not value and not following.startswith("--")
                found += [arg, following] if takes_next else [arg]
        return found


def make_parser() -> Parser:
    """Parser of the whole command line."""
    parser = Parser(
        prog="hookcb",
        description="See inside a PyTorch training run. Exit codes: 0, 1 if something is wrong, 2 for a "
        "command that cannot be understood, 130 after Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"hookcb {version('hookcb')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add_to in (
        _add_demo,
        _add_diagnose,
        _add_summary,
        _add_tail,
        _add_explain,
        _add_report,
        _add_compare,
        _add_export,
        _add_replay,
        _add_completion,
    ):
        add_to(commands.add_parser)
    return parser


def _add_demo(add: AddCommand) -> None:
    parser = add(
        "demo",
        help="train on real handwritten digits, and show what each layer does",
        description="Train a small network on 1,437 real handwritten digits, validate it on 360 others after "
        "each epoch, and show tables of its activations and gradients; if matplotlib is installed, also draw "
        "activations.png. Checkpoints are written to hookcb-demo/.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", choices=["mlp", "cnn"], default="cnn", help="what to train")
    parser.add_argument(
        "--epochs", type=_count_of("epochs"), default=10, help="passes over the training digits"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the last checkpoint in hookcb-demo/"
    )
    parser.add_argument(
        "--profile", action="store_true", help="show the time of each layer and phase, and write trace.json"
    )
    parser.add_argument(
        "--seed", type=_read_by(_seed), default=0, help="seed of the weights, split and order of batches"
    )
    parser.add_argument(
        "--fault", type=_read_by(find_fault), metavar="NAME", help="plant a fault, and show the verdict on it"
    )
    parser.add_argument(
        "--ranks", type=_count_of("ranks"), default=1, metavar="N", help="train on N processes, by torchrun"
    )
    parser.add_argument(
        "--html",
        type=_read_by(check_page),
        nargs="?",
        const=Path("hookcb-demo.html"),
        metavar="FILE",
        help="write what was recorded as a page, by default to hookcb-demo.html",
    )
    parser.add_argument("--list-faults", action="store_true", help="list the faults, and exit")


def _add_diagnose(add: AddCommand) -> None:
    parser = add(
        "diagnose",
        help="run a training script, and report whether its models train well",
        description="Run a training script as `python SCRIPT ARGS...` does, watch each model that it trains, "
        "and print the verdicts: sick, suspect, healthy or unknown, the cause, and what to do. The exit code "
        "is 0 if all models are healthy, or only slow, 1 if not, or the script's own if that is not 0; after "
        "--steps or --minutes only the verdicts decide. Options stand before SCRIPT.",
    )
    parser.add_argument(
        "--steps",
        type=_count_of("steps"),
        metavar="N",
        help="end the script after N optimizer steps, as by Ctrl-C; of several optimizers, the one with the "
        "most parameters counts",
    )
    parser.add_argument(
        "--minutes",
        type=_read_by(_minutes),
        metavar="N",
        help="end the script N minutes after its first step",
    )
    parser.add_argument(
        "--strict",
        action=argparse.BooleanOptionalAction,
        help="exit with 1 for any warning or error; as --ignore, also in [tool.hookcb] of pyproject.toml",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        type=_read_by(check_codes),
        default=[],
        metavar="CODE",
        help="leave out findings of a check, as if it had passed, or of several: 'time.*'; may be repeated",
    )
    parser.add_argument(
        "--html",
        type=_read_by(check_page),
        metavar="FILE",
        help="write what was recorded as a page, one for each model",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="serve the page to browsers on this machine while the script runs; the address is printed at "
        "its start",
    )
    parser.add_argument(
        "--port",
        type=_read_by(_port),
        default=0,
        metavar="N",
        help="port for --live, as for a tunnel: ssh -L N:127.0.0.1:N HOST; by default any that is free",
    )
    parser.add_argument(
        "--json", action="store_true", help="write the verdicts as JSON, and nothing else, to stdout"
    )
    parser.add_argument(
        "--github",
        action="store_true",
        help="also print each cause as an annotation of a GitHub workflow",
    )
    parser.add_argument(
        "--coverage", action="store_true", help="list what was seen, and what was not and why"
    )
    parser.add_argument(
        "--trace-nan",
        action="store_true",
        help="if the script makes a NaN and its line is unknown, run it a second time, with all that it "
        "writes, and name the line; for one process",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module, as for python -m"
    )
    parser.add_argument("script", help="the script; it does not have to import hookcb")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(misplaced=parser.misplaced)


def _add_summary(add: AddCommand) -> None:
    parser = add(
        "summary",
        help="show the layers of a model",
        description="Show the layers of a model with their parameters, outputs and multiply-adds, after one "
        "forward in eval mode. The exit code is 1 if the model cannot be had or raises.",
    )
    parser.add_argument(
        "model",
        metavar="WHERE:NAME",
        help="a model, its class, or a function that makes it: package.module:name or file.py:name",
    )
    parser.add_argument(
        "--input",
        action="append",
        type=_read_by(_input),
        default=[],
        metavar="SIZE",
        help="shape of an input, with the batch: 1,3,224,224, or 1,128:int64; once for each input",
    )
    parser.add_argument("--depth", type=_count_of("depth"), help="depth of the deepest rows, by default all")


def _add_tail(add: AddCommand) -> None:
    parser = add(
        "tail",
        help="follow the file of a JSONLLogger",
        description="Show the last records in a file of a JSONLLogger, and each new one, until Ctrl-C.",
    )
    parser.add_argument("file", type=Path, help="the file, such as run.jsonl")
    parser.add_argument("-n", type=_count_of("n"), default=10, help="records to begin with, by default 10")
    parser.add_argument("--once", action="store_true", help="show what is there, and exit")


def _add_explain(add: AddCommand) -> None:
    parser = add(
        "explain",
        help="explain the check behind a finding",
        description="Print what a check looks for, its formula and limit, their source, and what a finding "
        "may lead to. CODE is in the first line of a finding, such as unit.dead.",
    )
    parser.add_argument(
        "text", type=_read_by(explain), metavar="CODE", help="code of a finding, such as unit.dead"
    )


def _add_report(add: AddCommand) -> None:
    parser = add(
        "report",
        help="write saved records as a page, or look for faults in weights and curves of any program",
        description="Write what files have of a run as one HTML page: records.save(), a checkpoint, or a "
        "folder of them, of which the newest checkpoint is read. For files of other programs, weights "
        "(.pt, .pth, .bin, .ckpt, .safetensors, or the .index.json of several), a table (.csv) and events "
        "of TensorBoard, print what is wrong with them, and write a page with -o; no code in them is run. "
        "The exit code is 1 if a weight or the end of a loss is NaN or inf, or the index has what its "
        "files lack, and 2 if the file cannot be read.",
    )
    parser.add_argument("run", type=Path, help="file or folder")
    parser.add_argument(
        "-o", "--output", type=_read_by(check_page), metavar="FILE", help="page to write, by default RUN.html"
    )


def _add_compare(add: AddCommand) -> None:
    parser = add(
        "compare",
        help="lay two to eight runs over one another",
        description="Compare pages, saved records or checkpoints: what the runs end with, which layer "
        "departs first and at which step, and how their configurations differ. With --fail-if the exit code "
        "is 1 if a condition is met, 0 if none is, 3 if the noise within the runs does not allow to say, and "
        "2 if a run or a condition cannot be read.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="file or folder; the first one is the reference"
    )
    parser.add_argument(
        "-o", "--output", type=_read_by(check_page), metavar="FILE", help="write the comparison as a page"
    )
    parser.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help='on the ratio of the last run to the first, such as "step_time > 1.1" or "accuracy < 0.99"',
    )


def _add_export(add: AddCommand) -> None:
    parser = add(
        "export",
        help="write the weights in a checkpoint as one plain file",
        description="Write the weights that the training validated, by plain names, from a checkpoint of one "
        "or several processes, or from a file of learn.save.",
    )
    parser.add_argument("checkpoint", type=Path, help="file or folder of a Checkpoint, or of several")
    parser.add_argument("file", type=Path, help="what to write: .safetensors, or else as torch.save does")


def _add_replay(add: AddCommand) -> None:
    parser = add(
        "replay",
        help="run one batch of a fit again, from the checkpoint before it, and show it layer by layer",
        description="Run a script of a Learner again up to one batch, from the newest Checkpoint before it, "
        "with its random state, and show what each layer and parameter did there and in the batch before, "
        "and which samples have the largest losses. Nothing is written by callbacks of hookcb.",
    )
    parser.add_argument("folder", type=Path, help="folder of the fit's Checkpoint")
    parser.add_argument(
        "--step",
        type=_count_of("step", least=0),
        required=True,
        metavar="N",
        help="number of the training batch, counted from 0 since the training began, as in a verdict",
    )
    parser.add_argument(
        "--script",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="SCRIPT ARGS",
        help="the script and its arguments, as the last option; by default the one that has written the "
        "checkpoint, as it was called",
    )


def _add_completion(add: AddCommand) -> None:
    parser = add(
        "completion",
        help="print a script that completes commands in your shell",
        description="Print a script for your shell: source <(hookcb completion bash)",
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="your shell")


def _read_by(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Reads an argument; what is wrong with it, as `read` raises it, is the message of the parser."""

    def read_argument(text: str) -> Any:
        try:
            return read(text)
        except (LookupError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_argument


def _input(text: str) -> tuple[tuple[int, ...], str]:
    """Shape, with the batch, and name of the dtype of an input."""
    size, _, dtype = text.partition(":")
    try:
        return tuple(int(n) for n in size.split(",")), dtype or "float32"
    except ValueError:
        raise ValueError(
            f"an input is whole numbers and perhaps a dtype, such as 1,3,224,224 or 1,128:int64, got {text!r}"
        ) from None


def _count_of(what: str, least: int = 1) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{what} must be a whole number, {least} or more, got {text!r}")
        return int(text)

    return _read_by(count)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65_536:
        raise ValueError(f"port must be a whole number from 1 to 65535, got {text!r}")
    return int(text)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be a number above 0, such as 2 or 0.5, got {text!r}")
    return minutes


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise ValueError(f"seed must be a whole number from 0 to 2**63 - 1, got {text!r}")
    return int(text)
