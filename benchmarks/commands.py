"""Processor time of commands that train nothing, beside Python alone and an import of torch.

Run it as `python benchmarks/commands.py`; each command runs 7 times, in turns, and the least time counts.
"""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hookcb import JSONLLogger, synth_learner

ROUNDS = 7
MAIN = ("-c", "import sys; from hookcb.cli.main import main; sys.exit(main())")
COMMANDS = {
    "python -c pass": ("-c", "pass"),
    "python -c 'import torch'": ("-c", "import torch"),
    "python -c 'import hookcb'": ("-c", "import hookcb"),
    "python -c 'from hookcb import Learner'": ("-c", "from hookcb import Learner"),
    "hookcb --help": (*MAIN, "--help"),
    "hookcb --version": (*MAIN, "--version"),
    "hookcb diagnoze": (*MAIN, "diagnoze"),
    "hookcb explain unit.dead": (*MAIN, "explain", "unit.dead"),
    "hookcb tail --once run.jsonl": (*MAIN, "tail", "--once", "run.jsonl"),
    "hookcb compare a.html b.html": (*MAIN, "compare", "a.html", "b.html"),
}


def seconds(args: tuple[str, ...], folder: str) -> float:
    """Processor time of one process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_runs(folder: Path) -> None:
    """Two pages to compare, and a file of records."""
    for seed, name in enumerate(("a.html", "b.html")):
        learn = synth_learner(seed=seed)
        with learn.no_logging():
            learn.fit(2)
        learn.report(folder / name)
    logger = JSONLLogger(folder / "run.jsonl")
    for step in range(100):
        logger.log({"loss": 1 / (step + 1), "lr": 0.1}, step=step)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder))
        taken = {name: [] for name in COMMANDS}
        for _ in range(ROUNDS):
            for name, args in COMMANDS.items():
                taken[name].append(seconds(args, folder))
    table = Table("command", "processor time, least of 7")
    for name, times in taken.items():
        table.add_row(name, f"{min(times):.2f} s")
    Console().print(table)


if __name__ == "__main__":
    main()
