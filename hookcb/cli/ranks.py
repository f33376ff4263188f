"""Runs the command line on several processes, and shows their one result."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from hookcb.cli import INTERRUPTED
from hookcb.core.console import show_error
from hookcb.processes.process_group import n_processes

MAX_LINES = 20  # of what failed processes have written
PREFIX = "hookcb "  # of our own messages
OF_TORCHRUN = re.compile(r"[EWI]\d{4} ")  # beginning of its messages: the level and the date
PATIENCE = 20.0  # seconds in which processes end after Ctrl-C


def own_rank() -> int:
    """Number of this process among those that torchrun has started; 0 if it is alone."""
    return int(os.environ.get("RANK", 0)) if n_processes() > 1 else 0


def run_on_ranks(n: int, argv: Sequence[str]) -> int:
    """Runs `hookcb argv…` on `n` processes of this machine by torchrun; only rank 0 prints.

    If they fail, our own message is shown, or else the end of what they have written. Ctrl-C ends them all.

    Returns:
        Exit code: 0, or that of torchrun, or 130 after Ctrl-C.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    command += ["-m", "hookcb", *argv]
    threads = str(max(1, (os.cpu_count() or 1) // n))
    env = {"OMP_NUM_THREADS": threads, **os.environ}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        # a session of their own, so that Ctrl-C comes here alone, and torchrun is asked to end the others
        process = subprocess.Popen(command, env=env, stderr=errors, start_new_session=True)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            _end(process)
        if code:
            errors.seek(0)
            show_error(summary(errors.read().splitlines(), n))
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends torchrun, which ends its processes."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def summary(lines: Sequence[str], n: int) -> str:
    """Messages of ours in what processes have written, each once; if there is none, its last lines.

    The report of torchrun, which follows, is left out.
    """
    end = next((i for i, line in enumerate(lines) if OF_TORCHRUN.match(line) and line[0] == "E"), None)
    written = [line for line in lines[:end] if not OF_TORCHRUN.match(line)]
    if ours := list(dict.fromkeys(line for line in written if line.startswith(PREFIX))):
        return "\n".join(ours)
    return "\n".join([*written[-MAX_LINES:], f"hookcb: torchrun failed on {n} processes; see above"])
