"""The command line: `hookcb demo` and `hookcb diagnose`."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from rich.console import Console

from hookcb import __version__
from hookcb.callbacks import ActivationStats
from hookcb.demo import train_digits

PICTURE = "activations.png"
TRACE = "trace.json"
FOLDER = "hookcb-demo"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in `argv`, by default the process's own.

    Returns:
        Exit code: 0, or 1 where something needed is not installed; a wrong option exits with 2 at once.
    """
    args = _parser().parse_args(argv)
    console = Console()
    try:
        trace = TRACE if args.profile else None
        learn = train_digits(args.model, args.epochs, args.seed, FOLDER, args.resume, trace)
    except (ModuleNotFoundError, FileNotFoundError, ValueError) as error:
        print(f"hookcb {args.command}: {error}", file=sys.stderr)  # noqa: T201  # stderr, as argparse does
        return 1
    console.print(learn.activation_stats.report())
    console.print(learn.gradient_health.report())
    console.print(_picture(learn.activation_stats), highlight=False, markup=False)
    if args.profile:
        console.print(learn.profiler.layers())
        console.print(learn.profiler.report())
        console.print(f"timeline of these steps, for ui.perfetto.dev: {TRACE}", highlight=False)
    last = learn.recorder.rows[-1]
    console.print(
        f"validation accuracy {last['accuracy']:.1%} after {args.epochs} epochs, on digits never trained on"
    )
    return 0


def _picture(stats: ActivationStats) -> str:
    if find_spec("matplotlib") is None:
        return f"no {PICTURE}, as matplotlib is not installed; pip install 'hookcb[plot]'"
    stats.color_dim().savefig(PICTURE)
    return f"histograms of every layer, batch by batch: {PICTURE}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hookcb",
        description="See inside a PyTorch training run.",
    )
    parser.add_argument("--version", action="version", version=f"hookcb {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train on real handwritten digits and show what each layer does",
        description="Train a small network on 1,437 real handwritten digits, validate it on 360 others after "
        "each epoch, and show tables of what its layers put out and of their gradients; with matplotlib also "
        "draw activations.png. Checkpoints go to hookcb-demo/.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--model", choices=["mlp", "cnn"], default="cnn", help="what to train")
    demo.add_argument("--epochs", type=_positive, default=10, help="passes over the training digits")
    demo.add_argument("--resume", action="store_true", help="go on from the last checkpoint in hookcb-demo/")
    demo.add_argument(
        "--profile", action="store_true", help="tell what each layer and phase takes; write a trace.json"
    )
    demo.add_argument("--seed", type=_seed, default=0, help="of weights, split and order of batches")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of epochs; give a whole number of 1 or more")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; give a whole number from 0 to 2**63 - 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
